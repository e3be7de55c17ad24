"""Whatever a site uploads in place of statistics or features, only the site fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from model_store.appearance import DESCRIPTORS, describe
from model_store.guard import ReferenceStatistics, ScanSummary
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.fedoap_federation import DATA, Federation
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, declared, site_data
from training.algorithm import Algorithm, SiteSize, State
from training.choices.fedavg import FedAvgConfig
from training.config import Defence
from training.engine.reduction import Reducer
from training.errors import SiteFailed
from training.local.classifier import ClassCounts
from training.local.networks import shapes_of
from training.methods import registry
from training.methods.dense import Dense, DenseConfig
from training.methods.fedavg import FedAvg
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.methods.fedins.method import USAGE
from training.parts.describe import (
    MOST_DESCRIPTOR,
    STATISTICS,
    Describe,
    Described,
)

SIZE = SiteSize(cases=4, scored=4)
COUNTS = ClassCounts(torch.tensor([1.0, 0.0]).double(), torch.tensor([3.0, 1.0]).double()).state()


def rejects(algorithm: Algorithm, server, phase: str, good: dict[str, State], group: str, bad: State) -> str:
    """Reduce a good upload, and one with a bad group; returns why the second one is rejected."""
    (planned,) = (p for p in algorithm.plan() if p.name == phase)
    sent = {**planned.broadcast(server, "A"), **planned.expected(server)}
    reducer = Reducer(planned, Defence(most_norm=2.0))
    reducer.add("A", good, 1.0, {}, sent=sent, size=SIZE)
    with pytest.raises(SiteFailed) as error:
        reducer.add("B", {**good, group: bad}, 1.0, {}, sent=sent, size=SIZE)
    assert reducer.settle() == ({}, {})
    assert set(reducer.result().weights) == {"A"}
    return str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"bad.mean": torch.ones(2).double()},
        {"encoder1.1.mean": torch.ones(1).double()},
        {"encoder1.1.mean": torch.ones(2)},
    ],
)
def test_moments_of_another_network_are_rejected(change: State) -> None:
    algorithm = FedAvg(FedAvgConfig(width=2, batch_size=4), TASK)
    server = algorithm.initial(context("initial", 0))
    (planned,) = (p for p in algorithm.plan() if p.name == "estimate")
    received = planned.broadcast(server, "A")
    found = client_step(
        algorithm, context("estimate", 0, site="A"), received, EMPTY, site_data("A", 4, 2, 0)
    ).uploads
    assert "group 'moments'" in rejects(
        algorithm, server, "estimate", found, "moments", {**found["moments"], **change}
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.ones(1)}, "expected the tensors 'images' and 'right'"),
        ({"right": torch.tensor([4.0, 0.0]).double()}, "expected right answers and images"),
        ({"right": torch.tensor([-1.0, 0.0]).double()}, "expected right answers and images"),
        ({"right": torch.tensor([0.5, 0.0]).double()}, "expected right answers and images"),
        ({"right": torch.ones(1).double()}, "expected right answers and images"),
        ({"images": torch.tensor([4.0, 1.0]).double()}, "expected counts of 4 images at most, found 5"),
        ({"right": torch.ones(2), "images": torch.ones(2)}, "torch.float64"),
        ({"right": torch.ones(3).double(), "images": torch.ones(3).double()}, r"expected \[2\]"),
    ],
)
@pytest.mark.parametrize("method", ["co-boosting", "dafl", "dense", "fedbicross", "fedisca"])
def test_counts_that_no_site_can_have_are_rejected(method: str, change: State, why: str) -> None:
    if method != "fedbicross":
        chosen = registry.method(method)
        algorithm = chosen.build(chosen.config(width=1), CORNERS)
        server = algorithm.initial(context("initial", 0))
        said = rejects(algorithm, server, "validate", {"counts": COUNTS}, "counts", {**COUNTS, **change})
    else:
        algorithm = FedBiCross(FedBiCrossConfig(width=1), CORNERS)
        server = algorithm.initial(context("initial", 0))
        weights = {
            name: torch.zeros_like(t, device="cpu") for name, t in shapes_of(algorithm.network).items()
        }
        good = {"personal": weights, "personal_counts": COUNTS}
        said = rejects(algorithm, server, "export", good, "personal_counts", {**COUNTS, **change})
    assert why.replace("\\", "") in said


def test_counts_of_a_site_without_validation_images_are_accepted() -> None:
    none = labelled_data("A", 4, 0, 0).val
    algorithm = Dense(DenseConfig(width=1), CORNERS)
    network = torch.nn.Identity()
    ClassCounts.check(ClassCounts.of(network, none, algorithm.classes).state(), SiteSize(0, 0))


@pytest.mark.parametrize("name", ["key", "value"])
def test_tokens_of_another_shape_are_rejected(name: str) -> None:
    federation = Federation()
    received = federation.phase("train").broadcast(federation.server, "A")
    where = context("train", 0, site="A")
    good = client_step(federation.algorithm, where, received, EMPTY, DATA["A"]).uploads
    assert good["tokens"].keys() == {"key", "value"}
    for bad in (torch.ones(1, 1), good["tokens"][name][:1], good["tokens"][name].double()):
        said = rejects(
            federation.algorithm,
            federation.server,
            "train",
            good,
            "tokens",
            {**good["tokens"], name: bad},
        )
        assert f"group 'tokens': tensor '{name}'" in said


NUMBERS = len(DESCRIPTORS)
HONEST = ReferenceStatistics.of(
    ScanSummary("grey volume", {"rows": 32.0}, tuple(np.linspace(-2, 2, NUMBERS).tolist()), False, ())
)


def packed(content: object) -> State:
    return {"json": torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)}


def statistics(**changes: object) -> State:
    return packed(HONEST.model_dump(mode="json") | changes)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (statistics(count=10**400, kinds={"grey volume": 10**400}), "of 4 scans at most"),
        (statistics(count=10**9, kinds={"grey volume": 10**9}), "of 4 scans at most"),
        (statistics(products=[[1e300] * NUMBERS] * NUMBERS), "sums over descriptors of 16 at most"),
        (statistics(sums=[1.7e308] * NUMBERS), "sums over descriptors of 16 at most"),
        ({"json": torch.full((2**20 + 1,), 32, dtype=torch.uint8)}, "expected 1048576 bytes at most"),
        (statistics(kinds={}), "1 scan or more of every kind"),
        (statistics(kinds={"grey volume": 2, "b": -1}), "1 scan or more of every kind"),
        (statistics(kinds={"\x1b[2J": 1}), "printable names"),
        (statistics(ranges={"x" * 65: {"low": 0.0, "high": 1.0}}), "64 characters at most"),
        (statistics(ranges={"rows": {"low": 1.0, "high": 0.0}}), "a lower to a higher value"),
        (statistics(products=[[0.0]] * NUMBERS), "expected products of shape"),
        (statistics(products=np.full((NUMBERS, NUMBERS), 9.0).tolist()), "of the same descriptors"),
        (statistics(products=np.triu(HONEST.products).tolist()), "of the same descriptors"),
        ({**statistics(), "more": torch.ones(1)}, "expected the tensor 'json'"),
    ],
)
def test_statistics_that_no_site_can_have_drop_the_site_and_the_others_stand(lie: State, why: str) -> None:
    (phase,) = Describe("sample").plan()
    reducer = Reducer(phase)
    reducer.add("A", {STATISTICS.name: statistics()}, 1.0, {}, size=SIZE)
    with pytest.raises(SiteFailed, match=f"site B: group 'statistics': .*{why}"):
        reducer.add("B", {STATISTICS.name: lie}, 1.0, {}, size=SIZE)
    reducer.settle()
    assert Described.of(reducer.result()).statistics == HONEST


def test_merged_statistics_pass_the_check_of_one_site() -> None:
    other = ReferenceStatistics.of(ScanSummary("grey image", {}, (1.5,) * NUMBERS, False, ()))
    merged = HONEST.merge(other).merge(HONEST)
    STATISTICS.check(packed(merged.model_dump(mode="json")), SiteSize(3))
    STATISTICS.check(packed(None), SiteSize(0))
    with pytest.raises(ValueError, match="of 2 scans at most"):
        STATISTICS.check(packed(merged.model_dump(mode="json")), SiteSize(2))


@pytest.mark.parametrize("bright", [1, 8, 64, 512])
@pytest.mark.parametrize("sign", [-1, 1])
def test_descriptors_of_extreme_slices_are_within_the_limit(bright: int, sign: int) -> None:
    slices = np.zeros((1, 1, 64, 64), np.float32)
    # Every other pixel, of which `describe` takes the quantiles.
    rows, columns = np.unravel_index(np.arange(bright), (32, 32))
    slices[0, 0, 2 * rows, 2 * columns] = sign * 1e6
    numbers, _ = describe(slices)
    assert max(map(abs, numbers)) < MOST_DESCRIPTOR


def test_picks_of_which_the_sum_overflows_drop_the_site_and_the_others_stand() -> None:
    reducer = Reducer(declared("validate", 1, (), (USAGE,)))
    sent = {USAGE.name: {"picks": torch.zeros(3, dtype=torch.int64)}}
    reducer.add("A", {USAGE.name: {"picks": torch.tensor([5, 4, 3])}}, 1.0, {}, sent=sent, size=SIZE)
    lie = {"picks": torch.full((3,), 2**63 - 1)}
    with pytest.raises(SiteFailed, match="site B: group 'usage': expected 0 to 1099511627776 picks"):
        reducer.add("B", {USAGE.name: lie}, 1.0, {}, sent=sent, size=SIZE)
    reducer.settle()
    assert reducer.result().reduced[USAGE.name]["picks"].tolist() == [5, 4, 3]
