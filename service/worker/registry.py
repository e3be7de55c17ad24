"""Find the worker's function for a job, by the kind of job and the kind of artefact that it adapts."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from model_store.artefact import Artefact
from service.catalog.adapted import adapted_name
from service.errors import AdaptationRejected
from service.kinds import ADAPTABLE, SCAN_BY_JOB, Adaptation, kind_of
from service.worker.attempt import Attempt, AttemptOutcome, PublishedCandidate
from service.worker.candidate import published_by


def run_adaptation(attempt: Attempt) -> AttemptOutcome:
    """Run an adaptation job and publish the hospital's version.

    Raises:
        AdaptationRejected: the parent is of a kind that cannot be adapted.
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    store, job = attempt.settings.open_store(), attempt.job
    parent = store.by_digest(job.parent)
    adaptation = _adaptation(parent)
    assert job.hospital is not None
    earlier = published_by(store, adapted_name(parent.name, job.hospital), job.id)
    if earlier is None:
        made: PublishedCandidate = resolve_name(adaptation.run)(attempt)
    else:
        # An earlier attempt crashed between publishing and finishing the job.
        made = PublishedCandidate(earlier, job.result or {}, job.gate)
    return made.outcome(adaptation.fallback_reason)


def run_scan(attempt: Attempt) -> AttemptOutcome:
    """Adapt to one scan and store its answer. Raises as `run_adaptation`."""
    attempt.set_stage("preparing")
    parent = attempt.settings.open_store().by_digest(attempt.job.parent)
    scan = _adaptation(parent).scan
    if scan is None:
        raise AdaptationRejected(
            f"'{parent}' is of kind {parent.manifest.kind}; only {SCAN_BY_JOB} can be adapted to one scan"
        )
    outcome: AttemptOutcome = resolve_name(scan.run)(attempt)
    return outcome


def _adaptation(parent: Artefact) -> Adaptation[Any]:
    found = kind_of(parent).adaptation
    if found is None:
        raise AdaptationRejected(
            f"'{parent}' is of kind {parent.manifest.kind}; only these can be adapted to a hospital: "
            f"{', '.join(ADAPTABLE)}"
        )
    return found
