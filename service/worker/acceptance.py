"""Score a version on a hospital's scans with masks, and report whether it does what was asked of it.

What is scored is what answers: `SegmentationPredictor` reads and segments each scan, the code of `/segment`
and of the jobs that answer one scan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.errors import LocumStoreError
from model_store.manifest import GRAPH
from model_store.preprocessing import classes_on
from model_store.scan import decode_mask
from model_store.task import IGNORED, Task
from personalization.acceptance import FEWEST, Measure, figures_of, measure, merged, powered
from service.about import locum_version
from service.acceptance.report import judged, sealed
from service.adaptation.acceptances import AcceptanceOptions
from service.catalog.adapted import origin_of
from service.catalog.network import Selection, chosen_before, select_network
from service.catalog.served import ServedVersion, serving
from service.catalog.version import ResolvedVersion
from service.cohorts import cohorts, masks
from service.cohorts.files import ScanFile, label_of
from service.cohorts.patients import numbered
from service.database.hospitals import site_of_hospital
from service.errors import AdaptationRejected
from service.inference.pipeline import PreparedScan, Segmentation, Stopwatch
from service.inference.shift import Reference
from service.observation import Reviews, spacing_of
from service.prediction.answer import LoadedGraph, receipt_of
from service.prediction.options import SegmentOptions
from service.prediction.output import common_slices, picture
from service.prediction.overlay import QUICK
from service.prediction.segmentation import SegmentationPredictor
from service.serving import assignments
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome, as_json
from service.worker.cohort_images import cohort_files
from service.worker.pacs_geometry import through_pacs
from service.worker.pictures import load

WORST: Final = 5
# Figures of a report: more digits say nothing, and fewer bytes are digested.
_DIGITS = 6

Classes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Answering:
    """A version, loaded as it answers a hospital's scans."""

    attempt: Attempt
    selection: Selection
    graph: LoadedGraph

    @classmethod
    def of(cls, attempt: Attempt, selection: Selection) -> _Answering:
        settings = attempt.settings
        behind = origin_of(settings.open_store(), selection.offered)
        session = load(selection.model.read(GRAPH), settings, Reference.of(behind, selection.model))
        return cls(attempt, selection, LoadedGraph(session, receipt_of(selection.model), behind.name))

    @property
    def task(self) -> Task:
        return self.selection.manifest.task

    def answer(self, file: ScanFile) -> tuple[SegmentationPredictor, PreparedScan, Segmentation]:
        """One scan, read and segmented. Raises ScanError, TaskError, CohortDeleted, JobCancelled."""
        return self.answer_bytes(file.read(), file.sha256)

    def answer_bytes(
        self, data: bytes, sha256: str
    ) -> tuple[SegmentationPredictor, PreparedScan, Segmentation]:
        """The same of a scan that is at hand, with its digest."""
        attempt = self.attempt
        predictor = SegmentationPredictor(
            request_id=attempt.job.request_id or attempt.job.id,
            options=SegmentOptions(hospital=attempt.job.hospital, guard="warn"),
            selection=self.selection,
            input_sha256=f"sha256:{sha256}",
            input_bytes=len(data),
            limits=scan_limits(attempt.settings, self.task),
            watch=Stopwatch(),
            reviews=Reviews(attempt.database),
            between=attempt.between,
        )
        reading = predictor.read(data)
        return predictor, reading, predictor.segment(reading, self.graph)


