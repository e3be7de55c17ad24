"""Assign the version of a shadow where its rule says so: written by an approver before any answer."""

from __future__ import annotations

import logging

from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from service import change_plan, shadow
from service.acceptance.decisions import require_accepted
from service.catalog.adapted import adapted_for, require_gate
from service.catalog.assignable import resolve_assignable
from service.database import Shadow
from service.errors import SecondSignatureNeeded, ServiceError
from service.serving import assignments
from service.worker.attempt import Attempt

_log = logging.getLogger("locum.worker")


def promote(attempt: Attempt, number: int) -> None:
    """Assign the shadow's version if its rule says so, and nothing forbids a person to assign it."""
    store, database = attempt.settings.open_store(), attempt.database
    with database.write() as session:
        row = session.get_one(Shadow, number, with_for_update=True)
        found = shadow.look(session, row)
    if found is None:
        return
    answers, bound = found
    try:
        reference = f"{row.artefact.partition('@')[0]}@{row.version}"
        artefact = resolve_assignable(store, row.hospital, row.model, reference)
        adapted = adapted_for(artefact) is not None
        with database.write() as session:
            row = session.get_one(Shadow, number, with_for_update=True)
            if row.ended is not None:
                return
            if adapted:
                require_gate(session, artefact, False)
            require_accepted(session, row.hospital, str(artefact), artefact.digest, "float32")
            _require_inside(session, row, artefact)
            current = assignments.assignment(session, row.hospital, row.model)
            why = (
                f"the rule of {row.actor}: on {answers} corrected answers Dice is at least "
                f"{100 * bound:+.1f} points more ({row.reason})"
            )
            assignments.assign(
                session,
                row.hospital,
                row.model,
                version=artefact.version,
                digest=artefact.digest,
                expected=assignments.decided(current),
                actor=f"rule:{row.actor}"[:300],
                reason=why[:500],
                artefact=artefact.name if adapted else None,
            )
            shadow.end(session, row, "service", "promoted by its rule")
    except (LocumStoreError, ServiceError) as error:
        _log.warning("shadow %d is not promoted: %s", number, error)


def _require_inside(session: Session, row: Shadow, artefact: Artefact) -> None:
    """A rule has one signature. Raises SecondSignatureNeeded outside the change plan."""
    written = change_plan.plan_of(session, row.hospital, row.model)
    if written is None:
        return
    found = change_plan.deviations(session, row.hospital, row.model, artefact, written.plan, overridden=False)
    if found:
        raise SecondSignatureNeeded(f"'{artefact}' is outside the change plan: {'; '.join(found)}")
