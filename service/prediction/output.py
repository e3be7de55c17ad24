"""Output formats of a segmentation: DICOM, NIfTI, NRRD, PNG, overlay, JSON.

    dicom-seg  the mask as a DICOM SEG that refers to its source; scans that were sent as DICOM only
    dicom-sr   a DICOM measurement report (TID 1500) of the volumes, that refers to this SEG
    dicom-rtstruct  the labels as contours on the slices of the source series; volumes that were sent as DICOM
    nifti      the mask as .nii.gz on the scan's own grid and affine; volumes only: an image has no affine
    nrrd       the mask as .nrrd on the same grid, which 3D Slicer and web viewers read; volumes only
    multipart  the report (part `params`, JSON) and the mask (part `image`, NRRD or PNG) in one form
    png        the mask as an 8-bit grey PNG of the image's own size; images only
    overlay    a PNG picture for a person: mask over image, or a montage of a volume's slices
    json       labels with their volumes and confidence, warnings, timing and the receipt

In a mask a voxel's value is its class index: 0 is background, and `Locum-Labels` says which labels each other
value stands for. Labels may overlap (a cup lies inside its disc), so a value can stand for more than one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from model_store.preprocessing import display_slices, to_slices
from model_store.scan import Scan, encode_nifti, encode_nrrd, encode_png
from model_store.task import Plane, Task
from service.about import NOTICE
from service.errors import (
    NoContours,
    NoDicomSource,
    NoNiftiMask,
    NoPngMask,
    NoVolumeToReport,
    ParametersContradict,
)
from service.inference.pipeline import Segmentation
from service.inference.pool import PoolPick
from service.observation import SeenLabel
from service.prediction.dicom_seg import SegmentationType, check_codes
from service.prediction.overlay import USUAL, Panel, Pixels, choose_slices, overlay
from service.prediction.receipt import Receipt

POOL_SELECTION_TEXT: Final = (
    "For an ssf-pool (FedIns): what the scan picked; with routing=slice, what each slice of a volume did, in "
    "order."
)


class PickReport(BaseModel):
    """The entries of an ssf-pool that adapted the network to a scan or a slice."""

    entries: list[int] = Field(description="Entries, the most similar first; their mean adapts the network.")
    similarities: list[float] = Field(
        description="Cosine of each entry's key and the scan's query, -1..1. Scans with "
        "different picks were answered by differently adapted networks."
    )


def pool_selections(picked: Sequence[PoolPick] | None) -> list[PickReport] | None:
    """Describe the picked entries for a JSON answer."""
    if picked is None:
        return None
    return [PickReport(entries=list(p.entries), similarities=list(p.similarities)) for p in picked]


Voxels = Literal["labels", "uncertainty"]

Output = Literal[
    "nifti", "nrrd", "png", "overlay", "json", "multipart", "dicom-seg", "dicom-sr", "dicom-rtstruct"
]

DICOM_OUTPUTS: Final[tuple[Output, ...]] = ("dicom-seg", "dicom-sr", "dicom-rtstruct")
"""Those that refer to the DICOM series of their scan, and repeat its patient."""

MEDIA_TYPES: dict[Output, tuple[str, str]] = {
    "nifti": ("application/gzip", "mask.nii.gz"),
    "nrrd": ("application/octet-stream", "mask.nrrd"),
    "png": ("image/png", "mask.png"),
    "overlay": ("image/png", "overlay.png"),
    "json": ("application/json", "segmentation.json"),
    "multipart": ("multipart/form-data", "segmentation.multipart"),
    "dicom-seg": ("application/dicom", "segmentation.dcm"),
    "dicom-sr": ("application/dicom", "report.dcm"),
    "dicom-rtstruct": ("application/dicom", "structures.dcm"),
}


# The patient's side at the picture's left edge, as `model_store.preprocessing.geometry` turns the slices.
_LEFT_OF_PICTURE: dict[Plane, str] = {"axial": "R", "coronal": "R", "sagittal": "A"}


_COUNTED_AT_ONCE = 2**20


class LabelReport(BaseModel):
    """The size of one label in the scan."""

    classes: list[int] = Field(description="Mask values that belong to the label.")
    voxels: int = Field(description="Voxels of a volume, pixels of an image.")
    fraction: float = Field(description="Share of all voxels of the scan.")
    volume_ml: float | None = Field(
        description="Volume in mL, by the scan's own spacing; null without spacing."
    )
    confidence: float = Field(
        description="How sure the network is of the label, 0 to 1: the Dice that the mask has by the "
        "network's own probabilities. Where the mask has none of it, how sure the network is that none is "
        "there. Not a probability, and no Dice to be expected: compare it with the hospital's other answers."
    )
    review: float | None = Field(
        description="Share of the hospital's newest answers by this version that were less sure, 0 to 1: the "
        "masks of the lowest are to be looked at first. Null below 20 answers."
    )
    parts: int | None = Field(description="Connected parts; null where counting would have taken long.")
    at_border: bool = Field(description="Whether the label touches the border of the scan.")


class SegmentationReport(BaseModel):
    """The answer of `output=json`."""

    labels: dict[str, LabelReport]
    attention: dict[str, float] | None = Field(
        None,
        description="For a network with cross-attention (FedOAP): the share of attention "
        "on the scan itself (`own`) and on each site's tokens, mean over the "
        "slices; the sum is 1.",
    )
    picked: list[PickReport] | None = Field(None, description=POOL_SELECTION_TEXT)
    warnings: list[str] = Field(
        description="Differences of the scan from the task's training scans, and other warnings."
    )
    shape: list[int] = Field(description="Shape of the mask: [H, W], or the volume's own [I, J, K].")
    label_names: dict[str, int] = Field(
        description="The mask's values by name, without the background. Where labels overlap, a value's name "
        "has them all (`disc + cup`)."
    )
    centroids: dict[str, list[int]] = Field(
        description="For each of these names that the mask has: its value, and the indices of its mean voxel."
    )
    removed: dict[str, int] = Field(
        {},
        description="Voxels that each label lost of which the task keeps the largest component alone "
        "(`keep_largest`); small islands that the network found are in them.",
    )
    timing_ms: dict[str, float]
    receipt: Receipt
    notice: str = NOTICE


def choose_output(
    wanted: Output | None,
    scan: Scan,
    task: Task,
    kind: SegmentationType | None = None,
    compress: bool | None = None,
    voxels: Voxels | None = None,
    tolerance: float | None = None,
) -> Output:
    """Choose the output format. Raises OutputMismatch if it does not fit the scan or the task."""
    if voxels == "uncertainty" and wanted not in (None, "nifti", "nrrd", "png"):
        raise ParametersContradict(
            "`voxels=uncertainty` belongs to output=nifti, nrrd and png; leave it out or ask for one of them."
        )
    if kind is not None and wanted not in ("dicom-seg", "dicom-sr"):
        raise ParametersContradict("`segmentation_type` belongs to output=dicom-seg; leave it out.")
    if compress is not None and wanted not in ("nrrd", "multipart"):
        raise ParametersContradict("`compress` belongs to output=nrrd and multipart; leave it out.")
    if tolerance is not None and wanted != "dicom-rtstruct":
        raise ParametersContradict("`tolerance_mm` belongs to output=dicom-rtstruct; leave it out.")
    if wanted in DICOM_OUTPUTS:
        if scan.format != "dicom" and not scan.from_dicom:
            raise NoDicomSource(
                f"A DICOM answer refers to the DICOM series of its scan, and this scan is "
                f"{scan.format}; send the series, or ask for another output."
            )
        if scan.film:
            raise NoDicomSource(
                "A DICOM answer lies in the patient, and the frames of a film have no place there; ask for "
                "output=nifti, overlay or json."
            )
        if wanted != "dicom-rtstruct":
            check_codes(task, kind or "binary")
        if wanted == "dicom-sr" and not scan.is_volume:
            raise NoVolumeToReport(
                "A DICOM report has volumes, and a single image has none; ask for output=dicom-seg or json."
            )
        if wanted == "dicom-rtstruct" and not scan.is_volume:
            raise NoContours(
                "An RTSTRUCT has contours in the patient, and a single image has no position there; ask for "
                "output=dicom-seg or png."
            )
    if wanted is None:
        return "nifti" if scan.is_volume else "png"
    if wanted == "png" and scan.is_volume:
        raise NoPngMask(
            "The scan is a volume, and its mask is no single picture; ask for output=nifti, overlay or json."
        )
    if wanted in ("nifti", "nrrd") and not scan.is_volume:
        raise NoNiftiMask(
            "The scan is an image without position and spacing, which a NIfTI or NRRD would have to make up; "
            "ask for output=png, multipart, overlay or json."
        )
    return wanted


def label_values(task: Task) -> dict[str, list[str]]:
    """Map mask values to labels, for every class but the background, with strings as keys for JSON."""
    return {str(c.index): list(c.labels) for c in task.classes if c.index > 0}


def label_header(task: Task) -> str:
    """Format `Locum-Labels` as JSON in ASCII, since it is a header."""
    return json.dumps(label_values(task), ensure_ascii=True)


def label_names(task: Task) -> dict[str, int]:
    """Map a name for each mask value but the background's to the value: 1, 2, ... without a gap."""
    return {" + ".join(c.labels): c.index for c in task.classes if c.index > 0}


