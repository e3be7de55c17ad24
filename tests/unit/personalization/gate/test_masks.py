"""Measures on masks small enough to count by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from personalization.errors import LabelError, StateError
from personalization.gate import ROUTING, ObservedRouting, judge, statistics_distance
from personalization.gate.masks import MIN_COMPONENT, Maps, mean_agreement, mean_fragments

SIDE = 10  # one pixel is a hundredth of a slice, ten times a speck


def maps(slices: int = 1) -> Maps:
    return np.zeros((slices, SIDE, SIDE), dtype=np.uint8)


def bar(start: int, stop: int, value: int = 1) -> Maps:
    """One slice with one row of `value` from column `start` up to `stop`."""
    result = maps()
    result[0, 4, start:stop] = value
    return result


def values(observed: ObservedRouting) -> dict[str, float | None]:
    return {result.name: result.value for result in judge(ROUTING, observed).checks}


def measured(
    candidate: Maps, parent: Maps, *replicas: Maps, scans: list[int] | None = None, classes: int = 2
) -> dict[str, float | None]:
    index = list(range(len(candidate))) if scans is None else scans
    return values(
        ObservedRouting(
            candidate, parent, replicas, index, classes, source_warnings=0.25, statistics_distance=0.01
        )
    )


def gain(candidate: Maps, parent: Maps, *references: Maps, scans: list[int] | None = None) -> float:
    index = list(range(len(candidate))) if scans is None else scans
    found = values(ObservedRouting(candidate, parent, [], index, 2, 0.0, 0.0, references))["consensus_gain"]
    assert found is not None
    return found


def test_agreement_is_the_mean_of_the_scans_dice() -> None:
    # 4 and 6 pixels share 3: 6/10. 2 and 2 share 2: 1. The third scan is empty in both and has no say.
    candidate = np.concatenate([bar(0, 4), bar(0, 2), maps()])
    parent = np.concatenate([bar(1, 7), bar(0, 2), maps()])
    assert measured(candidate, parent)["agreement"] == pytest.approx((0.6 + 1) / 2)


def test_slices_of_a_scan_are_counted_as_one() -> None:
    candidate = np.concatenate([bar(0, 4), maps(), bar(0, 2)])
    parent = np.concatenate([maps(), bar(0, 6), bar(0, 2)])
    # Slices 0 and 2 are scan 7: 6 and 2 pixels share 2, 4/8. Slice 1 is scan 3: nothing of 6.
    assert measured(candidate, parent, scans=[7, 3, 7])["agreement"] == pytest.approx((0.5 + 0) / 2)


def test_agreement_is_of_classes_not_of_foreground() -> None:
    parent = np.concatenate([bar(0, 4, 1), bar(0, 4, 2)])
    swapped = np.concatenate([bar(0, 4, 2), bar(0, 4, 1)])
    assert measured(swapped, parent, scans=[0, 0], classes=3)["agreement"] == 0
    # Class 1 is as it was; class 2 lost half of its 4 pixels: 4/6.
    half = np.concatenate([bar(0, 4, 1), bar(0, 2, 2)])
    assert measured(half, parent, scans=[0, 0], classes=3)["agreement"] == pytest.approx((1 + 2 / 3) / 2)


def test_truly_empty_scans_agree() -> None:
    found = measured(maps(5), maps(5), maps(5))
    assert [*found.values()] == [1.0, 1.0, None, 1.0, 0.0, 0.0, 1.0, 0.25, 0.01]


def test_one_scan_with_a_target_among_many_empty_ones_is_not_outvoted() -> None:
    parent, candidate = maps(50), maps(50)
    parent[0, :3] = 1
    assert measured(candidate, parent)["agreement"] == 0


def test_specks_count_as_nothing() -> None:
    side = 64
    parent, candidate = np.zeros((2, 1, side, side), dtype=np.uint8)
    most = math.ceil(MIN_COMPONENT * side**2) - 1
    parent[0, 0, :most] = 1
    assert most == 4
    found = measured(candidate, parent)
    assert (found["agreement"], found["emptied"]) == (1, 0)
    parent[0, 0, most] = 1
    found = measured(candidate, parent)
    assert (found["agreement"], found["emptied"]) == (0, 1)


def test_a_target_weighs_as_much_in_a_thick_stack() -> None:
    parent, candidate = maps(40), maps(40)
    parent[0, 0, 0] = 1  # a hundredth of a slice, 1/4000 of the scan
    assert measured(candidate, parent, scans=[0] * 40)["emptied"] == 1


def test_stability_is_that_of_the_least_alike_rival() -> None:
    candidate = bar(0, 4)
    assert measured(candidate, candidate)["stability"] is None
    assert measured(candidate, maps(), candidate)["stability"] == 1
    assert measured(candidate, maps(), candidate, bar(2, 6), bar(1, 5))["stability"] == pytest.approx(4 / 8)


def test_the_gain_is_the_lower_bound_of_a_paired_test_over_scans() -> None:
    reference = np.concatenate([bar(0, 4), bar(0, 4), bar(0, 4), maps()])
    parent = np.concatenate([bar(1, 5), bar(2, 6), bar(0, 4), maps()])
    candidate = np.concatenate([bar(0, 4), bar(0, 4), bar(1, 5), maps()])
    # Dice 1, 1, 3/4 against 3/4, 1/2, 1; the fourth scan is empty in all three and has no say.
    gains = [0.25, 0.5, -0.25]
    mean = 0.5 / 3
    error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 2 / 3)
    quantile = 2.919986  # of Student's t with 2 degrees of freedom, at 0.95, as tables have it
    found = gain(candidate, parent, reference)
    assert found == pytest.approx(mean - quantile * error, abs=1e-6)
    assert gain(parent, parent, reference) == 0
    assert gain(candidate, parent, reference, parent) == gain(candidate, parent, parent) < found


def test_the_same_gain_in_every_scan_is_certain_and_in_one_scan_is_not() -> None:
    reference, parent = bar(0, 4).repeat(3, axis=0), bar(1, 5).repeat(3, axis=0)
    assert gain(reference, parent, reference) == pytest.approx(0.25)
    assert gain(parent, reference, reference) == pytest.approx(-0.25)
    assert gain(reference[:1], parent[:1], reference[:1]) == -1
    assert gain(reference, parent, reference, scans=[5, 5, 5]) == -1


def test_a_false_alarm_that_goes_is_a_gain_and_nothing_anywhere_is_none() -> None:
    assert gain(maps(2), bar(0, 4).repeat(2, axis=0), maps(2)) == 1
    assert gain(bar(0, 4).repeat(2, axis=0), maps(2), maps(2)) == -1
    nothing = ObservedRouting(maps(2), maps(2), [], range(2), 2, 0.0, 0.0, [maps(2)])
    assert values(nothing)["consensus_gain"] is None
    # One patient bounds nothing.
    assert gain(maps(2), maps(2), maps(2), scans=[3, 3]) == -1
    # One reference sees something, and the other does not: what can be measured counts.
    assert gain(maps(2), maps(2), maps(2), bar(0, 4).repeat(2, axis=0)) == 0


def test_the_size_factor_is_that_of_the_class_that_changed_most() -> None:
    parent = np.concatenate([bar(0, 2, 1), bar(0, 8, 2)])
    candidate = np.concatenate([bar(0, 3, 1), bar(0, 2, 2)])
    # Shares of 200 pixels, each a ten-thousandth larger: class 1 grew 1.5 times, class 2 shrank 4 times.
    expected = (8 / 200 + 1e-4) / (2 / 200 + 1e-4)
    assert measured(candidate, parent, classes=3)["size_factor"] == pytest.approx(expected)
    assert measured(parent, candidate, classes=3)["size_factor"] == pytest.approx(expected)


def test_emptied_is_a_share_of_all_scans() -> None:
    parent = np.concatenate([bar(0, 4), bar(0, 4), maps(), maps()])
    candidate = np.concatenate([bar(0, 4), maps(), maps(), bar(0, 4)])
    assert measured(candidate, parent)["emptied"] == 0.25


@pytest.mark.parametrize(
    ("largest", "giants"),
    # Twice 20 is 40; 60 of 100 leave 40, of which half is allowed: 80; a target of 0 or 1 pixels may be 2.
    [(20, {40: 0, 41: 1}), (60, {80: 0, 81: 1}), (0, {2: 0, 3: 1}), (1, {2: 0, 3: 1})],
)
def test_giants_are_far_beyond_the_parents_largest(largest: int, giants: dict[int, int]) -> None:
    parent = maps(2)
    parent[1].flat[:largest] = 1
    for pixels, expected in giants.items():
        candidate = maps(2)
        candidate[0].flat[:pixels] = 1
        assert measured(candidate, parent)["giant"] == expected / 2


def test_pieces_touch_at_corners_and_are_counted_by_slice_and_class() -> None:
    found = maps(3)
    found[0, 0, 0] = found[0, 1, 1] = 1  # one piece
    found[1, 0, 0] = found[1, 0, 2] = found[1, 4, 4] = 1  # three
    found[1, 9, :] = 2  # one of another class; the third slice is empty
    assert mean_fragments(found, 3) == pytest.approx((1 + 3 + 1) / 3)
    assert mean_fragments(maps(), 2) == 0
    assert measured(found, bar(0, 2).repeat(3, axis=0), classes=3)["fragments"] == pytest.approx(
        (5 / 3 + 1) / 2
    )


def test_agreement_against_a_naive_loop() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 3, (2, 6, 8, 8)).astype(np.uint8)
    first[4:], second[4:] = 0, 0
    index = np.array([0, 1, 0, 1, 2, 2])
    dices = []
    for scan in (0, 1):
        of_class = []
        for c in (1, 2):
            a, b = first[index == scan] == c, second[index == scan] == c
            of_class.append(2 * (a & b).sum() / (a.sum() + b.sum()))
        dices.append(np.mean(of_class))
    assert mean_agreement(first, second, index, 3, MIN_COMPONENT) == pytest.approx(np.mean(dices))


def test_what_is_no_class_map_is_refused() -> None:
    good = maps(2)
    with pytest.raises(LabelError, match=r"candidate: expected class indices \[N, H, W\].*float64"):
        measured(good.astype(float), good)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match=r"parent: expected shape \[2, 10, 10\].*found \[1, 10, 10\]"):
        measured(good, maps(1))
    with pytest.raises(LabelError, match=r"replica 2: expected classes 0\.\.1, found 0\.\.2"):
        measured(good, good, good, good + 2 * (np.arange(SIDE) == 0).astype(np.uint8))
    with pytest.raises(LabelError, match=r"reference 2: expected shape \[2, 10, 10\]"):
        ObservedRouting(good, good, [], range(2), 2, 0.0, 0.0, [good, maps(1)])
    with pytest.raises(LabelError, match=r"scan_index: expected one whole number per slice \(2\)"):
        measured(good, good, scans=[0])


def test_tensors_and_any_integers_are_taken() -> None:
    candidate = torch.zeros(1, SIDE, SIDE, dtype=torch.int64)
    candidate[0, 4, :4] = 1
    found = ObservedRouting(candidate, bar(0, 4), [], torch.tensor([5]), 2, 0.0, 0.0)
    assert values(found)["agreement"] == 1


def _statistics(mean: float, variance: float, channels: int = 1) -> dict[str, torch.Tensor]:
    return {
        "norm.weight": torch.ones(channels),
        "norm.running_mean": torch.full((channels,), mean),
        "norm.running_var": torch.full((channels,), variance),
    }


def test_distance_of_statistics_on_hand_computed_normal_distributions() -> None:
    parent = _statistics(0.0, 1.0)
    assert statistics_distance(parent, parent) == pytest.approx(0, abs=1e-12)
    # Means two deviations apart: 1 - exp(-4/8). Deviations 1 and 2: 1 - sqrt(4/5). Epsilon is 1e-5.
    assert statistics_distance(parent, _statistics(2.0, 1.0)) == pytest.approx(1 - math.exp(-0.5), abs=1e-5)
    assert statistics_distance(parent, _statistics(0.0, 4.0)) == pytest.approx(1 - math.sqrt(0.8), abs=1e-5)
    assert statistics_distance(parent, _statistics(1e6, 1.0)) == 1
    assert statistics_distance(parent, _statistics(math.nan, 1.0)) == 1
    assert statistics_distance({}, {}) == 0


def test_every_layer_counts_the_same_whatever_its_width() -> None:
    def state(first: float, second: float) -> dict[str, torch.Tensor]:
        wide, narrow = _statistics(first, 1.0, channels=64), _statistics(second, 1.0)
        return wide | {name.replace("norm", "last"): tensor for name, tensor in narrow.items()}

    moved = 1 - math.exp(-0.5)
    assert statistics_distance(state(0, 0), state(0, 2)) == pytest.approx(moved / 2, abs=1e-5)
    assert statistics_distance(state(0, 0), state(2, 0)) == pytest.approx(moved / 2, abs=1e-5)


def test_statistics_of_other_networks_are_refused() -> None:
    with pytest.raises(StateError, match="different batch norm layers"):
        statistics_distance(_statistics(0, 1), {})
    with pytest.raises(StateError, match=r"statistics of 'norm': expected \[1\], found \[2\]"):
        statistics_distance(_statistics(0, 1), _statistics(0, 1, channels=2))
