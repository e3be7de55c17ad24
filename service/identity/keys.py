"""API keys: create, list, rotate, revoke, and find the caller of one.

    locum_5f0c9a1be7d2_3q2-7wAA...
          id           secret: 32 random bytes, shown once

The database has the id and the SHA-256 of the whole key. A fast hash suffices for a secret of 256 random
bits. Functions take a session, so that the caller chooses the transaction.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import Session

from service.audit import trail
from service.database import ApiKey, Caller, Role, caller_of, in_turn
from service.database.caller import SERVICE
from service.database.hospitals import require_hospital
from service.errors import GrantRefused, KeyNameTaken, KeyNotValid, KeyOver, KeyUnknown
from service.validation import HOSPITAL_ID

PREFIX = "locum_"
_FORM = re.compile(rf"{PREFIX}([0-9a-f]{{12}})_[A-Za-z0-9_-]{{43}}")

NAMES = "names of keys"
"""Lock name: holders compare a name with those of all keys and add the key in turn, see `in_turn`."""

USE_NOTED_EVERY = timedelta(minutes=1)
"""How exact `last_used_at` is: a key in constant use costs one write in this time."""


def create(
    session: Session, name: str, role: Role, hospital: str | None, expires_at: datetime | None = None
) -> tuple[ApiKey, str]:
    """Add a key; return its row and the key itself, which is not stored.

    Args:
        session: of a writing transaction.
        name: unique among the valid keys of this hospital; other hospitals' keys are not compared.
        role: of the key.
        hospital: the one that it may see; None for all.
        expires_at: from then on it is rejected; None for never.

    Raises:
        HospitalUnknown: no such hospital is registered.
        GrantRefused: the caller may not grant this role or this hospital.
        KeyNameTaken: a valid key of the hospital has the name.
    """
    _may_grant(session, role, hospital)
    if hospital is not None:
        require_hospital(session, hospital)
    in_turn(session, NAMES)
    now = datetime.now(UTC)
    named = session.scalars(select(ApiKey).where(*_called(name, hospital))).all()
    if any(refusal(row, now) is None for row in named):
        raise KeyNameTaken(
            f"a valid key is called {name!r}: rotate it, revoke it first, or choose another name"
        )
    return _add(session, name, role, hospital, expires_at, now)


def listed(session: Session) -> list[ApiKey]:
    """List the keys of the hospitals that the caller may see, oldest first."""
    hospitals = caller_of(session).hospitals
    seen = true() if hospitals is None else ApiKey.hospital.in_(hospitals)
    return list(session.scalars(select(ApiKey).where(seen).order_by(ApiKey.created_at, ApiKey.id)))


def get(session: Session, key_id: str) -> ApiKey:
    """Return the row of a key.

    Raises:
        KeyUnknown: there is none, or the caller may not see its hospital.
    """
    row = session.get(ApiKey, key_id, with_for_update=True)
    hospitals = caller_of(session).hospitals
    if row is None or not (hospitals is None or row.hospital in hospitals):
        raise KeyUnknown(f"no key {key_id!r}: `keys list` and GET /keys name those that there are")
    return row


def rotate(session: Session, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
    """Add a key like this one, which stays valid for `overlap`; return the row and the new key.

    The new key expires as the old one did: a lifetime as long from now on.

    Raises:
        KeyUnknown: there is none.
        KeyOver: it has expired, was revoked or was rotated before.
    """
    old, now = get(session, key_id), datetime.now(UTC)
    if (why := refusal(old, now)) is not None:
        raise KeyOver(f"{why}: create a key instead")
    # The name of a valid key passes to its successor alone. The first rotation shortened the old key's life,
    # so another would give too short a one.
    later = select(ApiKey).where(*_called(old.name, old.hospital), ApiKey.created_at > old.created_at)
    if (successor := session.scalars(later.order_by(ApiKey.created_at)).first()) is not None:
        raise KeyOver(
            f"the API key {PREFIX}{old.id} was replaced by {PREFIX}{successor.id}: rotate that one, or "
            "revoke both and create a key"
        )
    role = _role(old)
    _may_grant(session, role, old.hospital)
    lifetime = None if old.expires_at is None else old.expires_at - old.created_at
    until = now + overlap
    old.expires_at = until if old.expires_at is None else min(old.expires_at, until)
    new, key = _add(session, old.name, role, old.hospital, None if lifetime is None else now + lifetime, now)
    _audit(session, "key.rotated", old, successor=new.id)
    return new, key


def revoke(session: Session, key_id: str) -> ApiKey:
    """Reject a key from now on. A key that was revoked stays as it is.

    Raises:
        KeyUnknown: there is none.
    """
    row = get(session, key_id)
    _may_grant(session, _role(row), row.hospital)
    if row.revoked_at is None:
        row.revoked_at = datetime.now(UTC)
        session.flush()
        _audit(session, "key.revoked", row)
    return row


def find(session: Session, key: str) -> ApiKey:
    """Return the row of a key that a client sent.

    Raises:
        KeyNotValid: unknown, expired or revoked. Only a holder of the whole key learns which.
    """
    form = _FORM.fullmatch(key)
    row = None if form is None else session.get(ApiKey, form[1])
    # Compared in constant time, with or without a row.
    stored = "0" * 64 if row is None else row.digest
    if not hmac.compare_digest(_hash(key), stored) or row is None:
        raise KeyNotValid("no such API key: ask an admin of this service for one")
    if (why := refusal(row, datetime.now(UTC))) is not None:
        raise KeyNotValid(why)
    return row


def refusal(row: ApiKey, now: datetime) -> str | None:
    """Why the key is rejected at this instant; None for a valid one."""
    if row.revoked_at is not None:
        return f"the API key {PREFIX}{row.id} was revoked at {row.revoked_at.isoformat(timespec='seconds')}"
    if row.expires_at is not None and row.expires_at <= now:
        return f"the API key {PREFIX}{row.id} expired at {row.expires_at.isoformat(timespec='seconds')}"
    return None


def caller_with(row: ApiKey) -> Caller:
    """The caller that a key identifies."""
    hospitals = None if row.hospital is None else frozenset({row.hospital})
    return Caller(_actor(row), frozenset({_role(row)}), hospitals, key=row.id, until=row.expires_at)


def people_behind(session: Session, actor: str) -> frozenset[str]:
    """The actors who may hold the credential of an actor.

    A key's secret was shown to who created or rotated it over HTTP, and that key's to who made that one: the
    first of them. A key from the command line (`keys create`) is its holder's own.
    """
    found, waiting, seen = set[str](), [actor], {actor}
    while waiting:
        current = waiting.pop()
        makers = {row.created_by for row in _keys_of(session, current)} - {SERVICE.actor, current}
        if not makers:
            found.add(current)
        waiting += makers - seen
        seen |= makers
    # Keys that were rotated by each other have no first maker.
    return frozenset(found or seen)


def _keys_of(session: Session, actor: str) -> list[ApiKey]:
    kind, _, rest = actor.partition(":")
    if kind != "key":
        return []
    names = {rest, rest.rpartition("@")[0]}
    rows = session.scalars(select(ApiKey).where(ApiKey.name.in_(names)))
    return [row for row in rows if _actor(row) == actor]


def _called(name: str, hospital: str | None) -> tuple[ColumnElement[bool], ...]:
    return ApiKey.name == name, ApiKey.hospital.is_not_distinct_from(hospital)


def _actor(row: ApiKey) -> str:
    """`key:NAME@HOSPITAL`, or `key:NAME` of a key for all; no key's actor is that of another hospital's."""
    if row.hospital is not None:
        return f"key:{row.name}@{row.hospital}"
    _, at, end = row.name.rpartition("@")
    ambiguous = at and (end == "*" or re.fullmatch(HOSPITAL_ID, end))
    return f"key:{row.name}@*" if ambiguous else f"key:{row.name}"


def _add(
    session: Session,
    name: str,
    role: Role,
    hospital: str | None,
    expires_at: datetime | None,
    now: datetime,
) -> tuple[ApiKey, str]:
    key_id = secrets.token_hex(6)
    key = f"{PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    row = ApiKey(
        id=key_id,
        name=name,
        role=role,
        hospital=hospital,
        digest=_hash(key),
        created_at=now,
        created_by=caller_of(session).actor,
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    _audit(session, "key.created", row)
    return row, key


def _audit(session: Session, action: str, row: ApiKey, **more: str) -> None:
    details = {"key": row.id, "name": row.name, "role": row.role, **more}
    trail.append(session, action, hospital=row.hospital, details=details)


def _may_grant(session: Session, role: Role, hospital: str | None) -> None:
    """An admin of some hospitals grants the roles of a hospital, for these."""
    caller = caller_of(session)
    if caller.hospitals is None:
        return
    if hospital is None or role == "federation":
        raise GrantRefused(
            f"{caller.actor} is an admin of {' and '.join(sorted(caller.hospitals))} and grants the roles "
            "of these alone: name one as `hospital`, and a role other than federation"
        )


def _role(row: ApiKey) -> Role:
    role: Role = row.role  # type: ignore[assignment]
    return role


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
