"""Choose the global, member or cluster model inside an artefact version."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from model_store.artefact import Artefact
from service.catalog.ways import Ways
from service.errors import (
    ClusterNotNamed,
    ClusterUnknown,
    NoGlobalModel,
    SiteNotNamed,
    SiteNotShared,
    SiteUnknown,
)
from service.kinds import Parts, kind_of

Personalization = Literal["auto", "global", "member", "cluster", "hospital"]


@dataclass(frozen=True)
class PartRequest:
    """A request, the hospital's own version being out of the question; `home` is the hospital's site.

    `lent` are the sites of which the own model may answer the caller; None for all.
    """

    personalization: Personalization
    site: str | None
    cluster: str | None
    hospital: str | None
    home: str | None
    lent: frozenset[str] | None = None


@dataclass(frozen=True)
class PartChoice:
    """One network by its digest, its personalization, and the reason in words."""

    digest: str
    personalization: Literal["global", "member", "cluster"]
    why: str
    site: str | None = None
    cluster: str | None = None


def personalizations(artefact: Artefact, ways: Ways) -> list[str]:
    """Return the values of `personalization` that a request on this artefact can have."""
    kind = kind_of(artefact)
    if kind.adapts_itself_by is not None:
        return ["auto", "scan"]
    parts = kind.parts(artefact)
    offered = {
        "auto": True,
        "hospital": ways.adaptable,
        "member": bool(parts.members),
        "cluster": bool(parts.clusters),
        "global": parts.global_model is not None,
        "scan": bool(ways.by_scan),
    }
    return [name for name, there in offered.items() if there]


def choose(artefact: Artefact, asked: PartRequest) -> PartChoice:
    """Choose the network for a request.

    Raises:
        SiteNotNamed, ClusterNotNamed: the request names no site or cluster, nor a member hospital.
        SiteUnknown, ClusterUnknown: the artefact has no model of this site or cluster.
        SiteNotShared: the model of this site is not for the caller's hospitals.
        NoGlobalModel: the artefact has no global model.
    """
    parts = kind_of(artefact).parts(artefact)
    if asked.personalization == "member":
        return _member(artefact, parts, asked)
    if asked.personalization == "cluster":
        return _cluster(artefact, parts, asked)
    if asked.personalization == "auto":
        member = f"hospital '{asked.hospital}' is a member of the federation"
        home = asked.home or ""
        if home in parts.members:
            worth, reason = _worth(parts, home)
            if worth:
                return PartChoice(parts.members[home], "member", f"{member}{reason}", site=home)
            assert parts.global_model is not None  # what the member's model was to be compared with
            return PartChoice(parts.global_model, "global", f"{member}, but {reason}")
        cluster = parts.assignment.get(home)
        if cluster is not None:
            return PartChoice(
                parts.clusters[cluster], "cluster", f"{member}, in this cluster", cluster=cluster
            )
    if parts.global_model is not None:
        named = asked.personalization == "global"
        why = "the global model was asked for" if named else _no_member(asked)
        return PartChoice(parts.global_model, "global", why)
    if asked.personalization == "auto" and artefact.digest in parts.members.values():
        # The artefact is one site's model, not one of several.
        (site,) = parts.members
        return PartChoice(artefact.digest, "member", "the only model there is", site=site)
    raise _no_global(artefact, parts, asked)


def _worth(parts: Parts, site: str) -> tuple[bool, str]:
    """Whether a member's own model is served without being asked for, and why."""
    if parts.gains is None:
        return True, ""
    gain = parts.gains.get(site)
    if gain is None:
        return False, "its own model was never compared with the global one"
    if gain > 0:
        return True, f"; its own model is {gain:.3f} of Dice above the global one on its validation patients"
    return (
        False,
        f"its own model is not above the global one on its validation patients ({gain:+.3f} of Dice)",
    )


def _member(artefact: Artefact, parts: Parts, asked: PartRequest) -> PartChoice:
    site = asked.site or asked.home
    if site is None:
        raise SiteNotNamed(
            f"personalization=member needs `site`, or the hospital of a member: {_asking(asked)}. "
            f"'{artefact}' has the sites: {_listed(parts.members)}.",
            choices=sorted(parts.members),
        )
    if site not in parts.members:
        raise SiteUnknown(
            f"'{artefact}' has no model of site '{site[:64]}'; it has: {_listed(parts.members)}.",
            choices=sorted(parts.members),
        )
    if asked.lent is not None and site not in asked.lent:
        raise SiteNotShared(
            f"the own model of site '{site}' answers its own hospital alone: its admin lets it answer others "
            "with `shares_model` (PUT /hospitals/HOSPITAL). Ask for another model.",
            choices=sorted(asked.lent & parts.members.keys()),
        )
    why = "the site that was asked for" if asked.site else f"hospital '{asked.hospital}' is this site"
    return PartChoice(parts.members[site], "member", why, site=site)


def _cluster(artefact: Artefact, parts: Parts, asked: PartRequest) -> PartChoice:
    cluster = asked.cluster or parts.assignment.get(asked.home or "")
    if cluster is None:
        raise ClusterNotNamed(
            f"personalization=cluster needs `cluster`, or the hospital of a member: {_asking(asked)}. "
            f"'{artefact}' has the clusters: {_listed(parts.clusters)}.",
            choices=sorted(parts.clusters),
        )
    if cluster not in parts.clusters:
        raise ClusterUnknown(
            f"'{artefact}' has no cluster '{cluster[:64]}'; it has: {_listed(parts.clusters)}.",
            choices=sorted(parts.clusters),
        )
    why = "the cluster that was asked for" if asked.cluster else f"hospital '{asked.hospital}' is in it"
    return PartChoice(parts.clusters[cluster], "cluster", why, cluster=cluster)


def _no_global(artefact: Artefact, parts: Parts, asked: PartRequest) -> NoGlobalModel:
    if parts.clusters:
        hospital = asked.hospital or "HOSPITAL"
        return NoGlobalModel(
            f"'{artefact}' has no global model, but one for each of the clusters: {_listed(parts.clusters)}. "
            "Name one with personalization=cluster and `cluster`, or let the hospital's own scans pick one: "
            f"POST /hospitals/{hospital}/adaptations.",
            choices=sorted(parts.clusters),
        )
    return NoGlobalModel(
        f"'{artefact}' has no global model, only those of: {', '.join(sorted(parts.members))}; "
        "ask for one with personalization=member and `site`.",
        choices=sorted(parts.members),
    )


def _no_member(asked: PartRequest) -> str:
    if asked.home is None:
        return "no member model applies"
    return f"hospital '{asked.hospital}' is registered as site '{asked.home[:64]}', which has no model here"


def _asking(asked: PartRequest) -> str:
    return "no hospital was named" if asked.hospital is None else f"hospital '{asked.hospital}' is no member"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
