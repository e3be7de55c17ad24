"""Resolve the version for a request: the named one, else the one that the serving log has for the hospital,
else the newest.

A hospital without a decision keeps the version that was the newest when it was first served, unless the
service was configured to serve new versions by themselves (`LOCUM_NEW_VERSIONS=serve`). Where the hospital
demands acceptances, or the model has a change plan there, no version begins to serve without a decision.

An assigned version may be one that was adapted to the hospital: it is assigned under the model's own name,
`brain`, and lies in the store under its own, `brain.at-dune`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound, StoreError
from model_store.reference import parse_reference
from model_store.store import Store
from model_store.task import TaskKind
from model_store.versions import some
from service.catalog.adapted import adapted_for, resolve_adaptable
from service.database import Assignment, Database
from service.database.caller import SERVICE
from service.database.hospitals import lent_sites, site_of_hospital
from service.errors import (
    AnotherTaskKind,
    AnswersHeld,
    ModelNotNamed,
    NothingAssigned,
    ParametersContradict,
    PartRequested,
    VersionNotNamed,
)
from service.kinds import kind_of
from service.serving import assignments
from service.serving.demanded import needs_decision
from service.watch.rules import Stop, stop_of

Chosen = TypeVar("Chosen")
Cause = Literal["named", "assigned", "kept", "newest"]
NewVersions = Literal["keep", "serve"]
"""Whether a hospital without a decision keeps its version when a newer one is published."""

# Where scans for a task of that kind are sent, and what is done to them there.
_ROUTES: dict[TaskKind, tuple[str, str]] = {
    "segmentation": ("/segment", "segmented"),
    "classification": ("/classify", "classified"),
}


@dataclass(frozen=True)
class ResolvedVersion:
    """The resolved version and the cause of the choice.

    `home` is the site of a member hospital, `entry` what the serving log had in force for the hospital.
    `lent` are the sites of which the own model may answer the caller; None for all. `stop` is what an alarm
    of the watch asks for, None without one. `needs` says why no version begins to serve the hospital without
    a decision, None where one may.
    """

    artefact: Artefact
    cause: Cause
    home: str | None
    hospital: str | None
    entry: Assignment | None
    lent: frozenset[str] | None = None
    stop: Stop | None = None
    needs: str | None = None

    @property
    def owner(self) -> str | None:
        """The hospital that this version was adapted for."""
        return adapted_for(self.artefact)

    @property
    def adapts_itself(self) -> bool:
        """Whether its graph adapts to every scan as it runs, without a job."""
        return kind_of(self.artefact).adapts_itself_by is not None

    @property
    def why(self) -> str:
        """In words, for the receipt."""
        return {
            "named": "the version that was asked for",
            "assigned": f"the version assigned to hospital '{self.hospital}'",
            "kept": f"the version that hospital '{self.hospital}' is served until a decision",
            "newest": "the newest version",
        }[self.cause]


def offered_names(store: Store) -> list[str]:
    """Names a request may ask for: those with a version that opens, neither a part nor one hospital's own."""
    return [newest.name for newest in _offered(store)]


def _offered(store: Store) -> list[Artefact]:
    """The newest version of each of them."""
    found = []
    for name in store.versions.shared():
        try:
            newest = store.open(name, verify=False)
        except StoreError:
            continue
        if newest.manifest.part_of is None and adapted_for(newest) is None:
            found.append(newest)
    return found


def require_name(store: Store, name: str) -> None:
    """Raises ReferenceNotFound for a name nothing was published under; it says which may be asked for."""
    if not store.versions.numbers(name):
        known = some(offered_names(store)) or "nothing yet"
        raise ReferenceNotFound(f"'{name}' is not in the store, which offers: {known}")


def resolve_version(
    store: Store,
    database: Database,
    model: str | None,
    hospital: str | None,
    kind: TaskKind | None = None,
    new_versions: NewVersions = "keep",
) -> ResolvedVersion:
    """Find the version, of a model for tasks of that kind. Reads the store and the database: call it in a
    thread.

    Raises:
        SelectionError: it is not offered on its own, or to this hospital, or is not named clearly, or is for
            another kind of task.
        HospitalUnknown: it is not registered.
        StoreError: the reference does not open.
    """
    newest: Artefact | None = None
    if model is None:
        newest = _only_model(store, kind)
        model = newest.name
    reference = model
    name, number, digest = parse_reference(reference)
    home, entry, lent, stop, needs = _of_hospital(database, hospital, name)
    cause: Cause = "newest"
    if number is not None or digest is not None:
        cause = "named"
    elif entry is not None and not (entry.by_default and new_versions == "serve" and needs is None):
        reference = f"{entry.artefact or name}@{entry.digest}"
        cause = "kept" if entry.by_default else "assigned"
    if newest is None or cause != "newest":
        if cause in ("named", "newest"):
            require_name(store, name)
        # The graph is hashed when it is loaded, which is when it matters.
        newest = store.open(reference, verify=False)
    stop = None if cause == "named" else stop
    found = ResolvedVersion(newest, cause, home, hospital, entry, lent, stop, needs)
    reduced = getattr(found.artefact.manifest, "precision", None)
    if reduced is not None and cause == "newest":
        raise VersionNotNamed(
            f"'{found.artefact.name}' has graphs of '{found.artefact.manifest.part_of}' in {reduced}: name a "
            f"version, such as '{found.artefact}', or assign it with precision={reduced}.",
        )
    if found.artefact.manifest.part_of is not None and reduced is None:
        raise PartRequested(
            f"'{found.artefact}' is a part of '{found.artefact.manifest.part_of}'; ask for that model, and "
            "for the part with `personalization`.",
        )
    if kind is not None:
        _check_kind(found.artefact, kind)
    if found.owner is not None:
        _check_owner(found, found.owner)
    return found


