"""The serving log: assignments of versions to hospitals, append-only per (hospital, model), one writer at a
time.

    sequence   version   previous   restores
    1          3         -          -            by default: the newest when the hospital was first served
    2          4         1          -            assigned (an adapted version names its artefact, too)
    3          3         -          1            rolled back: what entry 1 served is in force again
    4          5         3          -            assigned again

A hospital without an entry is served the newest version that is not withdrawn: the selection says which, and
`keep` records it, so that a version that is published later serves the hospital only by a decision. Every
entry is a row of the audit trail too, appended in the same transaction; `python -m service audit verify`
compares the two. Functions take a session, so that the caller chooses the transaction.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from model_store.manifest import Precision
from service.audit import trail
from service.database.caller import SERVICE
from service.database.engine import in_turn
from service.database.hospitals import require_hospital
from service.database.models import Assignment
from service.errors import AssignmentStale, NothingToRollBack

_LOCK = "the serving log"


def assignment(session: Session, hospital: str, model: str, at: datetime | None = None) -> Assignment | None:
    """The entry in force, now or at an aware instant; None before the hospital was first served.

    Raises:
        HospitalUnknown: no hospital of this id is registered.
    """
    require_hospital(session, hospital)
    query = select(Assignment).where(Assignment.hospital == hospital, Assignment.model == model)
    if at is not None:
        query = query.where(Assignment.at <= at)
    return session.scalars(query.order_by(Assignment.sequence.desc()).limit(1)).first()


def decided(entry: Assignment | None) -> int:
    """The number of the decision in force; 0 while no person decided."""
    return 0 if entry is None or entry.by_default else entry.sequence


def history(session: Session, hospital: str, model: str) -> list[Assignment]:
    """List every entry, oldest first."""
    require_hospital(session, hospital)
    query = select(Assignment).where(Assignment.hospital == hospital, Assignment.model == model)
    return list(session.scalars(query.order_by(Assignment.sequence)))


def assign(
    session: Session,
    hospital: str,
    model: str,
    *,
    version: int,
    digest: str,
    expected: int,
    actor: str,
    reason: str,
    artefact: str | None = None,
    override: bool = False,
    precision: Precision = "float32",
    reduced: str | None = None,
) -> Assignment:
    """Assign a version: append an entry, in force from now on.

    Args:
        session: of a writing transaction.
        hospital: id of a registered hospital.
        model: name in the store.
        version: number in the store.
        digest: of that version's manifest.
        expected: number of the decision that the caller saw in force, see `decided`.
        actor: who decided.
        reason: and why.
        artefact: name of the version's artefact where it is not `model` but one adapted from it.
        override: whether its gate was overridden.
        precision: of the graph that answers.
        reduced: digest of the version that has the graph; None for float32.

    Raises:
        HospitalUnknown: no hospital of this id is registered.
        AssignmentStale: another entry is in force by now.
    """
    current = _current(session, hospital, model, expected)
    entry = Assignment(
        hospital=hospital,
        model=model,
        sequence=_next(current),
        version=version,
        digest=digest,
        actor=actor,
        reason=reason,
        previous=None if current is None else current.sequence,
        restores=None,
        at=_instant(current),
        artefact=artefact,
        override=override,
        precision=precision,
        reduced=reduced,
    )
    return _append(session, entry)


def keep(
    session: Session,
    hospital: str,
    model: str,
    *,
    version: int,
    digest: str,
    replaces: int = 0,
) -> Assignment:
    """Record that the hospital is served this version without a decision; return the entry in force.

    A decision stays in force, and so does another version that was recorded before, except the entry that the
    caller saw and `replaces`, by its number.
    """
    in_turn(session, _LOCK)
    current = assignment(session, hospital, model)
    if current is not None:
        is_replaced = current.by_default and current.sequence == replaces
        if not is_replaced or current.digest == digest:
            return current
    entry = Assignment(
        hospital=hospital,
        model=model,
        sequence=_next(current),
        version=version,
        digest=digest,
        actor=SERVICE.actor,
        reason="the newest version; no decision was made",
        previous=None if current is None else current.sequence,
        restores=None,
        at=_instant(current),
        by_default=True,
    )
    return _append(session, entry)


def before(session: Session, hospital: str, model: str) -> Assignment | None:
    """The entry that a rollback would return to; None when there is none."""
    current = assignment(session, hospital, model)
    if current is None or current.previous is None:
        return None
    return session.scalars(
        select(Assignment).where(
            Assignment.hospital == hospital,
            Assignment.model == model,
            Assignment.sequence == current.previous,
        )
    ).one()


def roll_back(
    session: Session,
    hospital: str,
    model: str,
    *,
    expected: int,
    actor: str,
    reason: str,
    to: int | None = None,
) -> Assignment:
    """Roll back: append an entry that restores the previous assignment. Each call goes one further back.

    `expected`, `actor` and `reason` are those of `assign`; `to` is the number of the entry that the caller
    saw `before` return.

    Raises:
        HospitalUnknown: no hospital of this id is registered.
        AssignmentStale: another entry is in force by now, or would be restored.
        NothingToRollBack: the hospital was served nothing else before.
    """
    current = _current(session, hospital, model, expected)
    target = before(session, hospital, model)
    if target is None:
        raise NothingToRollBack(
            f"hospital {hospital!r} was served no other version of {model!r} before: assign a version instead"
        )
    if to is not None and target.sequence != to:
        # A newer version was recorded meanwhile, which no decision's number shows.
        raise AssignmentStale(
            f"hospital {hospital!r} was served another version of {model!r} meanwhile: look at what serves "
            "now, then decide again"
        )
    entry = Assignment(
        hospital=hospital,
        model=model,
        sequence=_next(current),
        version=target.version,
        digest=target.digest,
        actor=actor,
        reason=reason,
        previous=target.previous,
        restores=target.sequence,
        at=_instant(current),
        artefact=target.artefact,
        override=target.override,
        precision=target.precision,
        reduced=target.reduced,
    )
    return _append(session, entry)


def _current(session: Session, hospital: str, model: str, expected: int) -> Assignment | None:
    in_turn(session, _LOCK)
    current = assignment(session, hospital, model)
    found = decided(current)
    if found != expected:
        raise _stale(hospital, model, expected, found)
    return current


def _next(current: Assignment | None) -> int:
    return 1 if current is None else current.sequence + 1


def _append(session: Session, entry: Assignment) -> Assignment:
    session.add(entry)
    try:
        session.flush()
    except IntegrityError as error:
        # Another writer took this sequence number between our look and our insert.
        raise _stale(entry.hospital, entry.model, entry.sequence - 1, entry.sequence) from error
    happened = "assigned" if entry.restores is None else "rolled-back"
    trail.append(
        session,
        trail.ASSIGNED["kept" if entry.by_default else happened],
        hospital=entry.hospital,
        version=entry.digest,
        actor=entry.actor,
        details=trail.assignment_details(entry),
    )
    return entry


def _stale(hospital: str, model: str, expected: int, found: int) -> AssignmentStale:
    return AssignmentStale(
        f"the serving log of hospital {hospital!r} for {model!r} is at entry {found}, not {expected}: "
        "look at what serves now, then decide again"
    )


def _instant(current: Assignment | None) -> datetime:
    # A clock that is set back must not put an entry before the one it follows: "what served at T" reads
    # these times.
    now = datetime.now(UTC)
    return now if current is None else max(now, current.at + timedelta(microseconds=1))
