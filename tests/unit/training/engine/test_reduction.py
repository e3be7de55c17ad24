from __future__ import annotations

import pytest
import torch

from tests.helpers.training.sites import declared
from training.algorithm import Group
from training.engine.reduction import Reducer
from training.errors import SiteFailed

PHASE = declared(
    "train",
    1,
    (),
    (
        Group("weights", "weights", "mean"),
        Group("total", "statistics", "sum"),
        Group("tokens", "features", "concat"),
        Group("notes", "statistics", "collect"),
    ),
)


def uploads(w, total, tokens, note, count=3):
    return {
        "weights": {"w": torch.tensor(w), "n": torch.tensor(count)},
        "total": {"t": torch.tensor([total])},
        "tokens": {"k": torch.tensor(tokens)},
        "notes": {"x": torch.tensor(note)},
    }


def test_each_reduction_matches_hand_computed_values():
    reducer = Reducer(PHASE)
    reducer.add("A", uploads([1.0, 2.0], 1.0, [[1.0], [2.0]], 0.5), 1.0, {"loss": 0.1})
    reducer.add("B", uploads([5.0, 4.0], 10.0, [[3.0]], 1.5, count=9), 3.0, {})
    result = reducer.result()
    assert result.reduced["weights"]["w"].tolist() == [(1 + 3 * 5) / 4, (2 + 3 * 4) / 4]
    assert result.reduced["weights"]["n"].item() == 3  # an integer buffer is the first site's
    assert result.reduced["total"]["t"].tolist() == [11.0]
    assert result.reduced["tokens"]["k"].tolist() == [[1.0], [2.0], [3.0]]
    assert {site: state["x"].item() for site, state in result.collected["notes"].items()} == {
        "A": 0.5,
        "B": 1.5,
    }
    assert result.weights == {"A": 1.0, "B": 3.0}
    assert result.metrics == {"A": {"loss": 0.1}, "B": {}}


def test_weighted_mean_of_many_sites_equals_float64():
    values = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 1e3
    weights = [1.0 + index for index in range(50)]
    reducer = Reducer(declared("p", 1, (), (Group("weights", "weights"),)))
    for index, weight in enumerate(weights):
        reducer.add(str(index), {"weights": {"w": values[index]}}, weight, {})
    w = torch.tensor(weights, dtype=torch.float64)
    expected = (values.double() * w[:, None]).sum(0) / w.sum()
    assert torch.equal(reducer.result().reduced["weights"]["w"], expected.float())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (uploads([float("nan"), 1.0], 1.0, [[1.0]], 1.0), "'w' has 1 of 2 values that are not finite"),
        (uploads([1.0, 1.0], float("inf"), [[1.0]], 1.0), "'t' has 1 of 1"),
        (uploads([1.0, 1.0, 1.0], 1.0, [[1.0]], 1.0), r"'w': expected \[2\]"),
        (uploads([1.0, 1.0], 1.0, [[1.0, 2.0]], 1.0), "'k'"),
        ({"weights": {"other": torch.ones(2)}}, "missing"),
    ],
)
def test_rejected_site_leaves_the_reduction_unchanged(bad, message):
    good, better = uploads([1.0, 2.0], 1.0, [[1.0]], 1.0), uploads([3.0, 4.0], 2.0, [[2.0]], 2.0)
    with_bad, without = Reducer(PHASE), Reducer(PHASE)
    with_bad.add("A", good, 1.0, {})
    with pytest.raises(SiteFailed, match=message):
        with_bad.add("B", bad, 1.0, {})
    with_bad.add("C", better, 1.0, {})
    without.add("A", good, 1.0, {})
    without.add("C", better, 1.0, {})
    assert str(with_bad.result()) == str(without.result())


EXPORT = declared(
    "export", 1, (), (Group("notes", "statistics", "collect"), Group("personal", "weights", "collect"))
)


def exported(personal, *notes):
    return {"notes": {"x": torch.tensor(notes)}, "personal": personal}


@pytest.mark.parametrize(
    ("personal", "message"),
    [
        ({"w": torch.ones(3), "n": torch.tensor(1)}, r"site B: group 'personal': tensor 'w': expected \[2\]"),
        ({"w": torch.ones(2).double(), "n": torch.tensor(1)}, "expected .* torch.float32, found"),
        ({"w": torch.ones(2)}, r"group 'personal': .*missing \['n'\]"),
        ({"w": torch.ones(2), "n": torch.tensor(1), "b": torch.ones(1)}, r"unexpected \['b'\]"),
    ],
)
def test_collected_weights_of_another_network_are_rejected(personal, message):
    reducer = Reducer(EXPORT)
    reducer.add("A", exported({"w": torch.ones(2), "n": torch.tensor(1)}, 1.0), 1.0, {})
    with pytest.raises(SiteFailed, match=message):
        reducer.add("B", exported(personal, 1.0), 1.0, {})
    reducer.add("C", exported({"w": torch.zeros(2), "n": torch.tensor(5)}, 1.0), 1.0, {})
    result = reducer.result()
    assert set(result.weights) == set(result.collected["personal"]) == {"A", "C"}
    assert set(result.collected["notes"]) == {"A", "C"}


def test_collected_statistics_may_have_any_shape():
    reducer = Reducer(EXPORT)
    for site, notes in (("A", (1.0,)), ("B", (1.0, 2.0)), ("C", ())):
        reducer.add(site, exported({"w": torch.ones(2)}, *notes), 1.0, {})
    collected = reducer.result().collected["notes"]
    assert {site: state["x"].tolist() for site, state in collected.items()} == {
        "A": [1.0],
        "B": [1.0, 2.0],
        "C": [],
    }


def test_rejected_first_site_does_not_set_the_expected_shapes():
    reducer = Reducer(PHASE)
    with pytest.raises(SiteFailed, match=r"group 'notes'.*not finite"):
        reducer.add("A", uploads([1.0], 1.0, [[1.0, 2.0]], float("nan")), 1.0, {})
    reducer.add("B", uploads([1.0], 1.0, [[1.0]], 1.0), 1.0, {})
    assert reducer.result().reduced["tokens"]["k"].tolist() == [[1.0]]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_site_weight_that_is_not_positive_is_rejected(weight):
    with pytest.raises(SiteFailed, match="positive weight"):
        Reducer(PHASE).add("A", uploads([1.0], 1.0, [[1.0]], 1.0), weight, {})


def test_group_withheld_by_every_site_is_absent():
    reducer = Reducer(PHASE)
    reducer.add("A", {"weights": {"w": torch.ones(1)}}, 1.0, {})
    result = reducer.result()
    assert set(result.reduced) == {"weights"}
    assert result.collected == {}