def serve_version(
    store: Store,
    database: Database,
    model: str | None,
    hospital: str | None,
    kind: TaskKind | None,
    new_versions: NewVersions,
    choose: Callable[[ResolvedVersion], Chosen],
) -> Chosen:
    """Find the version and choose in it; record what a hospital without a decision is served from then on.

    Args:
        store, database, model, hospital, kind: see `resolve_version`.
        new_versions: whether that hospital is served the newest version instead, whatever was recorded.
        choose: what answers in that version. Called again if a decision came in between.

    Raises:
        AnswersHeld: an alarm of the watch holds them.
        NothingAssigned: the hospital needs a decision, and none was made.
        Exception: as `resolve_version` and `choose`.
    """
    while True:
        found = resolve_version(store, database, model, hospital, kind, new_versions)
        if found.stop == "hold":
            raise AnswersHeld(
                f"an alarm of the watch holds the answers of '{found.artefact}' at hospital "
                f"'{found.hospital}', as was set beforehand: an operator looks at it and answers it (POST "
                f"/hospitals/{found.hospital}/watch/MODEL/answers). A version that is named answers."
            )
        if found.cause == "newest" and found.needs is not None:
            raise NothingAssigned(
                f"no version of '{found.artefact.name}' serves hospital '{found.hospital}' yet, and none "
                f"begins to without a decision: {found.needs}. An approver assigns one (PUT /hospitals/"
                f"{found.hospital}/serving/{found.artefact.name}). A version that is named answers."
            )
        chosen = choose(found)
        if _keep_served(database, found):
            return chosen


def _keep_served(database: Database, found: ResolvedVersion) -> bool:
    """Record the version that answers a hospital without a decision, so that it serves until there is one.

    Returns whether it is in force: another request may have decided, demanded a decision, or recorded
    another version, since it was resolved.
    """
    artefact, seen = found.artefact, found.entry
    if found.hospital is None or found.cause != "newest":
        return True
    if seen is not None and seen.digest == artefact.digest:
        return True
    with database.for_caller(SERVICE).write() as session:
        if needs_decision(session, found.hospital, artefact.name) is not None:
            return False
        entry = assignments.keep(
            session,
            found.hospital,
            artefact.name,
            version=artefact.version,
            digest=artefact.digest,
            replaces=0 if seen is None else seen.sequence,
        )
    return entry.digest == artefact.digest


def resolve_parent(
    store: Store,
    database: Database,
    model: str | None = None,
    hospital: str | None = None,
    kind: TaskKind | None = None,
    new_versions: NewVersions = "keep",
) -> Artefact:
    """The artefact to adapt for this hospital: the one named, else what the hospital is served (or what
    that was made from), else the newest. Reads the store and the database: call it in a thread.

    Raises:
        SelectionError: as `resolve_version`.
        NotAdaptable: the artefact is of another kind.
        HospitalUnknown: it is not registered.
        StoreError: the reference does not open.
    """
    found = resolve_version(store, database, model, hospital, kind, new_versions)
    return resolve_adaptable(store, found.artefact)


def route_of(kind: TaskKind) -> str:
    """Where scans for a task of that kind are sent."""
    return _ROUTES[kind][0]


def _check_kind(artefact: Artefact, kind: TaskKind) -> None:
    task = artefact.manifest.task
    if task.kind == kind:
        return
    route, done = _ROUTES[task.kind]
    raise AnotherTaskKind(
        f"Expected a model by which scans are {_ROUTES[kind][1]}, found '{artefact}', by which they are "
        f"{done} (task '{task.name}'): send the scan to POST {route}, or name another model.",
        route=route,
    )


def _check_owner(found: ResolvedVersion, owner: str) -> None:
    if found.cause == "newest":
        raise VersionNotNamed(
            f"'{found.artefact.name}' holds what was adapted to hospital '{owner}', assigned or not, so that "
            f"a version must be named, such as '{found.artefact}'; what is assigned answers to the model's "
            "own name and the hospital.",
        )
    if found.hospital not in (None, owner):
        raise ParametersContradict(
            f"'{found.artefact}' was adapted to hospital '{owner}', found hospital '{found.hospital}': no "
            "other is served it."
        )


def _only_model(store: Store, kind: TaskKind | None) -> Artefact:
    """The newest version of the one model. Raises ModelNotNamed."""
    offered = _offered(store)
    fitting = [newest for newest in offered if kind in (None, newest.manifest.task.kind)]
    # Of another kind: asked for, so that the refusal can say where it belongs.
    chosen = fitting or offered
    if len(chosen) != 1:
        names = [newest.name for newest in chosen]
        detail = (
            f"The store offers {len(names)} models, so `model` must name one: {some(names)}."
            if names
            else "The store offers no model; publish one, for example with `python -m training.federate`."
        )
        raise ModelNotNamed(detail, choices=names)
    return chosen[0]


def _of_hospital(
    database: Database, hospital: str | None, name: str
) -> tuple[str | None, Assignment | None, frozenset[str] | None, Stop | None, str | None]:
    """The hospital's site in the federation, the assignment in force for this model, the sites that may
    answer the caller, what the watch asks for, and why a decision is needed."""
    with database.read() as session:
        lent = lent_sites(session)
        if hospital is None:
            return None, None, lent, None, None
        home, entry = site_of_hospital(session, hospital), assignments.assignment(session, hospital, name)
        stop, needs = stop_of(session, hospital, name), needs_decision(session, hospital, name)
        return home, entry, lent, stop, needs
