"""Which patients to draw, and whether the bound that their masks give holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from personalization.errors import AdaptationError, LabelError
from personalization.gate.bounds import Bounds, bounds
from personalization.gate.sampling import Draw, draw, estimate

PATIENTS = 60
CLAIMED = 0.95


def population(kind: str, drawn: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Disagreement and change of Dice of each patient, when a candidate replaces its parent."""
    d = drawn.beta(1.2, 8, PATIENTS) + 1e-4
    if kind == "gains grow with the difference":
        return d, d * drawn.uniform(0, 0.9, PATIENTS)
    if kind == "half gain, half lose":
        return d, d * np.where(drawn.random(PATIENTS) < 0.5, 0.8, -0.8)
    if kind == "6 % collapse":
        harmed = drawn.random(PATIENTS) < 0.06
        harmed[0] |= not harmed.any()
        d = np.where(harmed, 0.6, 0.05) * drawn.uniform(0.7, 1.3, PATIENTS)
        return d, np.where(harmed, -0.8 * d, 0.4 * d * drawn.uniform(0.3, 1, PATIENTS))
    d = np.exp(drawn.normal(-3, 1, PATIENTS)).clip(0, 0.95)
    return d, 0.02 - d * drawn.uniform(0, 1, PATIENTS)


def by_name(values: np.ndarray) -> dict[str, float]:
    return {f"p{i:03d}": float(value) for i, value in enumerate(values)}


def estimated(draws: tuple[Draw, ...], changes: Mapping[str, float]) -> Bounds:
    return estimate(draws, changes, PATIENTS, PATIENTS)


@pytest.mark.parametrize("masks", [6, 12, 17])
@pytest.mark.parametrize(
    "kind", ["gains grow with the difference", "half gain, half lose", "6 % collapse", "long tail of losses"]
)
def test_bound_below_holds_as_often_as_it_says(kind: str, masks: int) -> None:
    drawn, held, repeats = np.random.default_rng(46), 0, 400
    for _ in range(repeats):
        d, change = population(kind, drawn)
        draws = draw(by_name(d), masks, int(drawn.integers(2**31)))
        held += estimated(draws, by_name(change)).low <= change.mean()
    # By chance alone 400 repeats of an exact bound hold in 93.2 % or more, with 95 %.
    assert held / repeats >= CLAIMED - 1.65 * math.sqrt(CLAIMED * (1 - CLAIMED) / repeats)


def test_bound_of_patients_drawn_alike_misses_the_rare_harm() -> None:
    """Why they are not drawn alike."""
    drawn, held = np.random.default_rng(46), 0
    for _ in range(400):
        _, change = population("6 % collapse", drawn)
        held += bounds(drawn.choice(change, 8, replace=False).tolist()).low <= change.mean()
    assert held / 400 < 0.6


def test_estimate_is_right_on_average() -> None:
    drawn = np.random.default_rng(0)
    d, change = population("long tail of losses", drawn)
    means = [estimated(draw(by_name(d), 8, seed), by_name(change)).mean for seed in range(3000)]
    error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - change.mean()) < 4 * error


def test_patients_are_drawn_by_their_probability() -> None:
    d = by_name(np.array([0.01, 0.02, 0.03, 0.3, 0.6]))
    counts = dict.fromkeys(d, 0)
    for seed in range(4000):
        for each in draw(d, 2, seed):
            counts[each.patient] += each.times
    for name, value in d.items():
        expected = 0.25 / 5 + 0.75 * value / 0.96
        assert counts[name] / 8000 == pytest.approx(expected, abs=0.02)


def test_estimate_by_hand() -> None:
    """Two draws of four patients, one of whom has equal answers: z = change / (3 p)."""
    draws = (Draw("a", 0.25, 1, 0), Draw("b", 0.5, 1, 1))
    found = estimate(draws, {"a": 0.03, "b": 0.09}, patients=4, differing=3)
    z = [0.03 / 0.75, 0.09 / 1.5]
    assert found.mean == pytest.approx(3 / 4 * np.mean(z))
    away = stats.t.ppf(0.95, 1) * np.std(z, ddof=1) / math.sqrt(2)
    assert found.low == pytest.approx(3 / 4 * (np.mean(z) - away))
    assert found.n == 2


def test_patient_drawn_twice_counts_twice() -> None:
    draws = draw({"a": 0.9, "b": 0.001, "c": 0.001, "d": 0.001}, 3, seed=1)
    twice = next(each for each in draws if each.patient == "a")
    assert twice.times == 2
    assert estimate(draws, dict.fromkeys("abcd", 0.1), 4, 4).n == 3


def test_all_are_drawn_alike_where_there_are_no_more() -> None:
    draws = draw({"a": 0.9, "b": 0.1, "same": 0.0}, 5, seed=0)
    assert [(each.patient, each.probability) for each in draws] == [("b", 0.5), ("a", 0.5)]
    assert estimate(draws, {"a": 0.3, "b": 0.0}, 3, 2).mean == pytest.approx(0.1)


def test_same_seed_draws_the_same_patients() -> None:
    d = by_name(population("half gain, half lose", np.random.default_rng(1))[0])
    assert draw(d, 8, 5) == draw(d, 8, 5) != draw(d, 8, 6)


def test_draw_and_estimate_refuse_what_bounds_nothing() -> None:
    with pytest.raises(AdaptationError, match="found 5 and 1 of 2"):
        draw({"a": 0.5, "b": 0.0}, 5, 0)
    with pytest.raises(AdaptationError, match="found 1 and 2"):
        draw({"a": 0.5, "b": 0.1}, 1, 0)
    with pytest.raises(AdaptationError, match="1 of 2 drawn patients"):
        estimate(draw({"a": 0.5, "b": 0.1}, 2, 0), {"a": 0.1}, 2, 2)


def test_bounds_are_students_t() -> None:
    values = [0.02, 0.05, -0.01, 0.04]
    found = bounds(values)
    low, high = stats.t.interval(0.9, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert bounds([0.1]) == Bounds(0.1, -1.0, 1.0, 1)
    with pytest.raises(LabelError, match="finite"):
        bounds([0.1, math.nan])
