"""Bounded updates, capped weights and robust reductions, against naive loops and by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.training.sites import declared
from training.algorithm import Group, SiteSize
from training.config import Defence
from training.engine.defence import bounds, capped, krum, least_uploads, robust_reduction, scaled, update_norm
from training.engine.reduction import Reducer
from training.errors import RoundFailed, SiteFailed

WEIGHTS = Group("weights", "weights", "mean")
TOTAL = Group("total", "statistics", "sum")
PHASE = declared("train", 1, (WEIGHTS,), (WEIGHTS, TOTAL))


def state(*values: float, count: int = 1):
    return {"w": torch.tensor(values), "b": torch.tensor([[values[0]]]), "n": torch.tensor(count)}


def drawn(sites: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(3, 2, generator=generator), "n": torch.tensor(site)} for site in range(sites)]


@pytest.mark.parametrize("sites", [1, 2, 3, 4, 7])
def test_the_median_is_that_of_every_coordinate(sites):
    uploads = drawn(sites)
    found = robust_reduction(uploads, "median", 0.2, 1)
    for row in range(3):
        for column in range(2):
            ordered = sorted(float(upload["w"][row, column]) for upload in uploads)
            middle = (ordered[(sites - 1) // 2] + ordered[sites // 2]) / 2
            assert float(found["w"][row, column]) == pytest.approx(middle, rel=1e-6)
    assert found["n"].item() == 0
    assert found["w"].dtype == torch.float32


@pytest.mark.parametrize(
    ("sites", "trim", "cut"), [(5, 0.2, 1), (5, 0.1, 1), (5, 0.0, 0), (10, 0.3, 3), (3, 0.34, 1)]
)
def test_the_trimmed_mean_leaves_out_the_ends_of_every_coordinate(sites, trim, cut):
    uploads = drawn(sites)
    found = robust_reduction(uploads, "trimmed-mean", trim, 1)
    for row in range(3):
        for column in range(2):
            ordered = sorted(float(upload["w"][row, column]) for upload in uploads)
            kept = ordered[cut : sites - cut]
            assert float(found["w"][row, column]) == pytest.approx(sum(kept) / len(kept), rel=1e-5)


@pytest.mark.parametrize(("sites", "liars"), [(4, 1), (6, 1), (7, 2), (9, 3)])
def test_krum_is_the_naive_loop(sites, liars):
    uploads = drawn(sites, seed=sites)
    distance = {
        frozenset(pair): float((uploads[pair[0]]["w"] - uploads[pair[1]]["w"]).square().sum())
        for pair in combinations(range(sites), 2)
    }
    scores = []
    for site in range(sites):
        others = sorted(distance[frozenset((site, other))] for other in range(sites) if other != site)
        scores.append(sum(others[: sites - liars - 2]))
    chosen = min(range(sites), key=scores.__getitem__)
    assert krum(uploads, liars) == chosen
    found = robust_reduction(uploads, "krum", 0.2, liars)
    assert torch.equal(found["w"], uploads[chosen]["w"])
    assert found["n"].item() == chosen


def test_too_few_sites_for_a_reduction_are_named():
    with pytest.raises(ValueError, match="liars: expected at most 0 of 3 sites for krum, found 1"):
        robust_reduction(drawn(3), "krum", 0.2, 1)
    with pytest.raises(ValueError, match="trim: expected to leave a site of 2"):
        robust_reduction(drawn(2), "trimmed-mean", Defence().trim, 1)


@pytest.mark.parametrize(("how", "trim", "liars"), [("trimmed-mean", 0.2, 1), ("krum", 0.2, 2)])
def test_least_uploads_is_the_fewest_that_a_reduction_accepts(how, trim, liars):
    least = least_uploads(how, trim, liars)
    robust_reduction(drawn(least), how, trim, liars)
    with pytest.raises(ValueError, match="expected"):
        robust_reduction(drawn(least - 1), how, trim, liars)


@pytest.mark.parametrize("sites", [3, 4])
def test_trimmed_mean_of_few_sites_at_the_default_trim_leaves_out_an_outlier(sites):
    honest = drawn(sites - 1)
    wild = {"w": torch.full((3, 2), 1e30), "n": torch.tensor(9)}
    found = robust_reduction([*honest, wild], "trimmed-mean", Defence().trim, 1)
    together = torch.stack([upload["w"] for upload in honest])
    assert bool((found["w"] <= together.amax(dim=0)).all())
    assert bool((found["w"] >= together.amin(dim=0)).all())


@pytest.mark.parametrize("how", ["median", "trimmed-mean", "krum"])
def test_one_wild_site_of_five_does_not_move_a_robust_reduction_far(how):
    honest = drawn(4)
    wild = {"w": torch.full((3, 2), 1e30), "n": torch.tensor(9)}
    found = robust_reduction([wild, *honest], how, 0.2, 1)
    together = torch.stack([upload["w"] for upload in honest])
    assert bool((found["w"] <= together.amax(dim=0) + 1e-6).all())
    assert bool((found["w"] >= together.amin(dim=0) - 1e-6).all())


@given(
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9),
    st.floats(0.1, 1.0, exclude_max=True),
)
def test_no_capped_weight_has_more_than_its_share(weights, share):
    found = capped(weights, share)
    allowed = max(share, 1 / len(weights))
    assert all(weight <= allowed * math.fsum(found) * (1 + 1e-9) for weight in found)
    if share * len(weights) > 1:
        # Only the largest are lowered, to one value.
        lowered = [new for old, new in zip(weights, found, strict=True) if new != old]
        kept = [old for old, new in zip(weights, found, strict=True) if new == old]
        assert len(set(lowered)) <= 1
        assert not lowered or max(kept, default=0) <= lowered[0] * (1 + 1e-9)


def test_weights_are_capped_by_hand():
    # 10 of 100, 30, 30: the first may have half of all, which is as much as the others together.
    assert capped([100, 30, 30], 0.5) == [60, 30, 30]
    assert capped([100, 30, 30], 1.0) == [100, 30, 30]
    assert capped([3, 2], 0.4) == [1.0, 1.0]


def test_the_size_of_an_update_and_its_bound_by_hand():
    sent = state(1.0, 1.0)
    assert update_norm(state(4.0, 1.0), sent) == pytest.approx(math.sqrt(9 + 9))
    assert bounds({"A": 1.0, "B": 2.0, "C": 30.0}, 3.0) == {"A": 48.0, "B": 46.5, "C": 4.5}
    assert bounds({"A": 1.0, "B": 90.0}, 3.0) == {"A": math.inf, "B": math.inf}
    assert bounds({"A": 0.0, "B": 0.0, "C": 1.0}, 3.0)["C"] == math.inf
    # C has ten times the images of the others, so it takes more steps; A has fewer, which lowers nothing.
    images = {"A": 5, "B": 20, "C": 125}
    assert bounds({"A": 1.0, "B": 2.0, "C": 3.0}, 3.0, images) == {"A": 7.5, "B": 6.0, "C": 45.0}
    assert bounds({"A": 1.0, "B": 2.0, "C": 3.0}, 3.0, noises={"A": 99.0})["A"] == 99.0
    half = scaled(state(3.0, 2.0, count=5), sent, 0.5)
    assert (half["w"].tolist(), half["b"].item(), half["n"].item()) == ([2.0, 1.5], 2.0, 5)


def test_an_update_that_overflows_when_compared_is_left_out():
    sent, wild = ({"w": torch.tensor([value], dtype=torch.float64)} for value in (-1.7e308, 1.7e308))
    assert update_norm(wild, sent) == math.inf
    assert torch.equal(scaled(wild, sent, 0.0)["w"], sent["w"])


def reduced(defence: Defence, uploads, sent=None):
    reducer = Reducer(PHASE, defence)
    for number, (upload, weight) in enumerate(uploads):
        reducer.add(
            f"S{number}",
            {"weights": upload, "total": {"t": torch.tensor([1.0])}},
            weight,
            {},
            sent={"weights": sent or state(0.0, 0.0)},
        )
    return reducer.settle(), reducer.result()


UPLOADS = [(state(1.0, 2.0), 1.0), (state(1.5, 2.5), 2.0), (state(0.5, 1.0), 3.0), (state(50.0, 80.0), 1.0)]


def test_a_site_beyond_the_bound_is_scaled_or_dropped_and_the_others_are_not():
    (factors, dropped), found = reduced(Defence(most_norm=2.0), UPLOADS)
    assert dropped == {}
    assert list(factors) == ["S3"]
    norms = [update_norm(upload, state(0.0, 0.0)) for upload, _ in UPLOADS]
    assert factors["S3"] == pytest.approx(2 * sorted(norms[:3])[1] / norms[3])
    expected = (1 + 2 * 1.5 + 3 * 0.5 + factors["S3"] * 50) / 7
    assert found.reduced["weights"]["w"][0].item() == pytest.approx(expected, rel=1e-6)
    (factors, dropped), found = reduced(Defence(most_norm=2.0, beyond="drop"), UPLOADS)
    assert factors == {}
    assert "norm" in dropped["S3"]
    assert found.reduced["weights"]["w"][0].item() == pytest.approx((1 + 3 + 1.5) / 6)
    # What it sent in other groups does not count, too.
    assert found.reduced["total"]["t"].tolist() == [3.0]
    assert set(found.weights) == {"S0", "S1", "S2"}


def test_a_defence_that_finds_nothing_changes_no_bit():
    _, plain = reduced(Defence(most_norm=None), UPLOADS)
    _, defended = reduced(Defence(most_norm=1e9), UPLOADS)
    for name, tensor in plain.reduced["weights"].items():
        assert torch.equal(tensor, defended.reduced["weights"][name])


@pytest.mark.parametrize("factor", [20.0, 1e30])
def test_by_default_a_far_larger_update_of_three_sites_or_more_is_scaled(factor):
    far = {
        name: tensor * factor if tensor.is_floating_point() else tensor
        for name, tensor in UPLOADS[0][0].items()
    }
    (factors, dropped), found = reduced(Defence(), [*UPLOADS[:3], (far, 1.0)])
    assert (list(factors), dropped) == (["S3"], {})
    norms = sorted(update_norm(upload, state(0.0, 0.0)) for upload, _ in UPLOADS[:3])
    counted = factors["S3"] * update_norm(far, state(0.0, 0.0))
    assert counted == pytest.approx(Defence().most_norm * norms[1])
    assert bool(found.reduced["weights"]["w"].isfinite().all())
    assert reduced(Defence(), [UPLOADS[0], (far, 1.0)])[0] == ({}, {})


def test_a_robust_reduction_of_a_round_leaves_sums_as_they_are():
    _, found = reduced(Defence(reduction="median"), UPLOADS)
    assert found.reduced["weights"]["w"].tolist() == [1.25, 2.25]
    assert found.reduced["total"]["t"].tolist() == [4.0]
    with pytest.raises(RoundFailed, match=r"defence\.liars"):
        reduced(Defence(reduction="krum", liars=2), UPLOADS)


def test_group_that_is_not_essential_of_too_few_sites_counts_as_withheld():
    moments = Group("moments", "statistics", "mean", essential=False)
    reducer = Reducer(declared("p", 1, (), (WEIGHTS, moments)), Defence(reduction="trimmed-mean"))
    for site, value in zip("ABC", (1.0, 2.0, 9.0), strict=True):
        sent = {} if site == "C" else {"m": torch.tensor([value])}
        reducer.add(site, {"weights": state(value, value), "moments": sent}, 1.0, {})
    reducer.settle()
    found = reducer.result().reduced
    assert found.keys() == {"weights"}
    assert found["weights"]["w"].tolist() == [2.0, 2.0]


def test_the_share_of_one_site_is_capped():
    uploads = [(state(0.0, 0.0), 1.0), (state(0.0, 0.0), 1.0), (state(1.0, 1.0), 1e15)]
    _, found = reduced(Defence(most_share=0.5), uploads)
    assert found.reduced["weights"]["w"].tolist() == [0.5, 0.5]
    assert found.weights["S2"] == 2.0


def test_an_upload_is_compared_with_what_was_sent_not_with_the_first_site():
    reducer = Reducer(PHASE)
    sent = {"weights": state(0.0, 0.0)}
    wrong = {"w": torch.zeros(3), "b": torch.zeros(1, 1), "n": torch.tensor(1)}
    with pytest.raises(SiteFailed, match=r"site A: group 'weights': tensor 'w': expected \[2\].*found \[3\]"):
        reducer.add("A", {"weights": wrong, "total": {"t": torch.ones(1)}}, 1.0, {}, sent=sent)
    reducer.add("B", {"weights": state(1.0, 2.0), "total": {"t": torch.ones(1)}}, 1.0, {}, sent=sent)
    reducer.settle()
    assert set(reducer.result().weights) == {"B"}


def test_a_check_of_a_group_that_fails_drops_the_site():
    def check(upload, size):
        if upload["t"].item() > size.cases:
            raise KeyError("t")

    reducer = Reducer(declared("p", 1, (), (Group("total", "statistics", "sum", check=check),)))
    with pytest.raises(SiteFailed, match="site A: group 'total': 't'"):
        reducer.add("A", {"total": {"t": torch.tensor([9.0])}}, 1.0, {}, size=SiteSize(3))
    reducer.add("B", {"total": {"t": torch.tensor([2.0])}}, 1.0, {}, size=SiteSize(3))
