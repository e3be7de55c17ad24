"""Send the answer to one series through a PACS, and compare what comes back voxel by voxel.

A mask that a PACS, or what stands before it, turned, cut or recoded lies elsewhere on the patient than it was
found, and no figure of an acceptance shows that.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from pydicom import dcmread

from model_store.digest import sha256
from model_store.errors import MaskMismatch, ScanError
from model_store.preprocessing import classes_on
from model_store.scan import decode_mask
from service.inference.pipeline import PreparedScan, Segmentation
from service.pacs.client import PacsClient
from service.pacs.configuration import servers_of
from service.prediction.answer import LoadedGraph
from service.prediction.segmentation import SegmentationPredictor
from service.settings import scan_limits
from service.worker.attempt import Attempt
from service.worker.pacs import note, wanted, with_pacs

Answer = Callable[[bytes], tuple[SegmentationPredictor, PreparedScan, Segmentation]]


def through_pacs(attempt: Attempt, answer: Answer, graph: LoadedGraph) -> dict[str, Any]:
    """What the report says of it: whether it was tested, and equal; else why not, or what differed.

    `answer` reads and segments a scan.

    Raises:
        Postponed: the PACS does not answer; a later attempt goes on.
        ServiceError, ScanError: the PACS has no such series, it cannot be answered, or the SEG is refused.
    """
    if attempt.options.pacs is None:
        there = servers_of(attempt.settings.pacs, str(attempt.job.hospital))
        why = "no PACS is configured for this hospital"
        if there:
            why = f"no series was named; the hospital may use PACS {', '.join(sorted(there))}"
        return {"tested": False, "why": why}
    return with_pacs(attempt, lambda attempt, pacs: _round_trip(attempt, pacs, answer, graph))


def _round_trip(attempt: Attempt, pacs: PacsClient, answer: Answer, graph: LoadedGraph) -> dict[str, Any]:
    asked, limits = wanted(attempt), scan_limits(attempt.settings)
    attempt.set_stage("fetching")
    data = pacs.fetch_series(asked["study"], asked["series"], limits)
    note(attempt, "scan.fetched", pacs, scan=sha256(data))
    predictor, reading, found = answer(data)
    if reading.warnings:
        words = "; ".join(each.text for each in reading.warnings)
        why = f"the guard warns of the series ({words}), and nothing was stored in PACS '{pacs.name}'"
        return {"tested": False, "why": why}
    made = predictor.dicom_seg(reading, found, graph)
    attempt.set_stage("storing")
    new = pacs.store(made, attempt.check_cancelled)
    header = dcmread(io.BytesIO(made), stop_before_pixels=True)
    note(attempt, "mask.stored", pacs, new=new)
    back = pacs.fetch_series(str(header.StudyInstanceUID), str(header.SeriesInstanceUID), limits)
    said = {"tested": True, "pacs": pacs.name, "found": int(np.count_nonzero(found.classes))}
    try:
        classes = classes_on(reading.scan, decode_mask(back, limits), predictor.selection.manifest.task)
    except MaskMismatch as error:
        return said | {"equal": False, "differing": None, "why": f"it is on another grid: {error}"}
    except ScanError as error:
        return said | {"equal": False, "differing": None, "why": f"it cannot be read: {error}"}
    differing = int(np.count_nonzero(classes != found.classes))
    what = f"{differing} of {classes.size} voxels are another label" if differing else None
    return said | {"equal": not differing, "differing": differing, "why": what}
