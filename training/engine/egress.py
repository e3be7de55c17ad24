"""Egress policy: which groups of tensors may leave a hospital. It is applied at the hospital."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from training.algorithm import ClientResult, Group, GroupKind, Phase, Plan, State
from training.bounds import NO_BOUNDS, FeatureBounds
from training.errors import AlgorithmError, ConfigurationError, EgressRefused
from training.privacy import Noising, PrivacyDemand, RunPrivacy, Spent

ALL_KINDS: frozenset[GroupKind] = frozenset(get_args(GroupKind))
_CANNOT = "only a mean of updates of what the sites received can have it"


@dataclass(frozen=True)
class SiteSpec:
    """One member hospital, as an engine knows it.

    `load` reads the site's data. It is called only in the process that runs the site's steps and must be
    picklable. `allows` lists the kinds that may leave the hospital. `consents` says whether the hospital
    agreed to the phases that require consent. `cases` is the number of its cases, where that is known: it
    spreads sites over workers, and bounds what the site can send. `bounds` are the hospital's limits on
    features, which the method applies at the site. `privacy` is what the run declares for all sites, `demand`
    what this hospital asks for its own updates; the stricter of both applies.
    """

    name: str
    load: Callable[[], Any] = field(compare=False)
    allows: frozenset[GroupKind] = ALL_KINDS
    consents: bool = False
    cases: int | None = None
    bounds: FeatureBounds = NO_BOUNDS
    privacy: RunPrivacy | None = None
    demand: PrivacyDemand | None = None

    def noising(self, group: Group) -> Noising | None:
        """Return how a group's updates are clipped and noised before they leave; None: not at all."""
        own = self.demand.kinds.get(group.kind) if self.demand else None
        declared = self.privacy.groups.get(group.name) if self.privacy else None
        return own.stricter(declared) if own else declared

    @property
    def delta(self) -> float:
        """The delta at which the site's epsilon is given: the smaller of the run's and its own."""
        return min(found.delta for found in (self.privacy, self.demand) if found)

    def refusal(self, phase: Phase, group: Group) -> str | None:
        """Return why a group must not leave the site in a phase, or None if it may."""
        if group.kind not in self.allows:
            return f"its egress policy refuses (it allows {', '.join(sorted(self.allows)) or 'nothing'})"
        if not group.beside_noise and (self.privacy or self.demand):
            return "would be wrong beside updates with noise for differential privacy"
        if group.kind == "features" and self.bounds != NO_BOUNDS and not group.bounded:
            return "the method does not apply the site's bounds on features"
        if self.demand and group.kind in self.demand.kinds and not averages_updates(phase, group):
            return (
                f"must have differential privacy by its policy, but {_CANNOT}; this group is reduced by "
                f"{group.reduction}"
            )
        return None


def averages_updates(phase: Phase, group: Group) -> bool:
    """Whether a group is the mean of updates: the sites received the tensors that they change."""
    return group.reduction == "mean" and group.name in {download.name for download in phase.downloads}


def check_privacy(plan: Plan, privacy: RunPrivacy | None) -> None:
    """Check that every group for which a run declares privacy can have it. Raises ConfigurationError.

    An upload of the same kind without noise beside it may reveal the update: SCAFFOLD's change of the control
    is the update, scaled.
    """
    if privacy is None:
        return
    uploads = [(phase, group) for phase in plan if isinstance(phase, Phase) for group in phase.uploads]
    able = sorted(
        {
            group.name
            for phase, group in uploads
            if all(averages_updates(phase, other) for other in _of_kind(phase, group))
        }
    )
    advice = f"groups that can: {', '.join(able) or 'none'}"
    problems = []
    for name in privacy.groups:
        found = [(phase, group) for phase, group in uploads if group.name == name]
        if not found:
            problems.append(f"privacy.groups: no phase uploads '{name}'; {advice}")
        problems += [
            f"privacy.groups: '{name}' in phase '{phase.name}' is reduced by {group.reduction}, and "
            f"{_CANNOT}; {advice}"
            for phase, group in found
            if not averages_updates(phase, group)
        ]
        problems += [
            f"privacy.groups: '{name}' in phase '{phase.name}' leaves beside '{other.name}', which may "
            f"reveal it without noise; {advice}"
            for phase, group in found
            for other in _of_kind(phase, group)
            if other.name not in privacy.groups
        ]
    if problems:
        raise ConfigurationError("differential privacy does not fit the method", problems)


def _of_kind(phase: Phase, group: Group) -> list[Group]:
    return [other for other in phase.uploads if other.kind == group.kind]


def check_plan(plan: Plan, sites: Sequence[SiteSpec]) -> None:
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
        if group.essential and (refusal := site.refusal(phase, group))
    ]
    if refusals:
        raise EgressRefused(
            "; ".join(refusals) + ". Widen the policy, leave the site out, or use another method"
        )


def may_take_part(phase: Phase, site: SiteSpec) -> bool:
    """Whether a site runs this phase: it gave the required consent and refuses no essential group."""
    if phase.consent and not site.consents:
        return False
    return not any(site.refusal(phase, group) for group in phase.uploads if group.essential)


@dataclass(frozen=True)
class Outgoing:
    """A client result after the site's policy was applied. `withheld` names the groups that stay.

    `privacy` says what the groups that leave with noise have cost the site so far.
    """

    uploads: Mapping[str, State]
    weight: float
    metrics: Mapping[str, float]
    withheld: tuple[str, ...]
    privacy: Mapping[str, Spent] = field(default_factory=dict)


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
    refused = [group for group in phase.uploads if site.refusal(phase, group)]
    essential = [group.name for group in refused if group.essential]
    if essential or not may_take_part(phase, site):
        raise EgressRefused(
            f"site {site.name} does not take part in phase '{phase.name}' ({essential or 'consent'})"
        )
    withheld = [group.name for group in refused]
    # Records are JSON, which has no NaN: metrics that were not measured are left out.
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    noised = site.demand.kinds if site.demand else {}
    if ("statistics" not in site.allows or "statistics" in noised) and metrics:
        metrics = {}
        withheld.append("metrics")
    uploads = {name: state for name, state in result.uploads.items() if name not in withheld}
    return Outgoing(uploads, result.weight, metrics, tuple(withheld))
