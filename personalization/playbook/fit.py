"""Fit a playbook on the members' episodes: recipes by their lower bound, and a gate for each.

A patient is not a hospital: a thousand patients of four members are four. So all that is promised comes from
leaving members out, and the ridge is heavy.

Legend: M episodes of one recipe, F features, K members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from personalization.gate.routing import Targets
from personalization.playbook.features import FEATURES
from personalization.playbook.playbook import (
    GateModel,
    LinearModel,
    Playbook,
    RecipeRecord,
    ShiftRecord,
    moved,
)
from personalization.playbook.practice import BY_SHIFT, PLANTED, POINT, Episode

# Penalties that are tried, as a multiple of the number of episodes. The one with the least error at members
# left out is taken.
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0)
# One-sided, of the recipes' bounds.
CONFIDENCE = 0.9
# Members that can be compared.
FEWEST = 2
Floats = NDArray[np.float64]


def fit(
    episodes: Mapping[str, Sequence[Episode]],
    options: Mapping[str, Mapping[str, Any]],
    targets: Targets,
    after: Mapping[str, str | None] = MappingProxyType({}),
) -> Playbook:
    """The playbook of the members' episodes. `options` has each recipe's by trial, `targets` are those of the
    members, `after` names the next smaller dose of a trial.

    Raises ValueError for episodes of fewer than two members.
    """
    members = [member for member, found in sorted(episodes.items()) if found]
    if len(members) < FEWEST:
        raise ValueError(f"expected episodes of at least two members, found those of {members}")
    spreads = {name: _member_means(episodes, members, name).var(ddof=1) for name in options}
    typical = float(np.mean(list(spreads.values())))
    records = [
        _record(episodes, members, name, dict(options[name]), after.get(name), typical) for name in options
    ]
    ranked = sorted(records, key=lambda record: record.bound, reverse=True)
    first = next(iter(options))
    own = [episode for member in members for episode in episodes[member] if episode.trial == first]
    return Playbook(
        members=tuple(members),
        episodes=len(own),
        severities=tuple(sorted({episode.severity for episode in own})),
        recipes=tuple(ranked),
        targets=targets,
        by_shift=_by_shift(episodes, members),
    )


def _by_shift(episodes: Mapping[str, Sequence[Episode]], members: Sequence[str]) -> ShiftRecord | None:
    """How the dose by shift did at the members that practised it; None if fewer than two did."""
    found = {member: _of(episodes[member], BY_SHIFT) for member in members}
    served = {
        member: np.array([each.served for each in own if each.served is not None])
        for member, own in found.items()
        if own
    }
    if len(served) < FEWEST:
        return None
    together = np.concatenate([*served.values()])
    return ShiftRecord(
        episodes=len(together),
        mean=float(np.mean([own.mean() for own in served.values()])),
        worst=float(together.min()),
        lost=float(np.mean(together < POINT)),
        largest=max(each.shift for own in found.values() for each in own if each.shift is not None),
        members={
            member: (float(own.mean()), float(own.min()), float(own.max())) for member, own in served.items()
        },
    )


def _of(episodes: Sequence[Episode], name: str) -> list[Episode]:
    return [episode for episode in episodes if episode.trial == name]


def _member_means(episodes: Mapping[str, Sequence[Episode]], members: Sequence[str], name: str) -> Floats:
    means = [np.mean([each.change for each in _of(episodes[member], name)]) for member in members]
    return np.array(means, dtype=np.float64)


def _record(
    episodes: Mapping[str, Sequence[Episode]],
    members: Sequence[str],
    name: str,
    options: dict[str, Any],
    after: str | None,
    typical: float,
) -> RecipeRecord:
    means = _member_means(episodes, members, name)
    count = len(members)
    # Empirical Bayes: few members tell little of a recipe's own variance.
    variance = ((count - 1) * means.var(ddof=1) + typical) / count
    bound = means.mean() - special.stdtrit(count - 1, CONFIDENCE) * np.sqrt(variance / count)
    own = [episode for member in members for episode in _of(episodes[member], name)]
    changes = np.array([episode.change for episode in own])
    untouched = [episode.change for episode in own if not episode.severity]
    return RecipeRecord(
        name=name,
        options=options,
        after=after,
        mean=float(means.mean()),
        spread=float(means.std(ddof=1)),
        bound=float(bound),
        as_is=float(np.mean(untouched)) if untouched else 0.0,
        worst=float(changes.min()),
        harmful=float(np.mean(changes < POINT)),
        members={member: _range(_of(episodes[member], name)) for member in members},
        gate=fit_gate(
            {member: _of(episodes[member], name) for member in members},
            {member: [e for e in episodes[member] if e.trial.startswith(PLANTED)] for member in members},
        ),
    )


def _range(episodes: Sequence[Episode]) -> tuple[float, float, float]:
    """Mean, lowest and highest change."""
    changes = [episode.change for episode in episodes]
    return float(np.mean(changes)), min(changes), max(changes)


def fit_gate(
    episodes: Mapping[str, Sequence[Episode]],
    planted: Mapping[str, Sequence[Episode]] = MappingProxyType({}),
) -> GateModel:
    """A ridge regression of the change on the features, for one recipe, and those without each member.

    `planted` has the members' episodes with damage. They are fitted too, but set neither the range of what
    was practised nor the residuals: a bound is that of the recipe. Together they weigh as much as the others:
    on six phantoms, each judged by the other five, 18 instead of 43 of 340 harmful candidates that were
    planted are accepted, and 47 instead of 61 of 69 gains; with four and unweighted, 3 of 216 and 5 of 46.
    """
    members = [*episodes]
    groups = np.array([member for member in members for _ in episodes[member]])
    raw = np.array([each.features.values() for member in members for each in episodes[member]])
    change = np.array([each.change for member in members for each in episodes[member]])
    # A candidate that differs little can neither gain nor lose much: the error of a prediction grows with it.
    relative = change / moved(raw)
    centre, scale = raw.mean(axis=0), raw.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    features = (raw - centre) / scale
    low, high = features.min(axis=0), features.max(axis=0)
    penalty = min(PENALTIES, key=lambda each: _error(features, relative, groups, members, each))
    damage = [each for member in members for each in planted.get(member, ())]
    fitted, known, owners, weights = features, relative, groups, np.ones(len(relative))
    if damage:
        seen = np.array([each.features.values() for each in damage])
        # As a prediction takes them.
        fitted = np.concatenate([features, np.clip((seen - centre) / scale, low, high)])
        known = np.concatenate([relative, np.array([each.change for each in damage]) / moved(seen)])
        owners = np.concatenate([groups, [member for member in members for _ in planted.get(member, ())]])
        weights = np.concatenate([weights, np.full(len(damage), len(relative) / len(damage))])
    without = {
        member: _ridge(fitted[owners != member], known[owners != member], penalty, weights[owners != member])
        for member in members
    }
    residuals = {
        member: tuple(
            (relative[groups == member] - without[member].predict(features[groups == member])).tolist()
        )
        for member in members
    }
    return GateModel(
        features=FEATURES,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        lowest=tuple(low.tolist()),
        highest=tuple(high.tolist()),
        whole=_ridge(fitted, known, penalty, weights),
        without=without,
        residuals=residuals,
    )


def _error(
    features_MF: Floats, change_M: Floats, groups: NDArray[Any], members: Sequence[str], penalty: float
) -> float:
    """Mean squared error at members left out."""
    errors = [
        change_M[groups == member]
        - _ridge(features_MF[groups != member], change_M[groups != member], penalty).predict(
            features_MF[groups == member]
        )
        for member in members
    ]
    return float(np.mean(np.concatenate(errors) ** 2))


def _ridge(
    features_MF: Floats, change_M: Floats, penalty: float, importance_M: Floats | None = None
) -> LinearModel:
    """Least squares with penalty M |w|^2; the intercept is free. Episodes may be of unequal importance."""
    importance = np.ones(len(change_M)) if importance_M is None else importance_M
    total = importance.sum()
    mean, level = importance @ features_MF / total, importance @ change_M / total
    centred = features_MF - mean
    weighed = (centred * importance[:, None]).T
    gram = weighed @ centred + penalty * total * np.eye(features_MF.shape[1])
    weights = np.linalg.solve(gram, weighed @ (change_M - level))
    return LinearModel(intercept=float(level - weights @ mean), weights=tuple(weights.tolist()))
