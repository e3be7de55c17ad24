"""Check a candidate with a few masks: choose the scans to draw, and later bound the change of Dice by them.

Kind `mask-check` compares the answers of the candidate and of the global model to every scan of the cohort,
and draws patients by how much they differ. Kind `mask-verdict` scores both on the masks of the drawn scans.
Where the bound excludes a loss or a gain, it decides what the gate of the candidate says; otherwise the gate
stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from model_store.lens import Lens, lens_of
from model_store.manifest import GRAPH, ModelManifest
from model_store.preprocessing import classes_on
from model_store.scan import decode_mask
from model_store.task import Task
from personalization.gate.bounds import Bounds
from personalization.gate.masks import Comparison
from personalization.gate.sampling import Draw, draw, estimate
from personalization.masks import patient_dice
from service.adaptation.mask_checks import CheckOptions, VerdictOptions
from service.audit import trail
from service.cohorts import cohorts, masks
from service.cohorts.files import ScanFile, label_of
from service.cohorts.patients import numbered
from service.errors import AdaptationRejected
from service.inference.pipeline import Stopwatch, read, segment
from service.inference.sessions import GraphSession
from service.jobs import records
from service.jobs.gates import decided, gate_with_masks
from service.jobs.leases import fenced
from service.kinds import kind_of
from service.settings import cohort_limits, scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.cohort_images import cohort_files
from service.worker.pictures import load


@dataclass(frozen=True)
class _Pair:
    """The candidate and the global model that it came from, as the API answers with them."""

    attempt: Attempt
    model: Artefact[ModelManifest]
    candidate: GraphSession
    parent: GraphSession
    lens: Lens | None

    @classmethod
    def of(cls, attempt: Attempt) -> _Pair:
        store, settings = attempt.settings.open_store(), attempt.settings
        whole = store.by_digest(attempt.job.parent)
        start = kind_of(whole).parts(whole).global_model
        if start is None:
            raise AdaptationRejected(f"'{whole}' has no global model to compare the candidate with")
        candidate = store.by_digest(attempt.options.candidate, ModelManifest)
        parent = store.by_digest(start, ModelManifest)
        one, other = (load(artefact.read(GRAPH), settings) for artefact in (candidate, parent))
        return cls(attempt, candidate, one, other, lens_of(candidate))

    @property
    def task(self) -> Task:
        return self.model.manifest.task

    def answers(
        self, file: ScanFile, mask: ScanFile | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Class indices of candidate, parent and mask on the scan's own grid, as they are answered."""
        self.attempt.check_cancelled()
        limits, watch = cohort_limits(self.attempt.settings, self.task), Stopwatch()
        try:
            data = file.read()
            seen_by_parent = read(data, self.model.manifest, limits, watch)
            seen = seen_by_parent
            if self.lens is not None:
                seen = read(data, self.model.manifest, limits, watch, lens=self.lens)
            drawn = None
            if mask is not None:
                outlined = decode_mask(mask.read(), scan_limits(self.attempt.settings))
                drawn = classes_on(seen.scan, outlined, self.task)
        except LocumStoreError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        candidate, parent = (
            segment(reading, self.model.manifest, session, watch, between=self.attempt.between).classes
            for reading, session in ((seen, self.candidate), (seen_by_parent, self.parent))
        )
        return candidate, parent, drawn


