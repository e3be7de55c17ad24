"""An alarm of the watch that waits for a person."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from service.database import Watch, WatchEvent
from service.watch.silence import Arrivals


def put_alarm(session: Session, hospital: str, model: str, version: str, scanner: str = "CT 2") -> None:
    """Store a watch over the answers by a version (its digest) with one unanswered alarm of its shift."""
    now = datetime.now(UTC)
    own = {"hospital": hospital, "model": model, "scanner": scanner}
    session.add(
        Watch(
            **own,
            state="investigate",
            since=now,
            version=version,
            software="",
            locum="1",
            began=now,
            answers=100,
            last_at=now,
            day=now.date(),
            today=1,
            arrivals=asdict(Arrivals()),
            streams={},
            usual=b"",
        )
    )
    details = {"up": True, "height": 9.0, "limit": 8.0}
    session.add(WatchEvent(**own, kind="alarm", at=now, since=now, stream="shift", details=details))
