"""Which round's model a run publishes."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.training.sites import (
    EMPTY,
    TASK,
    client_step,
    context,
    phase_of,
    result_of,
    server_step,
    site_data,
)
from training.choices.fedavg import FedAvgConfig
from training.methods.fedavg import FedAvg

SITE = site_data("A", 4, 4, 0)


@pytest.mark.parametrize(
    ("dice", "published"),
    [((0.5, 0.8, 0.6), 1), ((0.8, 0.8, 0.8), 0), ((0.6, 0.8, 0.8), 1)],
)
def test_the_best_round_is_published_and_of_equal_ones_the_earliest(
    dice: tuple[float, ...], published: int
) -> None:
    config = FedAvgConfig(recipe="paper", width=2, batch_size=4, rounds=len(dice))
    algorithm = FedAvg(config, TASK)
    server = algorithm.initial(context("initial", 0))
    received = phase_of(algorithm, "train").broadcast(server, "A")
    sent = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, SITE)
    for round_, mean in enumerate(dice):
        sent.uploads["scores"]["score"][:] = torch.tensor([2 * mean, 2])
        result = result_of({"A": sent}, mean="weights", collect=("scores",))
        server = server_step(algorithm, context("train", round_), server, result)
    assert algorithm.publication(server).details["selected_round"] == published
