"""Let a second version answer a scan unseen, and compare both answers."""

from __future__ import annotations

from service import observation, shadow
from service.catalog.network import resolve_network
from service.database import Observation, Shadow
from service.errors import ScanGone
from service.observation.rows import keyed_with
from service.shadow import Both, ShadowOptions
from service.worker import correction
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.repeated import Repeated, answered, dice_of, repeat


def run_shadow(attempt: Attempt) -> AttemptOutcome:
    """Answer the scan by both versions, and store how they compare.

    Raises:
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    options: ShadowOptions = attempt.options
    scan, hospital = attempt.folder.read_input(), attempt.job.hospital
    assert hospital is not None
    with attempt.database.read() as session:
        row = session.get(Shadow, options.shadow)
    if scan is None or row is None or row.ended is not None:
        raise ScanGone("the shadow has ended, or the scan is not there any more")
    attempt.set_stage("comparing")
    served = repeat(attempt, scan.content, options.version, options.choice)
    store, reference = attempt.settings.open_store(), f"{row.artefact.partition('@')[0]}@{row.version}"
    selection = resolve_network(store, attempt.database, reference, hospital)
    second = answered(attempt, scan.content, selection, None)
    labels = _both(served, second)
    attempt.check_cancelled()
    with attempt.database.write() as session:
        keyed = keyed_with(session)
        own = session.query(Observation).filter_by(hospital=hospital, request=options.request).first()
        exact = own is not None and keyed(observation.mask_digest(served.found.classes)) == own.mask
        shadow.note(
            session,
            row.id,
            options.request,
            served=options.version,
            choice={name: value for name, value in selection.kept.items() if value is not None},
            shifts=(_shift(served), _shift(second)),
            exact=exact,
            labels=labels,
        )
    correction.compare_with_shadow(attempt, options.request)
    return AttemptOutcome("succeeded", result={"exact": exact})


def _both(served: Repeated, second: Repeated) -> dict[str, Both]:
    one, other = served.found, second.found
    agreement = dice_of(one.classes, other.classes, served.task)
    seen = [
        {
            each.label: each
            for each in observation.seen_labels(
                found.classes, served.task, found.confidence, served.reading.scan.voxel_volume_ml
            )
        }
        for found in (one, other)
    ]
    return {
        label: Both(
            agreement[label],
            *(each[label].voxels for each in seen),
            *(each[label].volume_ml for each in seen),
            *(each[label].confidence for each in seen),
        )
        for label in served.task.labels
    }


def _shift(of: Repeated) -> float | None:
    return None if of.found.shift is None else of.found.shift[0]
