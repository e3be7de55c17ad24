"""Reduce the uploads of a round (mean, sum, concat, collect), one site at a time.

Floating-point addition is not associative, so sites are added in a fixed order, not as they finish. `mean`
and `sum` hold one running total for any number of sites; `concat` and `collect` keep all uploads.

The first accepted site sets names, shapes and types for the others, also for collected weights. Other
collected groups may differ from site to site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from personalization.errors import PersonalizationError
from personalization.state import StreamingMean, check_compatible, check_finite, clone
from training.algorithm import Group, Phase, RoundResult, State
from training.errors import SiteFailed


class Reducer:
    """Reduces one round of a phase. `add` must be called in site order."""

    def __init__(self, phase: Phase) -> None:
        self._groups = {group.name: group for group in phase.uploads}
        self._means: dict[str, StreamingMean] = {}
        self._sums: dict[str, State] = {}
        self._lists: dict[str, dict[str, State]] = {}
        self._likes: dict[str, State] = {}
        self._weights: dict[str, float] = {}
        self._metrics: dict[str, Mapping[str, float]] = {}

    def add(
        self, site: str, uploads: Mapping[str, State], weight: float, metrics: Mapping[str, float]
    ) -> None:
        """Add one site's uploads. A rejected site changes nothing.

        A group that is not essential and has no tensors counts as withheld.
        Raises SiteFailed for tensors that do not match the other sites', values that are not finite, or a
        weight that is not positive.
        """
        uploads = {name: state for name, state in uploads.items() if state or self._groups[name].essential}
        try:
            if not 0 < weight < float("inf"):
                raise SiteFailed(f"site {site}: expected a positive weight, found {weight}")
            # A mean checks what it adds. The first mean is added first: if it raises, nothing was added yet.
            means = [name for name in uploads if self._groups[name].reduction == "mean"]
            others = [name for name in uploads if name not in means[:1]]
            likes = {name: self._check(self._groups[name], uploads[name]) for name in others}
            for name in [*means[:1], *others]:
                self._take_in(site, self._groups[name], uploads[name], weight)
        except PersonalizationError as error:
            raise SiteFailed(f"site {site}: {error}") from error
        self._likes = likes | self._likes
        self._weights[site] = weight
        self._metrics[site] = dict(metrics)

    def result(self) -> RoundResult:
        """Return the reduced round. Groups that every site withheld are absent."""
        reduced = {name: mean.result() for name, mean in self._means.items()} | self._sums
        collected: dict[str, Mapping[str, State]] = {}
        for name, by_site in self._lists.items():
            if self._groups[name].reduction == "concat":
                reduced[name] = _concatenate(list(by_site.values()))
            else:
                collected[name] = by_site
        return RoundResult(reduced, collected, self._weights, self._metrics)

    def _check(self, group: Group, state: State) -> State:
        """Return the names, shapes and types in which the sites must agree, after checking them."""
        check_finite(state, f"group '{group.name}'")
        # The server builds networks from collected weights; one that does not fit would end the run.
        if group.reduction == "collect" and group.kind != "weights":
            return {}
        # An expanded scalar has a tensor's shape and type but not its memory.
        # Concatenated tensors may differ in their first axis.
        axes = slice(1, None) if group.reduction == "concat" else slice(None)
        like = {name: torch.empty((), dtype=t.dtype).expand(t.shape[axes]) for name, t in state.items()}
        first = self._likes.get(group.name, like)
        check_compatible([first, like], ["", f"group '{group.name}'"])
        return like

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