def centroids(classes: NDArray[np.uint8], task: Task) -> dict[str, list[int]]:
    """Map the names of `label_names` to [value, mean index along each axis], for values that are there."""
    found = {}
    for name, value in label_names(task).items():
        inside = classes == value
        voxels = np.count_nonzero(inside)
        if voxels:
            axes = range(inside.ndim)
            # A sum over the other axes first: the indices of every voxel would take 24 times its memory.
            along = [np.count_nonzero(inside, axis=tuple(a for a in axes if a != axis)) for axis in axes]
            means = [float(counts @ np.arange(len(counts))) / voxels for counts in along]
            found[name] = [value, *(int(mean + 0.5) for mean in means)]
    return found


def encode_multipart(report: bytes, mask: bytes, kind: Output) -> tuple[bytes, str]:
    """Encode the report and a mask of output `kind` as multipart/form-data: the body and its media type.

    The file name of `image` names its format, and `params` has none: viewers tell the parts apart by it.
    """
    boundary = f"locum-{hashlib.sha256(report + mask).hexdigest()}"
    media_type, filename = MEDIA_TYPES[kind]
    parts = (
        ('form-data; name="params"', "application/json", report),
        (f'form-data; name="image"; filename="{filename}"', media_type, mask),
    )
    lines: list[bytes] = []
    for disposition, of, content in parts:
        header = f"--{boundary}\r\nContent-Disposition: {disposition}\r\nContent-Type: {of}\r\n\r\n"
        lines += [header.encode("ascii"), content, b"\r\n"]
    body = b"".join([*lines, f"--{boundary}--\r\n".encode("ascii")])
    return body, f"{MEDIA_TYPES['multipart'][0]}; boundary={boundary}"


