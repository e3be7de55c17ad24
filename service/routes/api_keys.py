"""`/keys`: create, list, rotate and revoke API keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from service.database import ApiKey, Role
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsAdmin
from service.http.problems import problem_responses
from service.identity import keys
from service.validation import HOSPITAL_ID, KeyName

router = APIRouter(tags=["keys"], route_class=AuditedRoute)

KeyId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", description="The 12 digits after `locum_`.")]


class KeyBody(BaseModel):
    """A new key."""

    model_config = ConfigDict(extra="forbid")

    name: KeyName = Field(
        description="Name of the program or person that will use it; the actor is `key:<name>`."
    )
    role: Role
    hospital: Annotated[str, StringConstraints(pattern=HOSPITAL_ID)] | None = Field(
        None, description="The one hospital that it sees; null for every hospital."
    )
    days: Annotated[int, Field(ge=1, le=3650)] | None = Field(
        None, description="Days until it expires; null for never."
    )


class RotationBody(BaseModel):
    """How a key is replaced."""

    model_config = ConfigDict(extra="forbid")

    overlap_hours: Annotated[float, Field(ge=0, le=24 * 30)] = Field(
        24, description="Hours for which the old key stays valid."
    )


class KeyView(BaseModel):
    """A key, without its secret."""

    id: str
    name: str
    role: str
    hospital: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="To the minute.")
    valid: bool

    @classmethod
    def of(cls, row: ApiKey) -> KeyView:
        """The row as it is shown."""
        return cls(
            id=row.id,
            name=row.name,
            role=row.role,
            hospital=row.hospital,
            created_at=row.created_at,
            created_by=row.created_by,
            expires_at=row.expires_at,
            revoked_at=row.revoked_at,
            last_used_at=row.last_used_at,
            valid=keys.refusal(row, datetime.now(UTC)) is None,
        )


class NewKey(KeyView):
    """A key with its secret, which is shown once."""

    key: str


class KeyList(BaseModel):
    """The keys of the hospitals that the caller sees, oldest first."""

    keys: list[KeyView]


@router.get("/keys", responses=problem_responses(422))
def list_keys(context: AsAdmin) -> KeyList:
    """List the API keys, without their secrets."""
    with context.database.read() as session:
        return KeyList(keys=[KeyView.of(row) for row in keys.listed(session)])


@router.post("/keys", status_code=201, responses=problem_responses(400, 404, 408, 409, 413, 422))
def create_key(
    context: Annotated[AsAdmin, Audited("key.created", refused_only=True)], body: KeyBody
) -> NewKey:
    """Create an API key. The answer has it once; the service keeps its hash."""
    expires_at = None if body.days is None else datetime.now(UTC) + timedelta(days=body.days)
    with context.database.write() as session:
        row, key = keys.create(session, body.name, body.role, body.hospital, expires_at)
    return _shown_once(row, key)


@router.post("/keys/{key}/rotate", status_code=201, responses=problem_responses(400, 404, 408, 409, 413, 422))
def rotate_key(
    context: Annotated[AsAdmin, Audited("key.rotated", refused_only=True)],
    key: KeyId,
    body: RotationBody | None = None,
) -> NewKey:
    """Create the successor of a key; the old one stays valid for a while."""
    overlap = timedelta(hours=(body or RotationBody()).overlap_hours)
    with context.database.write() as session:
        row, secret = keys.rotate(session, key, overlap)
    return _shown_once(row, secret)


@router.delete("/keys/{key}", responses=problem_responses(404, 422))
def revoke_key(context: Annotated[AsAdmin, Audited("key.revoked", refused_only=True)], key: KeyId) -> KeyView:
    """Reject a key from now on. Its record stays."""
    with context.database.write() as session:
        revoked = KeyView.of(keys.revoke(session, key))
    context.authenticator.forget()
    return revoked


def _shown_once(row: ApiKey, key: str) -> NewKey:
    return NewKey(**KeyView.of(row).model_dump(), key=key)