def _planes(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[S, H, W] of a volume [I, J, K], or of an image."""
    return classes[np.newaxis] if classes.ndim == 2 else np.ascontiguousarray(np.moveaxis(classes, -1, 0))


def run_mask_check(attempt: Attempt) -> AttemptOutcome:
    """Choose the scans with masks that would say most of the candidate.

    Raises:
        AdaptationError: the answers differ for fewer than two patients.
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    options: CheckOptions = attempt.options
    files, pair = _unseen(attempt), _Pair.of(attempt)
    known = attempt.read_checkpoint()
    differs: dict[str, float] = {} if known is None else json.loads(known)
    for number, file in enumerate(files):
        attempt.set_stage("checking", epoch=number, epochs=len(files))
        if file.sha256 not in differs:
            candidate, parent, _ = pair.answers(file)
            classes = len(pair.task.classes)
            differs[file.sha256] = _disagreement(_planes(candidate), _planes(parent), classes)
            attempt.folder.write(attempt.folder.CHECKPOINT, json.dumps(differs).encode())
    patients = numbered([file.name for file in files], pair.task)
    scans: dict[str, list[ScanFile]] = {}
    for file, patient in zip(files, patients, strict=True):
        scans.setdefault(f"{patient:06d}", []).append(file)
    means = {patient: float(np.mean([differs[f.sha256] for f in own])) for patient, own in scans.items()}
    draws = draw(means, options.masks, options.seed)
    generator = np.random.default_rng([options.seed, 1])
    chosen = [
        {
            "scan": f"sha256:{own[int(generator.integers(len(own)))].sha256}",
            "disagreement": round(means[each.patient], 6),
            "probability": each.probability,
            "times": each.times,
            "stratum": each.stratum,
        }
        for each in draws
        for own in [scans[each.patient]]
    ]
    result = {
        "patients": len(means),
        "differing": sum(value > 0 for value in means.values()),
        "mean_disagreement": round(float(np.mean([*means.values()])), 6),
        "draws": chosen,
    }
    return AttemptOutcome("succeeded", result=result)


def run_mask_verdict(attempt: Attempt) -> AttemptOutcome:
    """Bound the change of Dice by the masks of a check's scans, and decide by it where it decides.

    Raises as `run_mask_check`.
    """
    attempt.set_stage("preparing")
    options: VerdictOptions = attempt.options
    with attempt.database.read() as session:
        check = records.get(session, options.check)
        assert attempt.job.cohort is not None
        rows = masks.of_cohort(session, attempt.job.cohort)
    found: Mapping[str, Any] = check.result or {}
    by_digest = {file.sha256: file for file in cohort_files(attempt)}
    pair, changes, draws = _Pair.of(attempt), {}, []
    for number, each in enumerate(found["draws"]):
        attempt.set_stage("checking", epoch=number, epochs=len(found["draws"]))
        digest = str(each["scan"]).removeprefix("sha256:")
        file = by_digest.get(digest)
        if file is None or file.name not in rows:
            raise AdaptationRejected(f"{label_of(digest)} is not in the cohort any more, or has no mask")
        mask = cohorts.file_of(attempt.settings, rows[file.name], file.name)
        candidate, parent, drawn = pair.answers(file, mask)
        assert drawn is not None
        after, before = (
            patient_dice([(found, drawn)], len(pair.task.classes)) for found in (candidate, parent)
        )
        changes[digest] = after - before
        draws.append(Draw(digest, float(each["probability"]), int(each["times"]), int(each["stratum"])))
    bound = estimate(draws, changes, int(found["patients"]), int(found["differing"]))
    verdict = _verdict(attempt, options, bound, changes, found)
    _record(attempt, options, verdict)
    return AttemptOutcome("succeeded", result={"verdict": verdict})


def _unseen(attempt: Attempt) -> list[ScanFile]:
    """The cohort's scans; of a candidate that learned from masks, those of patients without any."""
    files = cohort_files(attempt)
    if not attempt.options.learned_from_masks:
        return files
    assert attempt.job.cohort is not None
    with attempt.database.read() as session:
        drawn = {*masks.of_cohort(session, attempt.job.cohort)}
    task = attempt.settings.open_store().by_digest(attempt.job.parent).manifest.task
    patients = numbered([file.name for file in files], task)
    learned = {patient for file, patient in zip(files, patients, strict=True) if file.name in drawn}
    unseen = [file for file, patient in zip(files, patients, strict=True) if patient not in learned]
    if not unseen:
        raise AdaptationRejected(
            "the candidate learned from masks of every patient of the cohort, so none is left to check it: "
            "its gate has the bound of the held-out masks"
        )
    return unseen


def _disagreement(one: NDArray[np.uint8], other: NDArray[np.uint8], classes: int) -> float:
    """1 - Dice of two answers to a scan; 0 where both find nothing."""
    counts = Comparison.of(one, other, np.zeros(len(one), np.int64), classes)
    value = float(counts.agreement(0.0)[0])
    return 0.0 if np.array_equal(one, other) else 1.0 - value


def _verdict(
    attempt: Attempt,
    options: VerdictOptions,
    bound: Bounds,
    changes: Mapping[str, float],
    found: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "check": options.check,
        "decision": decided(bound.low, bound.high),
        "change": round(bound.mean, 6),
        "at_least": round(bound.low, 6),
        "at_most": round(bound.high, 6),
        "masks": len(changes),
        "draws": bound.n,
        "patients": int(found["patients"]),
        "worst": round(min(changes.values()), 6),
        "actor": attempt.job.actor,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _record(attempt: Attempt, options: VerdictOptions, verdict: Mapping[str, Any]) -> None:
    """Write the verdict into the gate of the job that made the candidate, and into the audit trail."""
    attempt.check_cancelled()
    with fenced(attempt.database, attempt.lease) as (session, _):
        judged = records.get(session, options.job, lock=True)
        judged.gate = gate_with_masks(judged.gate, verdict)
        records.append_event(session, judged, "gate", judged.gate)
        trail.append(
            session,
            "gate.decided",
            hospital=judged.hospital,
            version=judged.candidate_digest,
            actor=attempt.job.actor,
            details={
                "job": judged.id,
                **{name: verdict[name] for name in ("check", "decision", "change", "at_least", "masks")},
            },
        )