def label_reports(
    seen: Sequence[SeenLabel], review: Mapping[str, float | None], task: Task, voxels: int
) -> dict[str, LabelReport]:
    """Describe what was seen of each label in a mask of so many voxels, with its rank."""
    return {
        each.label: LabelReport(
            classes=list(task.label_classes(each.label)),
            voxels=each.voxels,
            fraction=each.voxels / voxels,
            volume_ml=each.volume_ml,
            confidence=each.confidence,
            review=review[each.label],
            parts=each.parts,
            at_border=each.at_border,
        )
        for each in seen
    }


def sizes(segmentation: Segmentation, task: Task) -> list[str]:
    """The size of each label in words, for a picture."""
    # In the order of memory, and in parts: bincount copies to eight bytes per voxel.
    flat, counts = segmentation.classes.ravel(order="K"), np.zeros(len(task.classes), np.int64)
    for start in range(0, flat.size, _COUNTED_AT_ONCE):
        counts += np.bincount(flat[start : start + _COUNTED_AT_ONCE], minlength=len(counts))
    voxel_ml, found = segmentation.scan.voxel_volume_ml, []
    for label in task.labels:
        voxels = int(counts[list(task.label_classes(label))].sum())
        found.append(f"{label} {voxels} px" if voxel_ml is None else f"{label} {voxels * voxel_ml:.2f} mL")
    return found


