"""What the service answers, as frozen dataclasses; field names are those of the HTTP API.

`openapi.yaml` has the meaning of every field, and a test compares it with these classes. A field `raw` has
the whole JSON object.
"""

from __future__ import annotations

import gzip
import io
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from locum.errors import ScanInvalid

JobState = Literal["queued", "running", "cancelling", "succeeded", "fell_back", "failed", "cancelled"]
ENDED = ("succeeded", "fell_back", "failed", "cancelled")
"""States after which a job does not change."""

Raw = dict[str, Any]


@dataclass(frozen=True)
class Artefact:
    """`name@version` of an artefact, and its digest."""

    name: str
    digest: str


@dataclass(frozen=True)
class Receipt:
    """Everything that an answer depends on: the same input and receipt give the same mask, byte for byte."""

    request: str
    input_sha256: str
    input_bytes: int
    model: Artefact
    network: Artefact
    graph: str
    personalization: str
    why: str
    provider: str
    options: dict[str, Any]
    site: str | None = None
    cluster: str | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Label:
    """One label in a scan. `volume_ml` is None for an image, which has no spacing.

    `confidence` says how sure the network was, 0 to 1; `review` which share of the hospital's newest answers
    was less sure, None where there are too few.
    """

    classes: tuple[int, ...]
    voxels: int
    fraction: float
    volume_ml: float | None
    confidence: float
    review: float | None


@dataclass(frozen=True)
class Report:
    """What the service says of a mask: labels, warnings, receipt."""

    labels: dict[str, Label]
    warnings: tuple[str, ...]
    shape: tuple[int, ...]
    label_names: dict[str, int]
    receipt: Receipt
    attention: dict[str, float] | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Segmentation:
    """A mask and its report. For research use only.

    Attributes:
        voxels: uint8, [I, J, K] of a volume or [H, W] of an image: the classes, 0 is background.
            `report.label_names` has their names.
        mask: the same as an image of nibabel, on the scan's own grid and affine.
        report: of the service.
    """

    voxels: NDArray[np.uint8]
    report: Report
    _mask: nib.Nifti1Image | None = field(repr=False)

    @property
    def mask(self) -> nib.Nifti1Image:
        """The mask of a volume. Raises ScanInvalid for an image, which has no affine: use `voxels`."""
        if self._mask is None:
            raise ScanInvalid("the scan is an image without position and spacing: its mask is in `voxels`")
        return self._mask

    @property
    def is_volume(self) -> bool:
        """Whether the scan was a volume."""
        return self._mask is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the scan and the answer, such as a scan that is unlike the training scans."""
        return self.report.warnings

    @property
    def receipt(self) -> Receipt:
        """What the answer depends on."""
        return self.report.receipt

    @cached_property
    def content(self) -> bytes:
        """The mask as a file: .nii.gz of a volume, .png of an image. Equal masks give equal bytes."""
        if self._mask is None:
            return _png(self.voxels)
        return gzip.compress(self._mask.to_bytes(), 1, mtime=0)

    @property
    def suffix(self) -> str:
        """That of a file with `content`."""
        return ".png" if self._mask is None else ".nii.gz"

    def save(self, path: str | Path) -> None:
        """Write `content`; a file that was there is replaced at once, not piece by piece. Raises OSError."""
        write_whole(Path(path), self.content)


@dataclass(frozen=True)
class Classification:
    """The class of a scan. For research use only."""

    predicted: str
    probabilities: dict[str, float]
    entropy: float
    warnings: tuple[str, ...]
    receipt: Receipt
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Cohort:
    """Scans of a hospital for a job; they expire."""

    id: str
    hospital: str
    note: str | None
    scans: int
    bytes: int
    created_at: datetime
    expires_at: datetime
    deleted_at: datetime | None
    name: str | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class CohortMask:
    """The mask of a scan of a cohort; `values` are those in it."""

    sha256: str
    bytes: int
    format: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class CohortScan:
    """A scan of a cohort, as it is stored: a DICOM series is de-identified, so its digest is another."""

    name: str
    sha256: str
    bytes: int
    format: str
    created_at: datetime
    mask: CohortMask | None = None


@dataclass(frozen=True)
class Candidate:
    """The version that a job published. It serves no hospital until it is assigned."""

    reference: str
    name: str
    version: int
    digest: str


@dataclass(frozen=True)
class Check:
    """One check of a gate; `value` is None where it was not measured."""

    name: str
    passed: bool
    value: float | None
    bound: str
    limit: float | None
    meaning: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Gate:
    """The verdict on a candidate."""

    passed: bool
    checks: tuple[Check, ...]
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Status:
    """The state of a job in words: a word or two, a sentence, and what it does until it has finished."""

    words: str
    sentence: str
    doing: str | None


@dataclass(frozen=True)
class Section:
    """A part of a job's card, in sentences; `tone` is `good` or `bad` for a verdict.

    `reasons` say what speaks against the candidate; `raw` has the figures.
    """

    title: str
    tone: str
    sentences: tuple[str, ...]
    reasons: tuple[str, ...]
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class JobSummary:
    """A job, in a list."""

    id: str
    kind: str
    state: str
    hospital: str | None
    model: str | None
    attempt: int
    queue_position: int | None
    progress: dict[str, Any]
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    passed: bool | None = field(default=None, kw_only=True)
    cohort: str | None = field(default=None, kw_only=True)
    status: Status | None = field(default=None, kw_only=True)

    @property
    def ended(self) -> bool:
        """Whether it does not change any more."""
        return self.state in ENDED


@dataclass(frozen=True)
class Job(JobSummary):
    """A job. In state `fell_back` the adaptation was stopped or no epoch was better, so step 0 was kept."""

    options: dict[str, Any]
    candidate: Candidate | None
    gate: Gate | None
    warnings: tuple[str, ...]
    no_worker: str | None
    sections: tuple[Section, ...] = field(default=(), kw_only=True)
    raw: Raw = field(default_factory=dict, repr=False, compare=False)

    @property
    def verdict(self) -> Section | None:
        """The section that judges what the job made, as the page shows it; None without a verdict."""
        return next((each for each in self.sections if each.tone in ("good", "bad")), None)


@dataclass(frozen=True)
class Event:
    """Something that happened to a job: `state`, `progress`, `epoch`, `gate` or `warning`."""

    id: int
    type: str
    data: dict[str, Any]

    @property
    def last(self) -> bool:
        """Whether it is the job's last one."""
        return self.type == "state" and self.data.get("state") in ENDED


