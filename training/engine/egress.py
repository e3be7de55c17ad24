"""Egress policy: which groups of tensors may leave a hospital. It is applied at the hospital."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from training.algorithm import ClientResult, Group, GroupKind, Phase, ServerStage, State
from training.bounds import NO_BOUNDS, FeatureBounds
from training.errors import AlgorithmError, EgressRefused

ALL_KINDS: frozenset[GroupKind] = frozenset(get_args(GroupKind))


@dataclass(frozen=True)
class SiteSpec:
    """One member hospital, as an engine knows it.

    `load` reads the site's data. It is called only in the process that runs the site's steps and must be
    picklable. `allows` lists the kinds that may leave the hospital. `consents` says whether the hospital
    agreed to the phases that require consent. `cases` is the number of its cases, where that is known: it
    spreads sites over workers, and no score can count more. `bounds` are the hospital's limits on features,
    which the method applies at the site.
    """

    name: str
    load: Callable[[], Any] = field(compare=False)
    allows: frozenset[GroupKind] = ALL_KINDS
    consents: bool = False
    cases: int | None = None
    bounds: FeatureBounds = NO_BOUNDS

    def refusal(self, group: Group) -> str | None:
        """Return why a group must not leave the site, or None if it may."""
        if group.kind not in self.allows:
            return f"its egress policy refuses (it allows {', '.join(sorted(self.allows)) or 'nothing'})"
        if group.kind == "features" and self.bounds != NO_BOUNDS and not group.bounded:
            return "the method does not apply the site's bounds on features"
        return None


def check_plan(plan: Sequence[Phase | ServerStage], sites: Sequence[SiteSpec]) -> None:
    """Check before a run starts that every site's policy allows the essential uploads.

    Raises EgressRefused, which names every refused site, group and kind.
    """
    refusals = [
        f"site {site.name}: phase '{phase.name}' uploads '{group.name}', of kind {group.kind}, "
        f"which {refusal}"
        for phase in plan
        if isinstance(phase, Phase) and not phase.consent
        for site in sites
        for group in phase.uploads
        if group.essential and (refusal := site.refusal(group))
    ]
    if refusals:
        raise EgressRefused(
            "; ".join(refusals) + ". Widen the policy, leave the site out, or use another method"
        )


def may_take_part(phase: Phase, site: SiteSpec) -> bool:
    """Whether a site runs this phase: it gave the required consent and refuses no essential group."""
    if phase.consent and not site.consents:
        return False
    return not any(site.refusal(group) for group in phase.uploads if group.essential)


@dataclass(frozen=True)
class Outgoing:
    """A client result after the site's policy was applied. `withheld` names the groups that stay."""

    uploads: Mapping[str, State]
    weight: float
    metrics: Mapping[str, float]
    withheld: tuple[str, ...]


def let_out(phase: Phase, site: SiteSpec, result: ClientResult) -> Outgoing:
    """Apply a site's egress policy to the uploads of a step.

    Raises AlgorithmError when the method uploads other groups than it declared, and EgressRefused when the
    site must not run the phase at all (never in an engine that checks `may_take_part` first).
    """
    declared = {group.name: group for group in phase.uploads}
    if result.uploads.keys() != declared.keys():
        raise AlgorithmError(
            f"phase '{phase.name}' at site {site.name}: declared the uploads {sorted(declared)}, "
            f"made {sorted(result.uploads)}"
        )
    refused = [group for group in phase.uploads if site.refusal(group)]
    essential = [group.name for group in refused if group.essential]
    if essential or not may_take_part(phase, site):
        raise EgressRefused(
            f"site {site.name} does not take part in phase '{phase.name}' ({essential or 'consent'})"
        )
    withheld = [group.name for group in refused]
    # Records are JSON, which has no NaN: metrics that were not measured are left out.
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    if "statistics" not in site.allows and metrics:
        metrics = {}
        withheld.append("metrics")
    uploads = {name: state for name, state in result.uploads.items() if name not in withheld}
    return Outgoing(uploads, result.weight, metrics, tuple(withheld))
