"""The playbook as an artefact carries it, and the decision that it takes for a hospital."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from personalization.gate.routing import Prediction, Targets
from personalization.playbook.features import FEATURES

FILE = "playbook.json"
# Places of two features.
DISAGREEMENT = FEATURES.index("disagreement")
SIZE_GAIN = FEATURES.index("size_gain")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def moved(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much a candidate differs from its parent, of features [..., F]: their disagreement, plus 0.01."""
    result: NDArray[np.float64] = values[..., DISAGREEMENT] + 0.01
    return result


def pooled_quantile(groups: Sequence[NDArray[np.float64]], level: float) -> float:
    """The largest value with at most `level` of the weight below it, every group weighing the same."""
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / (len(group) * len(groups))) for group in groups])
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order]
    return float(values[order][below <= level + 1e-12][-1])


class LinearModel(_Frozen):
    """intercept + sum of weights times standardised features."""

    intercept: FiniteFloat
    weights: tuple[FiniteFloat, ...]

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of standardised features [..., F], the predictions [...]."""
        result: NDArray[np.float64] = self.intercept + features @ np.array(self.weights)
        return result


class GateModel(_Frozen):
    """Predicts the change of Dice of one recipe from label-free features of a cohort.

    The models predict the change in units of how much the candidate differs from its parent (`moved`).

    Attributes:
        features: names of the features, in order.
        centre, scale: by which they are standardised.
        lowest, highest: of the standardised features in practice; what lies outside is taken as the nearest.
        whole: fitted on all members.
        without: fitted without each of the members, by name.
        residuals: of each member, what the model without it got wrong in each of its episodes.
    """

    features: tuple[str, ...]
    centre: tuple[FiniteFloat, ...]
    scale: tuple[FiniteFloat, ...]
    lowest: tuple[FiniteFloat, ...]
    highest: tuple[FiniteFloat, ...]
    whole: LinearModel
    without: dict[str, LinearModel]
    residuals: dict[str, tuple[FiniteFloat, ...]]

    def standardised(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Features [..., F] as the models take them."""
        result: NDArray[np.float64] = np.clip(
            self._raw(values), np.array(self.lowest), np.array(self.highest)
        )
        return result

    def _raw(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        raw: NDArray[np.float64] = (np.asarray(values) - np.array(self.centre)) / np.array(self.scale)
        return raw

    def predict(self, values: Sequence[float]) -> Prediction:
        """The bound is the 1 / (K + 1) quantile, over the K members' episodes, of the prediction without the
        member plus what that got wrong there: jackknife+ (Barber et al., Annals of Statistics 2021), every
        member weighing the same (Dunn, Wasserman and Ramdas, JASA 2022)."""
        features, unit = self.standardised(values), float(moved(np.array(values)))
        possible = [
            float(self.without[member].predict(features)) + np.array(residuals)
            for member, residuals in self.residuals.items()
        ]
        return Prediction(
            change=unit * float(self.whole.predict(features)),
            bound=unit * pooled_quantile(possible, 1 / (len(possible) + 1)),
            size_gain=values[SIZE_GAIN],
            beyond=float(np.abs(self._raw(values) - features).max()),
        )


class RecipeRecord(_Frozen):
    """How a recipe did in practice.

    Attributes:
        name: of the trial.
        options: what an adaptation takes to repeat it.
        after: the recipe with the next smaller dose, which must be accepted before this one.
        mean: change of Dice, the mean of the members' means over their episodes.
        spread: standard deviation of the members' means.
        bound: one-sided 90 % t-bound of `mean` over members, its variance shrunk towards the recipes'.
        as_is: the mean on scans without a drawn scanner.
        worst: the lowest change of an episode.
        harmful: share of the episodes that lose more than a point.
        members: of each member, the mean, the lowest and the highest change of its episodes.
        gate: predicts its change at a hospital.
    """

    name: str
    options: dict[str, Any]
    after: str | None = None
    mean: FiniteFloat
    spread: FiniteFloat
    bound: FiniteFloat
    as_is: FiniteFloat
    worst: FiniteFloat
    harmful: FiniteFloat
    members: dict[str, tuple[FiniteFloat, FiniteFloat, FiniteFloat]]
    gate: GateModel


class ShiftRecord(_Frozen):
    """How the dose by shift did in practice.

    Attributes:
        episodes: how many there are.
        mean: change of Dice as it is served, by its gate; the mean of the members' means.
        worst: the lowest of an episode.
        lost: share of the episodes that lose more than a point.
        largest: the largest shift that was practised.
        members: of each member, the mean, the lowest and the highest change of its episodes.
    """

    episodes: int = Field(ge=1)
    mean: FiniteFloat
    worst: FiniteFloat
    lost: FiniteFloat = Field(ge=0, le=1)
    largest: FiniteFloat = Field(gt=0)
    members: dict[str, tuple[FiniteFloat, FiniteFloat, FiniteFloat]]


class Playbook(_Frozen):
    """Recipes by their lower bound, best first, and what the federation's targets look like.

    Attributes:
        members: who practised.
        episodes: how many there are of each recipe.
        severities: of the drawn scanners.
        recipes: best first.
        targets: what the members' targets look like.
        by_shift: the dose by shift; None: the members did not practise it.
    """

    format: Literal["locum-playbook/1"] = "locum-playbook/1"
    members: tuple[str, ...]
    episodes: int = Field(ge=1)
    severities: tuple[FiniteFloat, ...]
    recipes: tuple[RecipeRecord, ...]
    targets: Targets
    by_shift: ShiftRecord | None = None

    @property
    def certainty(self) -> float:
        """Share of hospitals that the bound holds for, K / (K + 1), if hospitals are like the members."""
        return len(self.members) / (len(self.members) + 1)

    @property
    def promise(self) -> str:
        """What a bound means, for a person."""
        count = len(self.members)
        return (
            f"Of {count + 1} hospitals like the {count} members, about one may do worse than the bound of a "
            "recipe, and more than one where the first of several that pass was chosen. The bounds were "
            f"calibrated on {', '.join(self.members)} in {self.episodes} episodes of each recipe, as they"
            " are and through drawn scanners. A hospital that is unlike all of these has no such promise."
        )

    def shortlist(self, most: int) -> list[RecipeRecord]:
        """The best recipes, each with all of its smaller doses, `most` in all; best first.

        A recipe with more smaller doses than there is room for is left out.
        """
        after = {record.name: record.after for record in self.recipes}
        chosen: set[str] = set()
        for name in after:
            more = chosen | ({name, *_chain(after, name)} & after.keys())
            if len(more) <= most:
                chosen = more
        return [record for record in self.recipes if record.name in chosen]

    def decisions(self, features: Mapping[str, Sequence[float]]) -> dict[str, Decision]:
        """What is expected of each of these recipes at a hospital, from their features, by name."""
        alone = {
            record.name: record.gate.predict(features[record.name])
            for record in self.recipes
            if record.name in features
        }
        after = {record.name: record.after for record in self.recipes}
        found = {}
        for name, expected in alone.items():
            smaller = [alone[other].accepted for other in _chain(after, name) if other in alone]
            share = sum(smaller) / len(smaller) if smaller else 1.0
            found[name] = Decision(name, replace(expected, smaller=share))
        return found

    def decide(self, features: Mapping[str, Sequence[float]]) -> Decision:
        """The first recipe with features that is accepted, else the first, in the order of practice.

        What is predicted at one hospital does not rank recipes there: on the last recorded seed no better
        than chance (AUC 0.48 to 0.51).
        """
        found = self.decisions(features)
        if not found:
            raise ValueError("expected features of at least one recipe of the playbook")
        accepted = (each for each in found.values() if each.expected.accepted)
        return next(accepted, next(iter(found.values())))

    def to_bytes(self) -> bytes:
        """As JSON; equal playbooks give equal bytes."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def _chain(after: Mapping[str, str | None], name: str) -> list[str]:
    """The smaller doses of a recipe, the next smaller one first."""
    chain: list[str] = []
    smaller = after.get(name)
    while smaller is not None and smaller not in chain:
        chain.append(smaller)
        smaller = after.get(smaller)
    return chain


@dataclass(frozen=True)
class Decision:
    """The best recipe for a hospital, and what is expected of it there."""

    trial: str
    expected: Prediction
