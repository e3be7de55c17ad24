"""`/hospitals/{hospital}/serving/{model}/key-usage`: use of a pool's keys and its drift."""

from __future__ import annotations

from datetime import UTC, date, datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field

from model_store.errors import StoreError
from model_store.manifest import SsfPoolManifest
from service.catalog.version import require_name
from service.context import ServiceContext
from service.database import KeyUsage
from service.database.hospitals import require_hospital
from service.http.dependencies import AsReader
from service.http.parameters import HospitalId, ModelName
from service.http.problems import problem_responses
from service.serving import key_usage

router = APIRouter(tags=["serving"])


class DayOfUsage(BaseModel):
    """The scans of a day (UTC)."""

    day: date
    scans: int
    shares: list[float] = Field(description="Share of each entry in the picks of these scans; the sum is 1.")
    drift: float | None = Field(
        description="Distance from the federation's shares: Jensen-Shannon divergence in "
        "bits, 0 alike to 1 nothing in common. Too large for few scans. Null "
        "if the federation's shares are unknown."
    )


class VersionUsage(BaseModel):
    """The use of one version of the pool by this hospital's scans."""

    artefact: str
    digest: str
    federation: list[float] | None = Field(
        description="Shares in the picks of the federation's training images; null if no "
        "site sent its counts."
    )
    recent_scans: int = Field(description=f"Scans of the last {key_usage.WINDOW_DAYS} days.")
    drift: float | None = Field(
        description=f"Over the last {key_usage.WINDOW_DAYS} days: what `/metrics` tells; null without a scan."
    )
    days: list[DayOfUsage] = Field(description="Oldest first; days without a scan are left out.")


class KeyUsageView(BaseModel):
    """The use of a model's keys by a hospital's scans, by version."""

    hospital: str
    model: str
    versions: list[VersionUsage]


@router.get("/hospitals/{hospital}/serving/{model}/key-usage", responses=problem_responses(404, 422))
def get_key_usage(context: AsReader, hospital: HospitalId, model: ModelName) -> KeyUsageView:
    """Return the entries of an ssf-pool that the hospital's scans picked, by day, beside the federation's.

    Only scans sent with this hospital count. No number can be traced to a scan.
    """
    with context.database.read() as session:
        require_hospital(session, hospital)
        rows = key_usage.rows_of(session, hospital, model)
    if not rows:
        require_name(context.store, model)
    digests = dict.fromkeys(row.digest for row in rows)
    return KeyUsageView(
        hospital=hospital,
        model=model,
        versions=[_version(context, [row for row in rows if row.digest == digest]) for digest in digests],
    )


def _version(context: ServiceContext, rows: list[KeyUsage]) -> VersionUsage:
    try:
        known = key_usage.federation_shares(context.store.by_digest(rows[0].digest, SsfPoolManifest).manifest)
    except StoreError:
        # The version was withdrawn: the usage stays on record, the federation's is not known any more.
        known = None
    recent = key_usage.recent(rows, datetime.now(UTC).date())
    return VersionUsage(
        artefact=f"{rows[0].model}@{rows[0].version}",
        digest=rows[0].digest,
        federation=None if known is None else known.tolist(),
        recent_scans=0 if recent is None else recent.scans,
        drift=key_usage.drift(recent, known),
        days=[
            DayOfUsage(
                day=row.day, scans=usage.scans, shares=usage.shares, drift=key_usage.drift(usage, known)
            )
            for row in rows
            if (usage := key_usage.together([row])) is not None
        ],
    )
