"""Read a series of a PACS and the patient's earlier ones by one version, and say what changed.

A figure that another version made is no measure of a change: the version may differ, not the patient. So
every series is read again, and the figures of the SEGs and SRs in the PACS stand beside what is read, each
with who made it. The PACS says which series are the patient's; what identifies them is in the answer alone,
which expires.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
from scipy.stats import t as student

from model_store.digest import sha256
from model_store.errors import ScanError, TaskError
from model_store.scan import open_series, strip_suffix
from model_store.task import Task
from service.about import NOTICE
from service.catalog.network import Selection
from service.cohorts.files import ScanFile
from service.errors import NoVolumeToReport, PacsJobFailed, SeriesMismatched, SeriesMissing
from service.jobs.files import StoredResult, StoredScan
from service.observation import Observed, seen_labels
from service.pacs.client import Found, PacsClient, text_of
from service.pacs.requests import FollowUpOptions
from service.prediction.options import SegmentOptions
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.cohort_images import cohort_files
from service.worker.pacs import note, selection_of, wanted, with_pacs
from service.worker.pacs_figures import Figure, ListedSeries, figures_of
from service.worker.repeated import answered
from service.worker.segment import segment_scan

# Series of one patient that are looked at.
_MOST_SERIES = 2000
# Both in one decimal of a millilitre in most reports.
_SAME_ML = 0.05
_IDENTITY: Final = ("PatientID", "IssuerOfPatientID", "PatientBirthDate")
_BEYOND = 0.975


def run_pacs_follow_up(attempt: Attempt) -> AttemptOutcome:
    """Compare a series with earlier ones. A later attempt reads again what this one read, except the scans
    that were repeated.

    Raises:
        Postponed: the PACS does not answer; a later attempt goes on.
    """
    return with_pacs(attempt, _follow_up)


def _follow_up(attempt: Attempt, pacs: PacsClient) -> AttemptOutcome:
    options: FollowUpOptions = attempt.options
    selection = selection_of(attempt, options)
    spread = _spread(attempt, selection)
    asked = wanted(attempt)
    attempt.set_stage("searching")
    listed = _patient_series(pacs, asked["study"], asked["series"])
    figures, unread = figures_of(attempt, pacs, listed, selection)
    current, earlier, left_out = _chosen(asked, listed, figures, options.most)
    readings: list[_Reading] = []
    for number, item in enumerate([current, *earlier]):
        attempt.set_stage("fetching", series=number + 1, of=len(earlier) + 1)
        readings.append(_read(attempt, pacs, selection, item, readings[0] if readings else None))
    now, before = readings[0], sorted(readings[1:], key=lambda each: each.day)
    rows = [_row(each, now, spread, figures.get(each.series, [])) for each in (*before, now)]
    others = sum(not each["same_version"] for row in rows for each in row["figures"])
    if others:
        attempt.warn(f"{others} earlier figures were made by another version: compare what is read here")
    answer = {
        "version": str(selection.offered),
        "network": str(selection.model),
        "personalization": selection.personalization,
        "labels": list(selection.manifest.task.labels),
        "series": rows,
        "spread": spread,
        "left_out": left_out,
        "unread_figures": unread,
        "notice": NOTICE,
    }
    body = json.dumps(answer, ensure_ascii=False).encode()
    attempt.folder.write_result(StoredResult(body, "application/json", {}))
    result = {
        "earlier": len(before),
        "unread": sum(each.problem is not None for each in before),
        "figures_of_other_versions": others,
    }
    return AttemptOutcome("succeeded", result=result, observed=now.observed)


# ------------------------------------------------------------------------------------ the patient's series


def _patient_series(pacs: PacsClient, study: str, series: str) -> dict[str, ListedSeries]:
    """What the PACS lists of the patient of a series, by the series' UIDs.

    Raises SeriesMissing, PacsJobFailed.
    """
    found = pacs.search_series({"StudyInstanceUID": study, "SeriesInstanceUID": series}, 1)
    if not found:
        raise SeriesMissing(f"PACS '{pacs.name}' has no such series in this study: check both UIDs")
    patient = text_of(found[0], "PatientID")
    if not patient:
        raise PacsJobFailed("the series has no Patient ID, by which the PACS would find earlier ones")
    others = pacs.search_series({"PatientID": patient}, _MOST_SERIES)
    if len(others) > _MOST_SERIES:
        raise PacsJobFailed(f"the PACS has more than {_MOST_SERIES} series under this Patient ID")
    # A Patient ID may have wildcards in it, and some servers ignore case.
    own = [item for item in (*found, *others) if text_of(item, "PatientID") == patient]
    return {each.series: each for each in map(_listed, own)}


def _listed(item: Found) -> ListedSeries:
    day, time = text_of(item, "StudyDate"), text_of(item, "StudyTime")
    return ListedSeries(
        text_of(item, "StudyInstanceUID"),
        text_of(item, "SeriesInstanceUID"),
        text_of(item, "Modality"),
        f"{day} {time}",
    )


def _chosen(
    asked: Mapping[str, Any],
    listed: Mapping[str, ListedSeries],
    figures: Mapping[str, Sequence[Figure]],
    most: int,
) -> tuple[ListedSeries, list[ListedSeries], int]:
    """The series, the earlier ones that are read, newest first, and how many more there were.

    Raises PacsJobFailed.
    """
    current = listed[asked["series"]]
    if asked["earlier"] is None:
        found = [each for each in (listed.get(uid) for uid in figures) if each is not None]
        found = [each for each in found if each.study != current.study and each.moment <= current.moment]
        if not found:
            raise PacsJobFailed(
                "the PACS has no earlier study of the patient with a SEG or SR of one of its series: name "
                "the earlier series in `earlier`"
            )
    else:
        named = {each["series"]: each["study"] for each in asked["earlier"]}
        found = [listed[uid] for uid, study in named.items() if uid in listed and listed[uid].study == study]
        found = [each for each in found if each.series != current.series]
        if len(found) < len(named):
            raise PacsJobFailed(
                f"{len(named) - len(found)} of {len(named)} series in `earlier` are not in this PACS, not "
                "this patient's, or the series itself: check their UIDs"
            )
        if any(each.moment > current.moment for each in found):
            raise PacsJobFailed("a series in `earlier` is of a later study: ask for the newest one")
    found.sort(key=lambda each: each.moment, reverse=True)
    return current, found[:most], len(found[most:])


# ------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class _Reading:
    """What the version finds in a series; `problem` says why it finds nothing."""

    study: str
    series: str
    day: str
    volumes: Mapping[str, float]
    identity: tuple[str, ...] = ()
    observed: Observed | None = None
    unlike: tuple[str, ...] = ()
    problem: str | None = None


def _read(
    attempt: Attempt, pacs: PacsClient, selection: Selection, item: ListedSeries, current: _Reading | None
) -> _Reading:
    """Read a series; `current` is the first one that was read, on which the job depends."""
    blank = _Reading(item.study, item.series, item.moment[:8], {})
    try:
        limits = scan_limits(attempt.settings, selection.manifest.task)
        data = pacs.fetch_series(item.study, item.series, limits)
        header = open_series(data, limits).headers[0]
        identity = tuple(str(header.get(keyword) or "").strip() for keyword in _IDENTITY)
        if current is not None and any(
            a != b for a, b in zip(identity, current.identity, strict=True) if a and b
        ):
            return replace(blank, problem="another issuer of the Patient ID, or another birth date")
        note(attempt, "scan.fetched", pacs, scan=sha256(data))
        options = SegmentOptions(
            **attempt.options.model_dump(include={"hospital", "personalization", "site"}),
            model=str(selection.offered),
            output="json",
            guard="warn",
        )
        scan = StoredScan(data, sha256(data), len(data))
        answer = segment_scan(attempt, options, selection, scan)
        seen = {each.label: each.volume_ml for each in answer.observed.labels}
        if None in seen.values():
            raise NoVolumeToReport("the series is a single image, which has no volume")
    except (ScanError, SeriesMissing, SeriesMismatched, NoVolumeToReport) as error:
        if current is None:
            raise
        return replace(blank, problem=str(error))
    return replace(
        blank,
        volumes={label: volume or 0.0 for label, volume in seen.items()},
        identity=identity,
        observed=answer.observed,
        unlike=tuple(each.text for each in answer.unlike),
    )


def _contradict(one: Sequence[str], other: Sequence[str]) -> bool:
    return any(a != b for a, b in zip(one, other, strict=True) if a and b)


# ------------------------------------------------------------------------------------ the spread


def _spread(attempt: Attempt, selection: Selection) -> dict[str, Any] | None:
    """How the version's volumes differ between repeated scans of the cohort; None without a cohort.

    Raises PacsJobFailed.
    """
    if attempt.job.cohort is None:
        return None
    task = selection.manifest.task
    groups = _repeated(cohort_files(attempt), task)
    scans = [file for files in groups.values() for file in files]
    if not scans:
        raise PacsJobFailed(
            f"cohort {attempt.job.cohort} has no patient with two scans: a name as PATIENT/SCAN, or the "
            f"`patient` of the task, says which belong together"
        )
    kept = attempt.read_checkpoint()
    volumes: dict[str, dict[str, float] | None] = {} if kept is None else json.loads(kept)
    for number, file in enumerate(scans, start=1):
        attempt.set_stage("repeating", scan=number, of=len(scans))
        if file.sha256 not in volumes:
            volumes[file.sha256] = _volumes(attempt, selection, file)
            attempt.folder.write(attempt.folder.CHECKPOINT, json.dumps(volumes).encode())
    own = {
        patient: [found for file in files if (found := volumes[file.sha256]) is not None]
        for patient, files in groups.items()
    }
    own = {patient: found for patient, found in own.items() if len(found) > 1}
    used = sum(map(len, own.values()))
    labels = {
        label: spread_of([[each[label] for each in found] for found in own.values()]) for label in task.labels
    }
    return {
        "cohort": attempt.job.cohort,
        "patients": len(own),
        "scans": used,
        "unlike": len(scans) - used,
        "labels": {label: None if found is None else asdict(found) for label, found in labels.items()},
    }


def _repeated(files: Sequence[ScanFile], task: Task) -> dict[str, list[ScanFile]]:
    """The scans of each patient with two or more. The same file under two names is one scan."""
    groups: dict[str, dict[str, ScanFile]] = {}
    for file in files:
        stem = strip_suffix(file.name)
        try:
            patient = stem.rpartition("/")[0] if task.patient is None else task.patient_of(stem)
        except TaskError:
            continue
        if patient:
            groups.setdefault(patient, {}).setdefault(file.sha256, file)
    return {patient: [*own.values()] for patient, own in groups.items() if len(own) > 1}


def _volumes(attempt: Attempt, selection: Selection, file: ScanFile) -> dict[str, float] | None:
    """What the version finds in a scan; None of one that the guard warns of, or without a volume."""
    made = answered(attempt, file.read(), selection, None)
    voxel_ml = made.reading.scan.voxel_volume_ml
    if made.reading.warnings or voxel_ml is None:
        return None
    seen = seen_labels(made.found.classes, made.task, made.found.confidence, voxel_ml)
    return {each.label: each.volume_ml or 0.0 for each in seen}


@dataclass(frozen=True)
class Spread:
    """Scan-to-rescan spread of a label's volume.

    Attributes:
        sd_ml: within-patient standard deviation, over `degrees` of freedom.
        limit_ml: 95 % of the differences between two scans of a patient who did not change are smaller:
            t(0.975, degrees) * sqrt(2) * sd_ml, which few repeats make wide.
        least_ml, most_ml: mean volumes of the patients between which it was measured.
    """

    sd_ml: float
    degrees: int
    limit_ml: float
    least_ml: float
    most_ml: float


def spread_of(patients: Sequence[Sequence[float]]) -> Spread | None:
    """The spread of volumes, by patient with two scans or more; None without any."""
    degrees = sum(len(each) - 1 for each in patients)
    if not degrees:
        return None
    means = [float(np.mean(each)) for each in patients]
    squares = sum((value - mean) ** 2 for each, mean in zip(patients, means, strict=True) for value in each)
    deviation = math.sqrt(squares / degrees)
    limit = float(student.ppf(_BEYOND, degrees)) * math.sqrt(2) * deviation
    return Spread(deviation, degrees, limit, min(means), max(means))


# ------------------------------------------------------------------------------------ the answer


def _row(
    reading: _Reading, now: _Reading, spread: Mapping[str, Any] | None, figures: Sequence[Figure]
) -> dict[str, Any]:
    """One series in the answer. `change_ml` is the newest volume less this one."""
    labels = {}
    for label, volume in reading.volumes.items():
        change = None if reading is now else now.volumes[label] - volume
        own = None if spread is None else spread["labels"][label]
        labels[label] = {
            "volume_ml": round(volume, 4),
            "change_ml": None if change is None else round(change, 4),
            "change_share": None if change is None or not volume else round(change / volume, 4),
            "beyond_spread": None if change is None or own is None else exceeds(change, volume, own),
        }
    return {
        "study": reading.study,
        "series": reading.series,
        "date": reading.day or None,
        "days": _days(reading.day, now.day),
        "labels": labels,
        "spacing_mm": None if reading.observed is None else reading.observed.spacing,
        "figures": [
            {**asdict(each), "volumes": {label: round(ml, 4) for label, ml in each.volumes.items()}}
            for each in figures
        ],
        "warnings": [*_warnings(reading, now, figures)],
        "problem": reading.problem,
    }


def exceeds(change: float, volume: float, own: Mapping[str, Any]) -> bool | None:
    """Whether a change is more than the spread; None of a volume far from those it was measured on."""
    if not own["least_ml"] / 2 <= volume <= own["most_ml"] * 2:
        return None
    return bool(abs(change) > own["limit_ml"])


def _warnings(reading: _Reading, now: _Reading, figures: Sequence[Figure]) -> Iterator[dict[str, str]]:
    for each in figures:
        if not each.same_version:
            by = each.made_by or "a device that this store does not know"
            text = f"the {each.kind} in the PACS is by {by}, another version: its figures are not compared"
            yield {"name": "another-version", "text": text}
            continue
        differing = [
            label
            for label, volume in each.volumes.items()
            if abs(volume - reading.volumes.get(label, volume)) > _SAME_ML
        ]
        if differing:
            text = (
                f"the {each.kind} in the PACS has another volume of {', '.join(differing)} than is read here"
            )
            yield {"name": "figure-differs", "text": f"{text}: it was edited, or made with other options"}
    for text in reading.unlike:
        yield {"name": "unlike-task", "text": text}
    own, current = (None if each.observed is None else each.observed.spacing for each in (reading, now))
    if (
        own
        and current
        and any(abs(a - b) > 0.1 * b for a, b in zip(sorted(own), sorted(current), strict=True))
    ):
        text = "its spacing is another than that of the newest series: part of a change may be of the scan"
        yield {"name": "another-spacing", "text": text}


def _days(day: str, now: str) -> int | None:
    try:
        first, last = (datetime.strptime(each, "%Y%m%d").date() for each in (day, now))
    except ValueError:
        return None
    return (first - last).days
