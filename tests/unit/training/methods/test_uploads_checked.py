"""Whatever a site uploads in place of statistics or features, only the site fails."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.fedoap_federation import DATA, Federation
from tests.helpers.training.sites import EMPTY, TASK, context, site_data
from training.algorithm import Algorithm, State
from training.config import Defence
from training.engine.reduction import Reducer
from training.errors import SiteFailed
from training.methods.common.classifier_training import ClassCounts
from training.methods.common.local_training import shapes_of
from training.methods.dense import Dense, DenseConfig
from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross

COUNTS = ClassCounts(torch.tensor([1.0, 0.0]).double(), torch.tensor([3.0, 1.0]).double()).state()


def rejects(algorithm: Algorithm, server, phase: str, good: dict[str, State], group: str, bad: State) -> str:
    """Reduce a good upload, and one with a bad group; returns why the second one is rejected."""
    (planned,) = (p for p in algorithm.plan() if p.name == phase)
    sent = {**algorithm.broadcast(planned, server, "A"), **algorithm.expected(planned, server)}
    reducer = Reducer(planned, Defence(most_norm=2.0))
    reducer.add("A", good, 1.0, {}, sent=sent, cases=4)
    with pytest.raises(SiteFailed) as error:
        reducer.add("B", {**good, group: bad}, 1.0, {}, sent=sent, cases=4)
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
    server.facts.update(latest={"round": 1})
    (planned,) = (p for p in algorithm.plan() if p.name == "estimate")
    received = algorithm.broadcast(planned, server, "A")
    found = algorithm.client_step(
        context("estimate", 0, site="A"), received, EMPTY, site_data("A", 4, 2, 0)
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
@pytest.mark.parametrize("method", ["dense", "fedbicross"])
def test_counts_that_no_site_can_have_are_rejected(method: str, change: State, why: str) -> None:
    if method == "dense":
        algorithm = Dense(DenseConfig(width=1), CORNERS)
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
    ClassCounts.check(ClassCounts.of(network, none, algorithm.classes).state(), 0)


@pytest.mark.parametrize("name", ["key", "value"])
def test_tokens_of_another_shape_are_rejected(name: str) -> None:
    federation = Federation()
    received = federation.algorithm.broadcast(federation.phase("train"), federation.server, "A")
    where = context("train", 0, site="A")
    good = federation.algorithm.client_step(where, received, EMPTY, DATA["A"]).uploads
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
