"""Adapted versions: their hospital, their parent and the verdict of their gate.

An adapted version is a `model` that a job made for one hospital from an artefact of the federation, under a
name of its own (`brain.at-dune`). Its parent is in its lineage; its gate's verdict in the job that made it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound, StoreError
from model_store.store import Store
from service.database import ANONYMOUS, Job, caller_of
from service.errors import GateNotPassed, NotAdaptable, SecondPersonNeeded
from service.identity import keys
from service.kinds import ADAPTABLE, BY_MASKS, KINDS, adaptation_of

_LONGEST = 128
_DIGITS = 8


def adapted_name(model: str, hospital: str) -> str:
    """Return `brain.at-dune`; a longer name than the store allows is cut and ends with eight hash digits."""
    name = f"{model}.at-{hospital}"
    if len(name) <= _LONGEST:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST - _DIGITS - 1]}-{digits}"


def adapted_for(artefact: Artefact) -> str | None:
    """Return the hospital that a version was adapted to; None for other artefacts."""
    return artefact.manifest.adapted_to


def parent_behind(store: Store, artefact: Artefact) -> Artefact:
    """Return the parent of an adapted version: an artefact of a kind that can be adapted.

    Raises:
        ArtefactWithdrawn: it was withdrawn.
        ReferenceNotFound: it is not in the store.
    """
    for digest in artefact.manifest.lineage.parents:
        parent = store.by_digest(digest)
        if adaptation_of(parent) is not None:
            return parent
    raise ReferenceNotFound(
        f"'{artefact}' names none of its parents that could be adapted "
        f"({', '.join(artefact.manifest.lineage.parents) or 'none'}): copy the one it was made from into the "
        "store, or adapt again"
    )


def origin_of(store: Store, artefact: Artefact) -> Artefact:
    """The version that an adapted one was made from; hospitals are assigned versions by its name.

    Any other version is its own, and so is one of which no parent opens any more.
    """
    if adapted_for(artefact) is None:
        return artefact
    try:
        return parent_behind(store, artefact)
    except StoreError:
        return artefact


def job_of(session: Session, digest: str) -> Job | None:
    """Return the job that made the version with this digest; None if there is no such job."""
    query = select(Job).where(Job.candidate_digest == digest).order_by(Job.created_at.desc()).limit(1)
    return session.scalars(query).first()


def require_gate(session: Session, artefact: Artefact, override: bool) -> bool:
    """Whether the gate has to be overridden for this adapted version to be assigned.

    Raises:
        GateNotPassed: it did not pass and `override` is false.
    """
    job = job_of(session, artefact.digest)
    gate: Mapping[str, Any] = {} if job is None or job.gate is None else job.gate
    if gate.get("passed") is True:
        return False
    if not override:
        by_masks = gate.get("masks") or {}
        failed = [str(check.get("name")) for check in gate.get("checks", ()) if check.get("passed") is False]
        found = (
            "masks of its scans refused it"
            if by_masks.get("decision") == "refuses"
            else f"it failed: {', '.join(failed) or 'no check in particular'}"
            if gate
            else "no verdict is recorded"
        )
        raise GateNotPassed(
            f"'{artefact}' has not passed its gate ({found}). "
            f"{'To' if job is None else f'Look at its card, /jobs/{job.id}/card; to'} assign it all the "
            "same, say override=true: it is recorded with actor and reason.",
            job=None if job is None else job.id,
            gate=gate or None,
        )
    return True


def require_second_person(session: Session, artefact: Artefact) -> None:
    """Reject the caller that started the job behind this adapted version, by whatever key.

    Raises:
        SecondPersonNeeded: it did, its key and the job's were made by one person, or nothing tells who did.
    """
    job, caller = job_of(session, artefact.digest), caller_of(session)
    if job is None or job.actor is None or job.actor == ANONYMOUS.actor:
        raise SecondPersonNeeded(
            f"nothing records who adapted '{artefact}', and this service has the two-person rule: adapt "
            "again, and let another approver assign the new version",
            job=None if job is None else job.id,
        )
    if keys.people_behind(session, job.actor) & keys.people_behind(session, caller.actor):
        same = (
            "" if job.actor == caller.actor else f", and one person can have both its key and {caller.actor}"
        )
        raise SecondPersonNeeded(
            f"{job.actor} started the job that adapted '{artefact}'{same}. This service has the two-person "
            "rule: let another approver assign it, by a token or a key of the command line (`keys create`)",
            job=job.id,
        )


def resolve_adaptable(store: Store, offered: Artefact) -> Artefact:
    """What is to be adapted: the artefact itself, or the one behind an adapted version.

    Raises:
        NotAdaptable: the artefact is of another kind.
    """
    if adapted_for(offered) is not None:
        return parent_behind(store, offered)
    if adaptation_of(offered) is not None:
        return offered
    if offered.manifest.task.regions:
        raise NotAdaptable(
            f"'{offered}' answers by regions, a sigmoid for each, and every preset compares classes that "
            "exclude each other: serve it as it is, train it further in a federation, or train one for "
            "a task without `regions`"
        )
    raise NotAdaptable(
        f"'{offered}' is of kind {offered.manifest.kind}, expected "
        f"{'; or '.join(f'{KINDS[name].noun}: {found.source}' for name, found in ADAPTABLE.items())}; or "
        f"{BY_MASKS.source}.",
    )


def require_parts(store: Store, parent: Artefact) -> None:
    """Reject now what a worker would reject later: it loads every part.

    Raises:
        ArtefactWithdrawn, ReferenceNotFound: a part was withdrawn, or is not in the store.
    """
    for digest in parent.manifest.references().values():
        store.by_digest(digest)
