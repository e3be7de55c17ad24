"""Which network answers: from what the request asks for to one artefact of kind `model`.

The version: the one named in the reference; else the one assigned to the hospital; else the newest that is
not withdrawn. Within it, whose model:

    hospital the version that was adapted to the hospital and assigned to it
    member   the site's own; `site` names it, else the hospital's own site
    global   the federation's
    auto     the hospital's adapted version, if one is assigned; else the member model of the hospital's site,
             if the hospital is a member and the version has one; else the global model

Where an adapted version is assigned, `global` and `member` are those of the artefact it was made from.
An adapted version that is named (`brain.at-dune@1`) answers by itself, assigned or not: how a candidate is
looked at. An assigned version that was withdrawn is refused, never replaced silently: somebody has to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from model_store.artefact import Artefact
from model_store.manifest import ModelManifest, RoutingSpaceManifest
from service.adapted import parent_behind
from service.context import Context
from service.offered import Offered, contradiction, offered
from service.problems import Problem

Personalization = Literal["auto", "global", "member", "hospital"]


@dataclass(frozen=True)
class Selection:
    """The answer: `offered` is what was asked for, `model` the network inside it, `why` says how it came."""

    offered: Artefact
    model: Artefact
    personalization: str
    site: str | None
    why: str
    hospital: str | None = None

    @property
    def manifest(self) -> ModelManifest:
        """The manifest of the network that answers."""
        manifest = self.model.manifest
        assert isinstance(manifest, ModelManifest)
        return manifest

    @property
    def header(self) -> str:
        """For `Locum-Personalization`: `global`, `member; site=CS` or `hospital; hospital=dune`."""
        about = {"site": self.site, "hospital": self.hospital}
        named = [f"{name}={quote(value, safe='')}" for name, value in about.items() if value is not None]
        return "; ".join([self.personalization, *named])


@dataclass(frozen=True)
class Parts:
    """The networks that an artefact offers, by digest."""

    global_model: str | None
    members: Mapping[str, str]


def parts_of(artefact: Artefact) -> Parts:
    """What can be asked of an artefact. Raises Problem 422 for one of a kind that does not segment."""
    manifest = artefact.manifest
    if isinstance(manifest, RoutingSpaceManifest):
        return Parts(manifest.global_model, manifest.inside)
    if isinstance(manifest, ModelManifest):
        whole = manifest.site is None
        return Parts(artefact.digest, {}) if whole else Parts(None, {str(manifest.site): artefact.digest})
    raise Problem(
        422,
        "unknown-kind",
        "Cannot be served",
        f"'{artefact}' is a {manifest.kind}, expected a model or a routing-space; ask for another model.",
    )


def resolve(
    context: Context,
    model: str | None = None,
    hospital: str | None = None,
    personalization: Personalization = "auto",
    site: str | None = None,
) -> Selection:
    """Choose the network. Reads the store and the database: call it in a thread.

    Raises:
        Problem: 422 for parameters that contradict each other, 404 for a site or an adapted version that is
            not there.
        HospitalUnknown: nobody registered it.
        StoreError: the reference does not open.
    """
    if site is not None and personalization != "member":
        raise contradiction(
            f"`site` belongs to personalization=member, found personalization={personalization}; "
            "leave one of them out."
        )
    found = offered(context, model, hospital)
    artefact, owner, why = found.artefact, found.owner, found.why
    if owner is not None and personalization in ("auto", "hospital"):
        return Selection(artefact, artefact, "hospital", None, f"{why}; adapted to hospital '{owner}'", owner)
    if personalization == "hospital":
        raise _no_adapted_version(found)
    if owner is not None:
        if found.cause == "named":
            raise contradiction(
                f"'{artefact}' is one network, adapted to hospital '{owner}': expected personalization=auto "
                f"or hospital with it, found {personalization}; or name the model that it was made from."
            )
        artefact, why = parent_behind(context.store, artefact), f"what {why} was made from"
    parts = parts_of(artefact)
    whose, chosen = _whose(personalization, site or found.home, site is not None, hospital, parts, artefact)
    part = parts.members[chosen] if chosen is not None else parts.global_model
    assert part is not None
    network = artefact if part == artefact.digest else context.store.by_digest(part)
    if not isinstance(network.manifest, ModelManifest):
        raise Problem(
            422,
            "unknown-kind",
            "Cannot be served",
            f"'{network}' is a {network.manifest.kind}, expected a model; publish it again.",
        )
    return Selection(artefact, network, "global" if chosen is None else "member", chosen, f"{why}; {whose}")


def _no_adapted_version(found: Offered) -> Problem:
    if found.hospital is None:
        return contradiction("personalization=hospital needs `hospital`; name it, or leave both out.")
    if found.cause == "named":
        return contradiction(
            f"personalization=hospital takes the version assigned to hospital '{found.hospital}', but "
            f"'{found.artefact}' was named, which was adapted to nobody; leave the version out."
        )
    return Problem(
        404,
        "no-adapted-version",
        "Nothing was adapted to this hospital",
        f"No adapted version of '{found.artefact.name}' is assigned to hospital '{found.hospital}': ask with "
        f"personalization=auto, or adapt and assign one (POST /hospitals/{found.hospital}/adaptations).",
    )


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
