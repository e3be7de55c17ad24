"""Scans of an acceptance: what is usual for a version at a hospital before its first answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Acceptance, Job
from service.observation import Stored


def accepted_scans(session: Session, hospital: str, version: str, precision: str) -> list[Stored]:
    """The answers to the scans by which a hospital accepted a version, by its digest.

    None where the newest decision on it in this precision rejects it. They are of any scanner: a cohort does
    not keep which.
    """
    own = (Acceptance.hospital == hospital, Acceptance.version == version, Acceptance.precision == precision)
    newest = session.scalars(select(Acceptance).where(*own).order_by(Acceptance.id.desc()).limit(1)).first()
    if newest is None or not newest.accepted:
        return []
    job = session.get(Job, newest.job)
    report: Mapping[str, Any] = {} if job is None or job.result is None else job.result["report"]
    # Reports of earlier versions of Locum have not what was seen.
    return [_stored(each) for each in report.get("scans", ()) if "seen" in each]


def _stored(scan: Mapping[str, Any]) -> Stored:
    row = {"shift": scan["shift"], "unlike": len(scan["unlike"])}
    labels = {
        label: {"confidence": scan["confidence"][label], **seen} for label, seen in scan["seen"].items()
    }
    return Stored(row, labels)