@dataclass(frozen=True)
class Hospital:
    """A hospital; a member of the federation has a `site`, the own model of which may answer others."""

    id: str
    name: str
    site: str | None
    shares_model: bool = False


@dataclass(frozen=True)
class Assignment:
    """One line of the serving log."""

    sequence: int
    artefact: str
    version: int
    digest: str
    actor: str
    reason: str
    at: datetime
    restores: int | None
    override: bool
    by_default: bool


@dataclass(frozen=True)
class Serving:
    """The version that serves a hospital for a model: `assigned`, `kept`, `newest` or `nothing`."""

    hospital: str
    model: str
    artefact: str | None
    version: int | None
    digest: str | None
    because: str
    withdrawn: bool
    newer: str | None
    flagged: tuple[str, ...]
    assignment: Assignment | None


@dataclass(frozen=True)
class ObservedLabel:
    """One label of an answer; see `Label`."""

    confidence: float
    voxels: int
    volume_ml: float | None
    parts: int | None
    at_border: bool


@dataclass(frozen=True)
class Observation:
    """What is known of one answer: numbers, with no pixel and no name.

    `version` is the digest of the version that answered; `scan` a keyed digest, equal for equal scans. In a
    review, `review` has by label the share of the other answers that were less sure.
    """

    id: int
    at: datetime
    model: str
    version: str
    request: str
    way: str
    scan: str
    scanner: str | None
    shift: float | None
    warnings: tuple[str, ...]
    looked_at: datetime | None
    looked_by: str | None
    labels: dict[str, ObservedLabel]
    review: dict[str, float] | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class LabelChange:
    """What a person changed of one label; None where there is nothing to measure."""

    dice: float | None
    surface_dice: float | None
    hd95: float | None
    added_ml: float | None
    removed_ml: float | None
    added_voxels: int
    removed_voxels: int


@dataclass(frozen=True)
class Correction:
    """What a person made of one answer. `labels` is None until a worker has compared both.

    `accepted`: it was right as it was. `cohort` and `scan` say where scan and mask are kept. `exact`: the
    answer that it was compared with has the voxels of the one that was served.
    """

    id: int
    hospital: str
    model: str
    version: str
    request: str
    scanner: str | None
    answered_at: datetime
    at: datetime
    actor: str
    accepted: bool
    state: str
    reason: str | None
    cohort: str | None
    scan: str | None
    exact: bool | None
    seconds: float | None = None
    note: str | None = None
    labels: dict[str, LabelChange] | None = None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class FirstSignature:
    """A change outside the plan that one person has signed; it waits for a second."""

    version: str
    actor: str
    reason: str
    at: datetime


