"""The version that serves a hospital, now or at an instant: that of the serving log, or the newest then."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy.orm import Session

from model_store.errors import StoreError
from model_store.store import Store
from model_store.versions import Version
from service.catalog.version import NewVersions, require_name
from service.database import Assignment
from service.serving import assignments
from service.serving.demanded import needs_decision


@dataclass(frozen=True)
class ServedVersion:
    """One answer to "which version served this hospital for this model then".

    `artefact` is the name that the version belongs to: the model's own, or that of what was adapted to the
    hospital. `version` is None when there was none to serve. `because` is `kept` for a version that the
    hospital was first served without a decision, `nothing` also where the hospital needs a decision and none
    was made. `withdrawn` says that the version of the log was already
    withdrawn: a scan would have been refused, not answered by another version behind the hospital's back.
    So it is where its graph in the log's precision was.
    `flagged` are the artefacts, withdrawn by now, that the version descends from. `newer` is the newest
    version of the model, where it is newer than the one that serves, or none does until a decision.
    """

    artefact: str
    version: int | None
    digest: str | None
    because: Literal["assigned", "kept", "newest", "nothing"]
    withdrawn: bool
    assignment: Assignment | None
    flagged: tuple[str, ...] = ()
    newer: int | None = None


def serving(
    store: Store,
    session: Session,
    hospital: str,
    model: str,
    at: datetime | None = None,
    new_versions: NewVersions = "keep",
) -> ServedVersion:
    """Answer from the log, and where it is silent from the times at which versions came and went.

    Raises:
        HospitalUnknown: it is not registered.
        ReferenceNotFound: no model of that name was ever published.
    """
    when = datetime.now(UTC) if at is None else at
    require_name(store, model)
    newest = _newest(store, model, when)
    entry = assignments.assignment(session, hospital, model, at)
    by_decision = needs_decision(session, hospital, model, at) is not None
    # Until its next scan, the log of a hospital that is served new versions has the version of its last one.
    follows = new_versions == "serve" and not by_decision and at is None
    ahead = entry is not None and entry.by_default and follows
    if entry is not None and not ahead:
        name = entry.artefact or model
        meant = _meant(store, name, entry.digest)
        return ServedVersion(
            name,
            entry.version,
            entry.digest,
            "kept" if entry.by_default else "assigned",
            (meant is not None and _withdrawn(meant, when)) or _graph_withdrawn(store, entry, when),
            entry,
            () if meant is None else meant.flagged,
            _newer(newest, entry, meant),
        )
    if newest is None:
        return ServedVersion(model, None, None, "nothing", False, None)
    if by_decision:
        return ServedVersion(model, None, None, "nothing", False, None, newer=newest.artefact.version)
    return ServedVersion(
        model, newest.artefact.version, newest.artefact.digest, "newest", False, entry, newest.flagged
    )


def _newest(store: Store, model: str, when: datetime) -> Version | None:
    """The newest version that was published by then and not withdrawn.

    Raises the error of the newest version if no version is readable.
    """
    unreadable: list[StoreError] = []
    numbers = store.versions.numbers(model)
    for number in reversed(numbers):
        try:
            version = store.versions.get(model, number)
        except StoreError as error:
            unreadable.append(error)
            continue
        if version.artefact.published <= when and not _withdrawn(version, when):
            return version
    if unreadable and len(unreadable) == len(numbers):
        raise unreadable[0]
    return None


def _meant(store: Store, name: str, digest: str) -> Version | None:
    record = store.lineage.locate(digest)
    if record is None or record.name != name:
        return None
    with suppress(StoreError):
        return store.versions.get(name, record.number)
    return None


def _graph_withdrawn(store: Store, entry: Assignment, when: datetime) -> bool:
    record = None if entry.reduced is None else store.lineage.locate(entry.reduced)
    if record is None:
        return False
    with suppress(StoreError):
        return _withdrawn(store.versions.get(record.name, record.number), when)
    return False


def _newer(newest: Version | None, entry: Assignment, meant: Version | None) -> int | None:
    """The number of the model's newest version, if it was published after the one that serves."""
    if newest is None or newest.artefact.digest == entry.digest:
        return None
    serves = entry.at if meant is None else meant.artefact.published
    return newest.artefact.version if newest.artefact.published > serves else None


def _withdrawn(version: Version, when: datetime) -> bool:
    return version.withdrawn is not None and version.withdrawn.time <= when