def run_acceptance(attempt: Attempt) -> AttemptOutcome:
    """Answer every scan of the cohort, compare those with masks, and report.

    Raises:
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    options: AcceptanceOptions = attempt.options
    store = attempt.settings.open_store()
    answering = _Answering.of(attempt, chosen_before(store, attempt.job.parent, options.chosen))
    # Before all scans are scored: a PACS that does not answer postpones the job.
    geometry = through_pacs(
        attempt,
        lambda data: answering.answer_bytes(data, sha256(data).removeprefix("sha256:")),
        answering.graph,
    )
    files, drawn = cohort_files(attempt), _masks(attempt)
    patients = numbered([file.name for file in files], answering.task)
    scored = _score(attempt, answering, files, drawn)
    scans = [
        {"scan": f"sha256:{file.sha256}", "patient": patient, **scored[file.sha256]}
        for file, patient in zip(files, patients, strict=True)
    ]
    rollback = _rehearse(attempt, answering, files[0])
    report = _report(attempt, answering, scans) | {"rollback": rollback, "geometry": geometry}
    by_digest = {f"sha256:{file.sha256}": file for file in files}
    report["worst"] = _draw(attempt, answering, _worst(scans), by_digest, drawn)
    return AttemptOutcome("succeeded", result=sealed(as_json(report), store.signatures.signer))


def _masks(attempt: Attempt) -> dict[str, ScanFile]:
    """The files of the masks, by the names of their scans."""
    assert attempt.job.cohort is not None
    with attempt.database.read() as session:
        rows = masks.of_cohort(session, attempt.job.cohort)
    return {name: cohorts.file_of(attempt.settings, row, name) for name, row in rows.items()}


def _score(
    attempt: Attempt, answering: _Answering, files: Sequence[ScanFile], drawn: Mapping[str, ScanFile]
) -> dict[str, Any]:
    """What is known of each scan's answer, by digest, as JSON. A later attempt goes on where one ended."""
    known = attempt.read_checkpoint()
    scored: dict[str, Any] = {} if known is None else json.loads(known)
    for number, file in enumerate(files):
        attempt.set_stage("scoring", epoch=number, epochs=len(files))
        if file.sha256 not in scored:
            try:
                scored[file.sha256] = as_json(_scored(answering, file, drawn.get(file.name)))
            except LocumStoreError as error:
                raise type(error)(f"{label_of(file.sha256)}: {error}") from error
            attempt.folder.write(attempt.folder.CHECKPOINT, json.dumps(scored).encode())
    if not any(each["labels"] for each in scored.values()):
        raise AdaptationRejected("no scan of the cohort has a mask any more: add masks, and start again")
    return scored


def _scored(answering: _Answering, file: ScanFile, mask: ScanFile | None) -> dict[str, Any]:
    predictor, reading, found = answering.answer(file)
    task, observed = answering.task, predictor.observe(reading, found, answering.graph)
    seconds = sum(predictor.watch.stages.values()) / 1000
    return {
        "seconds": round(seconds, 3),
        "unlike": [warning.text for warning in reading.warnings],
        # Every digit of what later answers are ranked among.
        "shift": observed.shift,
        "shift_at": observed.shift_at,
        "confidence": dict(found.confidence),
        "seen": {
            each.label: {"voxels": each.voxels, "volume_ml": each.volume_ml} for each in observed.labels
        },
        "labels": {}
        if mask is None
        else dict(zip(task.labels, _compared(answering, reading, found, mask), strict=True)),
    }


def _compared(
    answering: _Answering, reading: PreparedScan, found: Segmentation, mask: ScanFile
) -> list[dict[str, Any]]:
    """An answer beside its mask: the measures of every label."""
    attempt, task = answering.attempt, answering.task
    options: AcceptanceOptions = attempt.options
    outlined = decode_mask(mask.read(), scan_limits(attempt.settings))
    measures = measure(
        found.classes,
        classes_on(reading.scan, outlined, task),
        [task.label_classes(label) for label in task.labels],
        ignored=IGNORED,
        spacing=spacing_of(reading.scan),
        voxel_ml=reading.scan.voxel_volume_ml,
        tolerance=1.0 if options.thresholds is None else options.thresholds.tolerance,
    )
    return [asdict(each) | {"dice": each.dice} for each in measures]


# ------------------------------------------------------------------------------------------ the report