@dataclass(frozen=True)
class ChangePlan:
    """Which changes of a hospital's model one approver may assign; `plan` is None without one."""

    hospital: str
    model: str
    plan: dict[str, Any] | None
    actor: str | None
    reason: str | None
    since: datetime | None
    waiting: tuple[FirstSignature, ...]
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class ComparedLabel:
    """One label by the version that serves and by its shadow, over the scans of both."""

    answers: int
    agreement: float | None
    bias_ml: float | None
    served_confidence: float | None
    shadow_confidence: float | None
    served_dice: float | None
    shadow_dice: float | None


@dataclass(frozen=True)
class Shadow:
    """A version that answers unseen beside the one that serves, and how both compare.

    `gain` is the mean gain of Dice on the answers that persons corrected or accepted, `at_least` its
    one-sided 95 % lower bound. `raw` has the points.
    """

    hospital: str
    model: str
    artefact: str
    version: str
    every: int
    began: datetime
    ended: datetime | None
    ended_by: str | None
    answers: int
    exact: int
    labels: dict[str, ComparedLabel]
    corrected: int
    gain: float | None
    at_least: float | None
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Alarm:
    """A stream of which the answers are not as they were since `since`; `up` is None for silence."""

    id: int
    stream: str
    at: datetime
    since: datetime
    up: bool | None


@dataclass(frozen=True)
class Watch:
    """The watch over the answers to one scanner's scans by one model at a hospital.

    `state` is `routine`, `watch` or `investigate`; `stop` what happens to answers at the last. `streams` says
    how far each sum is on the way to its limit: 1 or more is an alarm.
    """

    hospital: str
    model: str
    scanner: str | None
    state: str
    since: datetime | None
    learning: bool
    answers: int
    last: datetime
    months: float
    stop: str
    price: str | None
    streams: dict[str, float]
    alarms: tuple[Alarm, ...]
    raw: Raw = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Tombstone:
    """Who withdrew a version, and why."""

    actor: str
    reason: str
    time: datetime


@dataclass(frozen=True)
class Version:
    """A published version."""

    version: int
    digest: str
    published: datetime
    withdrawn: Tombstone | None
    flagged: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A model that requests can name. `answers` says by which route; `hospital` is that of an adapted
    version; `masks` says whether adapting it needs masks of some scans ("required", "optional", "none"), and
    `presets` what a job can be asked for; `channel_names` are those of channels that are files of their own;
    `imported` says where a model from elsewhere comes from; `untrusted`, that `latest` is None or not its
    newest version for want of a trusted key's signature.
    """

    name: str
    kind: str
    summary: str
    adaptable: bool
    hospital: str | None
    latest: Version | None
    task: str
    answers: str
    labels: tuple[str, ...]
    sites: tuple[str, ...]
    personalizations: tuple[str, ...]
    channel_names: tuple[str, ...] = ()
    masks: str = "optional"
    presets: tuple[str, ...] = ()
    imported: str | None = None
    untrusted: bool = False


@dataclass(frozen=True)
class Session:
    """Who the caller is; `hospitals` is None for all of them."""

    actor: str
    authenticated: bool
    roles: tuple[str, ...]
    hospitals: tuple[str, ...] | None


@dataclass(frozen=True)
class Part:
    """A part of the service, such as its database."""

    ok: bool
    required: bool
    detail: str


@dataclass(frozen=True)
class Readiness:
    """`ready`, `degraded` (it segments, and jobs wait) or `not-ready`."""

    status: str
    parts: dict[str, Part]


@dataclass(frozen=True)
class File:
    """An answer as the service sent it: an overlay, a DICOM SEG, a card."""

    content: bytes
    media_type: str
    headers: dict[str, str] = field(repr=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside and rename it: what is there is whole, also after an interruption.

    Raises OSError with the path, also where the disk is full, and leaves no half-written file there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        # The system names no file in the error of a write.
        raise OSError(error.errno, error.strerror, str(path)) from None


def _png(pixels: NDArray[np.uint8]) -> bytes:
    image = pillow()
    content = io.BytesIO()
    image.fromarray(np.ascontiguousarray(pixels)).save(content, "PNG", compress_level=3)
    return content.getvalue()


def pillow() -> Any:
    """Pillow's module of images, which only 2-D images need. Raises ScanInvalid where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ScanInvalid("PNG images need Pillow: pip install pillow") from None
    return Image
