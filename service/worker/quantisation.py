"""Make a graph in another precision on a cohort, judge it without labels, and publish it if it passed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, ModelManifest
from model_store.store import Store
from service.adaptation.quantisation import QuantisationOptions
from service.database.job_states import TERMINAL
from service.errors import AdaptationRejected
from service.jobs import records
from service.jobs.leases import fenced
from service.quantisation import work
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome, Postponed, as_json
from service.worker.cohort_images import cohort_files
from service.worker.pictures import load

_LOOK_AGAIN = timedelta(seconds=5)


def run_quantisation(attempt: Attempt) -> AttemptOutcome:
    """Make the graph of the job's network, or of the candidate of the adaptation that it follows.

    Raises:
        Postponed: that adaptation is not over.
        AdaptationRejected: it made no candidate.
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    options: QuantisationOptions = attempt.options
    store, precision = attempt.settings.open_store(), options.precision
    network = work.require_reducible(_network(attempt, store, options.after))
    files = cohort_files(attempt)

    def between(done: int, total: int) -> None:
        attempt.set_stage("quantising", epoch=done, epochs=total)

    limits = scan_limits(attempt.settings, network.manifest.task)
    graph, report = work.make(
        network, precision, files, partial(load, settings=attempt.settings), limits, between
    )
    gate = as_json(report.to_json())
    attempt.emit("gate", gate)
    result = {"network": str(network), "precision": precision, "scans": report.scans}
    if not report.passed:
        reason = f"the gate refuses the graph in {precision}: the float32 graph stays"
        return AttemptOutcome("fell_back", reason, {**result, "version": None}, gate)
    attempt.set_stage("publishing")

    def admit() -> None:
        store.by_digest(network.digest)
        attempt.check_cancelled()
        # Only the worker that holds the lease publishes.
        with fenced(attempt.database, attempt.lease) as (_, row):
            row.gate = gate

    made = work.publish(store, network, graph, report, admit)
    found = {"version": str(made), "digest": made.digest, "graph": made.manifest.files[GRAPH].sha256}
    return AttemptOutcome("succeeded", result={**result, **found}, gate=gate)


def _network(attempt: Attempt, store: Store, after: str | None) -> Artefact[ModelManifest]:
    if after is None:
        return store.by_digest(attempt.job.parent, ModelManifest)
    with attempt.database.read() as session:
        adaptation = records.get(session, after)
    if adaptation.state not in TERMINAL:
        raise Postponed(f"adaptation {after} is not over", datetime.now(UTC) + _LOOK_AGAIN)
    if adaptation.candidate_digest is None:
        raise AdaptationRejected(
            f"adaptation {after} is {adaptation.state} and made no candidate, so there is no graph to make"
        )
    return store.by_digest(adaptation.candidate_digest, ModelManifest)