def encode(
    output: Output,
    segmentation: Segmentation,
    task: Task,
    title: str,
    warning_names: Sequence[str],
    report: Callable[[], SegmentationReport],
    *,
    compress: bool = True,
) -> tuple[bytes, str]:
    """Encode the body of the answer; return it with its media type.

    An overlay shows the warnings; `report` is called for JSON only; `compress` is for NRRD. A segmentation
    with a map of its uncertainty is encoded as this map.
    """
    media_type = MEDIA_TYPES[output][0]
    scan, found = segmentation.scan, segmentation.uncertainty_map
    classes = segmentation.classes if found is None else found
    if output == "png":
        return encode_png(classes), media_type
    if output == "overlay":
        return picture(segmentation, task, title, warning_names), media_type
    if output == "json":
        return report().model_dump_json().encode(), media_type
    if output == "multipart" and not scan.is_volume:
        return encode_multipart(report().model_dump_json().encode(), encode_png(classes), "png")
    assert scan.affine is not None
    if output == "nifti":
        return encode_nifti(classes, scan.affine, scan.mm_per_unit, scan.forms), media_type
    # NRRD has one position. By itself it is ITK's, and lies where ITK reads the scan; beside a report it lies
    # where /display shows the scan.
    affine = scan.affine_by_itk if output == "nrrd" else scan.affine
    assert affine is not None
    mask = encode_nrrd(classes, affine, scan.mm_per_unit, compress=compress)
    if output == "nrrd":
        return mask, media_type
    return encode_multipart(report().model_dump_json().encode(), mask, "nrrd")


def picture(
    segmentation: Segmentation,
    task: Task,
    title: str,
    warning_names: Sequence[str] = (),
    shown: Sequence[int] | None = None,
    compression: int = USUAL,
    slices: Sequence[Pixels] | None = None,
) -> bytes:
    """Draw the overlay as a PNG: an image, or a montage of slices spread over the mask or `shown`.

    `slices` are drawn in place of the scan's own, [H, W, 3] each.
    """
    # Labels can overlap and classes cannot: the legend names the classes that are drawn, the last line how
    # much there is of each label.
    legend = [(c.index, " + ".join(c.labels)) for c in task.classes[1:]]
    beware = [f"warnings: {', '.join(warning_names)}"] if warning_names else []
    footer = "  ·  ".join([*sizes(segmentation, task), *beware, NOTICE])
    return overlay(_panels(segmentation, task, shown, slices), legend, title, footer, compression)


def common_slices(segmentations: Sequence[Segmentation]) -> list[int]:
    """Choose slices spread over all masks of one scan, so that pictures can be compared."""
    counts = [np.count_nonzero(to_slices(s.classes, s.geometry), axis=(1, 2)) for s in segmentations]
    return choose_slices(np.sum(counts, axis=0))


def _panels(
    segmentation: Segmentation, task: Task, shown: Sequence[int] | None, slices: Sequence[Pixels] | None
) -> list[Panel]:
    pictures = display_slices(segmentation.scan, task) if slices is None else slices
    classes = to_slices(segmentation.classes, segmentation.geometry)
    spacing = segmentation.geometry.spacing
    if spacing is None:
        return [Panel(pictures[0], classes[0])]
    chosen = common_slices([segmentation]) if shown is None else shown
    count, aspect = len(pictures), spacing[1] / spacing[2]
    left = _LEFT_OF_PICTURE[task.plane]
    return [Panel(pictures[i], classes[i], f"{task.plane} {i + 1} of {count}", aspect, left) for i in chosen]
