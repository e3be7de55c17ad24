"""Which network answers: from what the request asks for to one artefact of kind `model`.

The version: the one named in the reference; else the one assigned to the hospital; else the newest that is
not withdrawn. Within it, whose model:

    member   the site's own; `site` names it, else the hospital's own site
    global   the federation's
    auto     the member model of the hospital's site, if the hospital is a member and the version has one;
             else the global model

An assigned version that was withdrawn is refused, never replaced silently: somebody has to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.manifest import ModelManifest, RoutingSpaceManifest
from model_store.reference import parse_reference
from model_store.store import Store
from service.assignments import assigned_version, site_of
from service.context import Context
from service.problems import Problem

Personalization = Literal["auto", "global", "member"]


@dataclass(frozen=True)
class Selection:
    """The answer: `offered` is what was asked for, `model` the network inside it, `why` says how it came."""

    offered: Artefact
    model: Artefact
    personalization: str
    site: str | None
    why: str

    @property
    def manifest(self) -> ModelManifest:
        """The manifest of the network that answers."""
        manifest = self.model.manifest
        assert isinstance(manifest, ModelManifest)
        return manifest

    @property
    def header(self) -> str:
        """For `Locum-Personalization`: `global`, or `member; site=CS`."""
        return (
            self.personalization
            if self.site is None
            else f"{self.personalization}; site={quote(self.site, safe='')}"
        )


@dataclass(frozen=True)
class Parts:
    """The networks that an artefact offers, by digest."""

    global_model: str | None
    members: Mapping[str, str]


def parts_of(artefact: Artefact) -> Parts:
    """What can be asked of an artefact, whatever its kind."""
    manifest = artefact.manifest
    if isinstance(manifest, RoutingSpaceManifest):
        return Parts(manifest.global_model, manifest.inside)
    if manifest.site is not None:
        return Parts(None, {manifest.site: artefact.digest})
    return Parts(artefact.digest, {})


def offered_names(store: Store) -> list[str]:
    """Names a request may ask for: those that are no part of a composite and have a version that opens."""
    names = []
    for name in store.names():
        try:
            if store.open(name, verify=False).manifest.part_of is None:
                names.append(name)
        except StoreError:
            continue
    return names


def resolve(
    context: Context,
    model: str | None = None,
    hospital: str | None = None,
    personalization: Personalization = "auto",
    site: str | None = None,
) -> Selection:
    """Choose the network. Reads the store and the database: call it in a thread.

    Raises:
        Problem: 422 for parameters that contradict each other, 404 for a site that is not there.
        HospitalUnknown: nobody registered it.
        StoreError: the reference does not open.
    """
    if site is not None and personalization != "member":
        raise Problem(
            422,
            "contradiction",
            "The parameters contradict each other",
            f"`site` belongs to personalization=member, found personalization={personalization}; "
            "leave one of them out.",
        )
    reference = model if model is not None else _only_model(context.store)
    name, number, digest = parse_reference(reference)
    home, assigned = _of_hospital(context, hospital, name)
    if number is not None or digest is not None:
        why = "the version that was asked for"
    elif assigned is not None:
        reference, why = f"{name}@{assigned}", f"the version assigned to hospital '{hospital}'"
    else:
        why = "the newest version"
    # The graph is hashed when it is loaded, which is when it matters.
    offered = context.store.open(reference, verify=False)
    if offered.manifest.part_of is not None:
        raise Problem(
            422,
            "part-of-a-model",
            "Not offered on its own",
            f"'{offered}' is a part of '{offered.manifest.part_of}'; ask for that model, and for the part "
            "with `personalization`.",
        )
    parts = parts_of(offered)
    whose, chosen = _whose(personalization, site or home, site is not None, hospital, parts, offered)
    part = parts.members[chosen] if chosen is not None else parts.global_model
    assert part is not None
    artefact = offered if part == offered.digest else context.store.by_digest(part)
    if not isinstance(artefact.manifest, ModelManifest):
        raise Problem(
            422,
            "unknown-kind",
            "Cannot be served",
            f"'{artefact}' is a {artefact.manifest.kind}, expected a model; publish it again.",
        )
    return Selection(offered, artefact, "global" if chosen is None else "member", chosen, f"{why}; {whose}")


def _only_model(store: Store) -> str:
    names = offered_names(store)
    if len(names) != 1:
        detail = (
            f"The store offers {len(names)} models, so `model` must name one: {', '.join(names)}."
            if names
            else "The store offers no model; publish one, for example with `python -m training.federate`."
        )
        raise Problem(422, "model-not-named", "Which model?", detail, choices=names)
    return names[0]


def _of_hospital(context: Context, hospital: str | None, name: str) -> tuple[str | None, str | None]:
    """The hospital's site in the federation, and the digest assigned to it for this model."""
    if hospital is None:
        return None, None
    with context.database.read() as session:
        return site_of(session, hospital), assigned_version(session, hospital, name)


def _whose(
    personalization: Personalization,
    site: str | None,
    site_given: bool,
    hospital: str | None,
    parts: Parts,
    offered: Artefact,
) -> tuple[str, str | None]:
    """(why, site), the site being None for the global model."""
    if personalization == "member":
        if site is None:
            asked = "no hospital was named" if hospital is None else f"hospital '{hospital}' is no member"
            raise Problem(
                422,
                "site-not-named",
                "Whose model?",
                f"personalization=member needs `site`, or the hospital of a member: {asked}. "
                f"'{offered}' has the sites: {', '.join(sorted(parts.members)) or 'none'}.",
                choices=sorted(parts.members),
            )
        if site not in parts.members:
            raise Problem(
                404,
                "site-not-found",
                "No such member",
                f"'{offered}' has no model of site '{site[:64]}'; "
                f"it has: {', '.join(sorted(parts.members)) or 'none'}.",
                choices=sorted(parts.members),
            )
        return ("the site that was asked for" if site_given else f"hospital '{hospital}' is this site"), site
    if personalization == "auto" and site in parts.members:
        return f"hospital '{hospital}' is a member of the federation", site
    if parts.global_model is None:
        if personalization == "auto" and len(parts.members) == 1:
            return "the only model there is", next(iter(parts.members))
        raise Problem(
            422,
            "no-global-model",
            "No global model",
            f"'{offered}' has no global model, only those of: {', '.join(sorted(parts.members))}; "
            "ask for one with personalization=member and `site`.",
            choices=sorted(parts.members),
        )
    return (
        "the global model was asked for" if personalization == "global" else "no member model applies"
    ), None
