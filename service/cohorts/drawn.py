"""Check a mask against its scan on arrival, and remove the patient from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from model_store.errors import MaskMismatch
from model_store.preprocessing import align, by_labels, by_numbers, check_values, label_values
from model_store.scan import Scan, Segment, decode_mask, encode_nifti, encode_png
from model_store.task import Task
from service.cohorts.intake import deidentify_upload, uid_key
from service.cohorts.masks import DecodedMask
from service.runtime.spool import Upload
from service.settings import Settings, scan_limits


def take_in_mask(
    upload: Upload,
    below: Scan,
    task: Task | None,
    settings: Settings,
    names: Mapping[int, str] | None = None,
) -> DecodedMask:
    """Check the mask of a scan. In DICOM or on other axes, it becomes NIfTI on the scan's grid. Blocking.

    `names` are those of its values, as a viewer knows them. The upload is replaced by what is to be stored.
    Raises ScanError: it is no mask, on another grid, or has
    values that the task does not name.
    """
    sent = named = decode_mask(upload.read(), scan_limits(settings), below, uid_key(settings))
    if names:
        named = replace(sent, segments={value: Segment(name) for value, name in names.items()})
    drawn, notes = by_numbers(named) if task is None else by_labels(named, task)
    values = label_values(drawn)
    aligned = align(in_units_of(below, drawn), below.grid, below.affine, below.other_affine)
    if task is not None:
        check_values(values, task)
    if aligned is not sent or sent.format.startswith("dicom"):
        return DecodedMask(_rewritten(aligned, below, values, upload), values, notes)
    deidentify_upload(upload, settings)
    return DecodedMask(drawn.format, values)


def in_units_of(scan: Scan, mask: Scan) -> Scan:
    """The mask with its affine in the units of the scan's file: a viewer writes millimetres."""
    if mask.affine is None or scan.mm_per_unit == mask.mm_per_unit:
        return mask
    ratio = mask.mm_per_unit / scan.mm_per_unit
    affine = np.diag([ratio] * 3 + [1.0]) @ mask.affine
    forms = None if mask.forms is None else mask.forms.scaled(ratio)
    return replace(mask, affine=affine, mm_per_unit=scan.mm_per_unit, forms=forms)


def _rewritten(mask: Scan, scan: Scan, values: list[int], upload: Upload) -> str:
    if values[-1] > 255 or values[0] < 0:
        raise MaskMismatch(f"expected mask values 0 to 255, found {values[0]} to {values[-1]}")
    labels = mask.voxels[..., 0].astype(np.uint8)
    if mask.affine is None:
        upload.replace(encode_png(labels))
        return "png"
    upload.replace(encode_nifti(labels, mask.affine, mask.mm_per_unit, scan.forms))
    return "nifti"