def _report(attempt: Attempt, answering: _Answering, scans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything but the rollback and the pictures."""
    options: AcceptanceOptions = attempt.options
    selection, task = answering.selection, answering.task
    by_patient = _by_patient(scans, task)
    drawn = [patient for patient, own in by_patient.items() if own.measures]
    labels = {}
    for label in task.labels:
        figures = figures_of([by_patient[patient].measures[label] for patient in drawn])
        labels[label] = _rounded(asdict(figures) | {"prediction_powered": _powered(label, by_patient)})
    verdict, checks = judged(labels, options.thresholds)
    seconds = [each["seconds"] for each in scans]
    shifts = [each["shift"] for each in scans if each["shift"] is not None]
    return {
        "model": answering.graph.model,
        "version": str(selection.offered),
        "version_digest": selection.offered.digest,
        "graph": answering.graph.session.digest,
        "precision": selection.precision,
        "personalization": selection.header,
        "hospital": attempt.job.hospital,
        "job": attempt.job.id,
        "measured_by": options.by,
        "started_at": attempt.job.created_at.isoformat(),
        "locum": locum_version(),
        "verdict": verdict,
        "checks": checks,
        "thresholds": None if options.thresholds is None else options.thresholds.model_dump(mode="json"),
        "acceptances_before": options.before,
        "fewest": FEWEST,
        "n": len(drawn),
        "patients": len(by_patient),
        "without_masks": len(by_patient) - len(drawn),
        "distance_unit": "mm" if task.is_volume or _has_volumes(scans) else "pixels",
        "labels": labels,
        "unlike": sum(bool(each["unlike"]) for each in scans),
        "shift": None if not shifts else _rounded({"median": median(shifts), "largest": max(shifts)}),
        "seconds": _rounded({"median": median(seconds), "longest": max(seconds)}),
        "scans": [dict(each) for each in scans],
    }


@dataclass(frozen=True)
class _Patient:
    """All scans of a patient: the merged measures by label, none without a mask, and mean confidences."""

    measures: Mapping[str, Measure]
    confidence: Mapping[str, float]


def _by_patient(scans: Sequence[Mapping[str, Any]], task: Task) -> dict[int, _Patient]:
    grouped: dict[int, list[Mapping[str, Any]]] = {}
    for each in scans:
        grouped.setdefault(each["patient"], []).append(each)
    found = {}
    for patient, own in grouped.items():
        drawn = [each["labels"] for each in own if each["labels"]]
        measures = {
            label: merged([_measure(each[label]) for each in drawn]) for label in task.labels if drawn
        }
        confidence = {
            label: float(np.mean([each["confidence"][label] for each in own])) for label in task.labels
        }
        found[patient] = _Patient(measures, confidence)
    return found


def _measure(said: Mapping[str, Any]) -> Measure:
    """From JSON, where what is not a number is null."""
    surface_dice, hd95 = (
        math.nan if said[name] is None else float(said[name]) for name in ("surface_dice", "hd95")
    )
    found, drawn, both = (int(said[name]) for name in ("found", "drawn", "both"))
    return Measure(found, drawn, both, said["found_ml"], said["drawn_ml"], surface_dice, hd95)


def _powered(label: str, patients: Mapping[int, _Patient]) -> dict[str, Any] | None:
    """The mean Dice with the patients without masks, by the rank of confidence that `review` sorts by.

    None with too few masks, without other patients, and of a label that some patients do not have: whether
    the others have it is not known.
    """
    drawn = {key: own for key, own in patients.items() if own.measures}
    others = [key for key in patients if key not in drawn]
    if len(drawn) < FEWEST or not others or not all(own.measures[label].drawn for own in drawn.values()):
        return None
    keys = [*drawn, *others]
    ranks = dict(zip(keys, rankdata([patients[key].confidence[label] for key in keys]), strict=True))
    found = powered(
        [own.measures[label].dice for own in drawn.values()],
        [ranks[key] / len(keys) for key in drawn],
        [ranks[key] / len(keys) for key in others],
    )
    return _rounded(asdict(found))


def _has_volumes(scans: Sequence[Mapping[str, Any]]) -> bool:
    return any(label["found_ml"] is not None for each in scans for label in each["labels"].values())


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Round every float, also in tuples."""

    def of(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, _DIGITS)
        return [of(each) for each in value] if isinstance(value, tuple | list) else value

    return {name: of(value) for name, value in figures.items()}


# ------------------------------------------------------------------------------------------ the worst


def _worst(scans: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The scans with the lowest mean Dice over the labels that were drawn: digest and Dice."""
    found = []
    for each in scans:
        dice = [label["dice"] for label in each["labels"].values() if label["drawn"]]
        if dice:
            found.append((str(each["scan"]), float(np.mean(dice))))
    return sorted(found, key=lambda each: each[1])[:WORST]


def _draw(
    attempt: Attempt,
    answering: _Answering,
    worst: Sequence[tuple[str, float]],
    files: Mapping[str, ScanFile],
    drawn: Mapping[str, ScanFile],
) -> list[dict[str, Any]]:
    """Draw the answer and the mask of each, on the same slices. Returns what the report says of them."""
    said = []
    for number, (scan, dice) in enumerate(worst, start=1):
        attempt.set_stage("picturing", epoch=number - 1, epochs=len(worst))
        _, reading, found = answering.answer(files[scan])
        outlined = decode_mask(drawn[files[scan].name].read(), scan_limits(attempt.settings))
        classes = classes_on(reading.scan, outlined, answering.task)
        mask = replace(found, classes=np.where(classes == IGNORED, np.uint8(0), classes))
        shown = common_slices([found, mask])
        pictures = {}
        for when, each in (("answer", found), ("drawn", mask)):
            title = f"scan {number}  ·  {when}  ·  Dice {dice:.3f}"
            content = picture(each, answering.task, title, shown=shown, compression=QUICK)
            attempt.folder.write_picture(str(number), when, content)
            pictures[when] = sha256(content)
        said.append({"scan": scan, "dice": round(dice, _DIGITS), "pictures": pictures})
    return said


# ------------------------------------------------------------------------------------------ the rollback


class _Undone(Exception):
    """Ends the rehearsal's transaction, so that nothing of it is kept."""


def _rehearse(attempt: Attempt, answering: _Answering, file: ScanFile) -> dict[str, Any]:
    """Assign the version, roll back, and let what serves now answer a scan before and after: all but kept.

    What serves now is opened as a whole, which verifies every byte. The serving log is changed in a
    transaction that is undone.
    """
    attempt.set_stage("rehearsing")
    hospital, model = attempt.job.hospital, answering.graph.model
    assert hospital is not None
    store, offered = attempt.settings.open_store(), answering.selection.offered
    with attempt.database.read() as session:
        now = serving(store, session, hospital, model, None, attempt.settings.new_versions)
        home = site_of_hospital(session, hospital)
    if now.version is None or now.digest is None:
        return {
            "rehearsed": False,
            "why": "nothing serves this hospital yet, so there is nothing to return to",
        }
    if now.digest == offered.digest:
        return {"rehearsed": False, "why": f"'{offered}' serves this hospital already"}
    if now.withdrawn:
        return {"rehearsed": False, "why": f"'{now.artefact}@{now.version}' was withdrawn: assign another"}
    artefact = store.open(f"{now.artefact}@{now.digest}")
    found = ResolvedVersion(artefact, "assigned", home, hospital, now.assignment)
    before = _answer_of(attempt, select_network(store, found), file)
    restored = _assigned_and_rolled_back(attempt, hospital, model, now, offered)
    after = _answer_of(attempt, select_network(store, replace(found, artefact=store.open(restored))), file)
    return {"rehearsed": True, "returns_to": str(artefact), "answer": before, "same": before == after}


def _answer_of(attempt: Attempt, selection: Selection, file: ScanFile) -> str:
    """The digest of the mask that a version answers a scan with."""
    _, _, found = _Answering.of(attempt, selection).answer(file)
    return sha256(np.ascontiguousarray(found.classes).tobytes())


def _assigned_and_rolled_back(
    attempt: Attempt, hospital: str, model: str, now: ServedVersion, offered: Artefact
) -> str:
    """What a rollback would make serve again, `name@digest`."""
    actor, reason = attempt.options.by, f"rehearsal of job {attempt.job.id}"
    restored: list[str] = []
    try:
        with attempt.database.write() as session:
            if now.because == "newest":
                assert now.version is not None
                assert now.digest is not None
                assignments.keep(session, hospital, model, version=now.version, digest=now.digest)
            seen = assignments.decided(assignments.assignment(session, hospital, model))
            made = assignments.assign(
                session,
                hospital,
                model,
                version=offered.version,
                digest=offered.digest,
                expected=seen,
                actor=actor,
                reason=reason,
                artefact=None if offered.name == model else offered.name,
            )
            back = assignments.roll_back(
                session, hospital, model, expected=made.sequence, actor=actor, reason=reason
            )
            restored.append(f"{back.artefact or model}@{back.digest}")
            raise _Undone
    except _Undone:
        return restored[0]
