"""Reduce the uploads of a round (mean, sum, concat, collect), one site at a time.

Floating-point addition is not associative, so sites are added in a fixed order, not as they finish. `mean`
and `sum` hold one running total for any number of sites; `concat` and `collect` keep all uploads.

A site is not believed. Its uploads must have the names, shapes and types of what the server sent under the
same name, or of what the method expects. Where the server knows neither, the first accepted site sets them
for the others. Collected statistics may differ from site to site; their group has a check of its own.

With a `Defence` that needs all uploads of a round, as the default one does, they are kept until `settle`,
which bounds and reduces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from personalization.errors import PersonalizationError
from personalization.state import StreamingMean, check_compatible, check_finite, clone
from training.algorithm import Group, Phase, RoundResult, SiteSize, State
from training.config import NO_DEFENCE, Defence
from training.engine.defence import bounds, capped, least_uploads, robust_reduction, scaled, update_norm
from training.errors import RoundFailed, SiteFailed

_NOTHING: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})
_NO_NOISE: Mapping[str, float] = MappingProxyType({})
_UNKNOWN = SiteSize()


@dataclass(frozen=True)
class _Uploads:
    """What one site delivered, and what its updates began at."""

    groups: Mapping[str, State]
    weight: float
    metrics: Mapping[str, float]
    sent: Mapping[str, Mapping[str, Tensor]]
    images: int | None
    noises: Mapping[str, float]


class Reducer:
    """Reduces one round of a phase. `add` must be called in site order.

    With a defence, `settle` must be called before `result`; without one every number is believed.
    """

    def __init__(self, phase: Phase, defence: Defence | None = None) -> None:
        self._groups = {group.name: group for group in phase.uploads}
        self._defence = defence or NO_DEFENCE
        self._pending: dict[str, _Uploads] = {}
        self._means: dict[str, StreamingMean] = {}
        self._robust: dict[str, State] = {}
        self._sums: dict[str, State] = {}
        self._lists: dict[str, dict[str, State]] = {}
        self._likes: dict[str, State] = {}
        self._weights: dict[str, float] = {}
        self._metrics: dict[str, Mapping[str, float]] = {}

    def add(
        self,
        site: str,
        uploads: Mapping[str, State],
        weight: float,
        metrics: Mapping[str, float],
        *,
        sent: Mapping[str, Mapping[str, Tensor]] = _NOTHING,
        size: SiteSize = _UNKNOWN,
        noises: Mapping[str, float] = _NO_NOISE,
    ) -> None:
        """Add one site's uploads. A rejected site changes nothing.

        `sent` has the tensors that uploads of the same name must match, `noises` the largest norms of groups
        that the site noised for differential privacy. A group that is not essential and has no tensors counts
        as withheld.
        Raises SiteFailed for tensors that do not match, values that are not finite or do not pass the group's
        check, or a weight that is not positive.
        """
        uploads = {name: state for name, state in uploads.items() if state or self._groups[name].essential}
        try:
            if not 0 < weight < math.inf:
                raise SiteFailed(f"site {site}: expected a positive weight, found {weight}")
            likes = {
                name: self._checked(self._groups[name], state, sent.get(name), size)
                for name, state in uploads.items()
            }
        except PersonalizationError as error:
            raise SiteFailed(f"site {site}: {error}") from error
        self._likes = likes | self._likes
        begun = {name: state for name, state in sent.items() if not any(t.is_meta for t in state.values())}
        found = _Uploads(uploads, weight, metrics, begun, size.images, noises)
        if self._defence.needs_all:
            self._pending[site] = found
        else:
            self._accept(site, found)

    def settle(self) -> tuple[dict[str, float], dict[str, str]]:
        """Apply the defence to all sites. Returns the scaled sites with their factor, and the dropped ones.

        Raises RoundFailed where too few sites are left for the reduction of an essential group. Another group
        of too few sites counts as withheld by all.
        """
        factors, dropped = self._bound()
        left = {site: found for site, found in self._pending.items() if site not in dropped}
        weights = capped([found.weight for found in left.values()], self._defence.most_share)
        how = self._defence
        robust = how.reduction != "mean"
        for (site, found), weight in zip(left.items(), weights, strict=True):
            groups = {
                name: self._bounded(name, state, found.sent, factors.get(site))
                for name, state in found.groups.items()
            }
            left[site] = replace(found, groups=groups, weight=weight)
            self._accept(site, left[site], but="mean" if robust else None)
        for name in self._averaged() if robust else ():
            uploads = [found.groups[name] for found in left.values() if name in found.groups]
            least = 1 if self._groups[name].essential else least_uploads(how.reduction, how.trim, how.liars)
            if len(uploads) >= least:
                self._robust[name] = self._reduced(uploads)
        self._pending = {}
        return factors, dropped

    def result(self) -> RoundResult:
        """Return the reduced round. Groups that every site withheld are absent."""
        reduced = {name: mean.result() for name, mean in self._means.items()} | self._robust | self._sums
        collected: dict[str, Mapping[str, State]] = {}
        for name, by_site in self._lists.items():
            if self._groups[name].reduction == "concat":
                reduced[name] = _concatenate(list(by_site.values()))
            else:
                collected[name] = by_site
        return RoundResult(reduced, collected, self._weights, self._metrics)

    def _checked(
        self, group: Group, state: State, sent: Mapping[str, Tensor] | None, size: SiteSize
    ) -> State:
        """Return the names, shapes and types in which the sites must agree, after checking the upload."""
        what = f"group '{group.name}'"
        check_finite(state, what)
        if group.check is not None:
            try:
                group.check(state, size)
            except Exception as error:
                # Whatever a site sends, only the site fails.
                raise PersonalizationError(f"{what}: {error}") from error
        if sent is not None:
            check_compatible([sent, state], ["", what])
            return {}
        # The server builds networks from collected weights; one that does not fit would end the run.
        if group.reduction == "collect" and group.kind != "weights":
            return {}
        # An expanded scalar has a tensor's shape and type but not its memory.
        # Concatenated tensors may differ in their first axis.
        axes = slice(1, None) if group.reduction == "concat" else slice(None)
        like = {name: torch.empty((), dtype=t.dtype).expand(t.shape[axes]) for name, t in state.items()}
        if group.name in self._likes:
            check_compatible([self._likes[group.name], like], ["", what])
        return like

    def _averaged(self) -> list[str]:
        return [name for name, group in self._groups.items() if group.reduction == "mean"]

    def _bound(self) -> tuple[dict[str, float], dict[str, str]]:
        """Compare the sizes of the sites' updates, group by group; a site's factor is the smallest."""
        factors: dict[str, float] = {}
        dropped: dict[str, str] = {}
        most = self._defence.most_norm
        images = {site: found.images for site, found in self._pending.items() if found.images is not None}
        for name in self._averaged() if most is not None else ():
            norms = {
                site: update_norm(found.groups[name], found.sent[name])
                for site, found in self._pending.items()
                if name in found.groups and name in found.sent
            }
            noises = {site: found.noises.get(name, 0.0) for site, found in self._pending.items()}
            for site, bound in bounds(norms, most or math.inf, images, noises).items():
                if norms[site] <= bound:
                    continue
                if self._defence.beyond == "drop":
                    dropped[site] = (
                        f"its update of '{name}' has the norm {norms[site]:.3g}; by {most:g} times the "
                        f"median of the other sites' it may have {bound:.3g}"
                    )
                else:
                    factors[site] = min(factors.get(site, 1.0), bound / norms[site])
        return factors, dropped

    def _bounded(
        self, name: str, state: State, sent: Mapping[str, Mapping[str, Tensor]], factor: float | None
    ) -> State:
        if factor is None or name not in sent or self._groups[name].reduction != "mean":
            return state
        return scaled(state, sent[name], factor)

    def _reduced(self, uploads: Sequence[State]) -> State:
        how = self._defence
        try:
            return robust_reduction(uploads, how.reduction, how.trim, how.liars)
        except ValueError as error:
            raise RoundFailed(f"defence.{error}; use another reduction, or wait for more sites") from error

    def _accept(self, site: str, found: _Uploads, but: str | None = None) -> None:
        for name, state in found.groups.items():
            if self._groups[name].reduction != but:
                self._take_in(site, self._groups[name], state, found.weight)
        self._weights[site] = found.weight
        self._metrics[site] = dict(found.metrics)

    def _take_in(self, site: str, group: Group, state: State, weight: float) -> None:
        if group.reduction == "mean":
            self._means.setdefault(group.name, StreamingMean()).add(state, weight, f"site {site}")
        elif group.reduction == "sum":
            if group.name not in self._sums:
                self._sums[group.name] = clone(state)
            else:
                for name, total in self._sums[group.name].items():
                    total.add_(state[name])
        else:
            self._lists.setdefault(group.name, {})[site] = state


def _concatenate(states: Sequence[State]) -> State:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}
