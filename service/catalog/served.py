"""The version that serves a hospital, now or at an instant: the assigned one, or the newest of that time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy.orm import Session

from model_store.store import Store, Version
from service.catalog.version import require_name
from service.database import Assignment
from service.serving import assignments


@dataclass(frozen=True)
class ServedVersion:
    """One answer to "which version served this hospital for this model then".

    `artefact` is the name that the version belongs to: the model's own, or that of what was adapted to the
    hospital. `version` is None when there was none to serve. `withdrawn` says that it was assigned but
    already withdrawn: a scan would have been refused, not answered by another version behind the hospital's
    back. `flagged` are the artefacts, withdrawn by now, that the version descends from.
    """

    artefact: str
    version: int | None
    digest: str | None
    because: Literal["assigned", "newest", "nothing"]
    withdrawn: bool
    assignment: Assignment | None
    flagged: tuple[str, ...] = ()


def serving(
    store: Store, session: Session, hospital: str, model: str, at: datetime | None = None
) -> ServedVersion:
    """Answer from the log, and where it is silent from the times at which versions came and went.

    Raises:
        HospitalUnknown: it is not registered.
        ReferenceNotFound: no model of that name was ever published.
    """
    when = datetime.now(UTC) if at is None else at
    require_name(store, model)
    versions = store.versions(model)
    entry = assignments.assignment(session, hospital, model, at)
    if entry is not None:
        name = entry.artefact or model
        if name != model:
            versions = store.versions(name)
        meant = [version for version in versions if version.artefact.digest == entry.digest]
        withdrawn = any(_withdrawn(version, when) for version in meant)
        flagged = meant[-1].flagged if meant else ()
        return ServedVersion(name, entry.version, entry.digest, "assigned", withdrawn, entry, flagged)
    offered = [v for v in versions if v.artefact.published <= when and not _withdrawn(v, when)]
    if not offered:
        return ServedVersion(model, None, None, "nothing", False, None)
    newest = offered[-1]
    return ServedVersion(
        model, newest.artefact.version, newest.artefact.digest, "newest", False, None, newest.flagged
    )


def _withdrawn(version: Version, when: datetime) -> bool:
    return version.withdrawn is not None and version.withdrawn.time <= when
