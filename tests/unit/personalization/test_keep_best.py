"""The loop that keeps the best epoch, on a learner with given losses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from personalization.keep_best import KeepBest


@dataclass(frozen=True)
class Epoch:
    epoch: int
    loss: float
    safe: bool = True


@dataclass(frozen=True)
class Point:
    weight: float
    best: float
    best_epoch: int
    history: tuple[Epoch, ...]


class Given(KeepBest[Epoch, Point]):
    """Its weight is the number of the epoch."""

    def __init__(self, losses: list[float], unsafe: int | None = None) -> None:
        network = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(network.weight)
        super().__init__(network, dict(network.named_parameters()), len(losses) - 1)
        self.losses, self.unsafe = losses, unsafe

    def start(self) -> Epoch:
        return Epoch(0, self.losses[0])

    def restore(self, checkpoint: Point) -> None:
        self.history, self.best_epoch = list(checkpoint.history), checkpoint.best_epoch
        self.best = {"weight": torch.tensor([[checkpoint.best]])}
        self.load({"weight": torch.tensor([[checkpoint.weight]])})

    def learn(self, epoch: int) -> Epoch:
        self.load({"weight": torch.tensor([[float(epoch)]])})
        return Epoch(epoch, self.losses[epoch], epoch != self.unsafe)

    def improves(self, record: Epoch, best: Epoch) -> bool:
        return record.loss < best.loss

    def checkpoint(self) -> Point:
        return Point(self.weight, float(self.best["weight"]), self.best_epoch, tuple(self.history))

    @property
    def weight(self) -> float:
        return self.learned["weight"].item()


LOSSES = [5.0, 4.0, 2.0, 3.0, 2.0]


def test_the_earliest_of_the_best_epochs_is_left_in_the_network() -> None:
    learner = Given(LOSSES)
    learner.network.train()
    learner.run(None, None)
    assert [record.epoch for record in learner.history] == [0, 1, 2, 3, 4]
    assert (learner.best_epoch, learner.weight) == (2, 2.0)
    assert not learner.network.training


def test_an_unsafe_epoch_ends_the_learning_and_is_not_kept() -> None:
    learner = Given(LOSSES, unsafe=2)
    learner.run(None, None)
    assert [record.epoch for record in learner.history] == [0, 1, 2]
    assert (learner.best_epoch, learner.weight) == (1, 1.0)


def test_a_learning_resumed_after_any_epoch_equals_an_uninterrupted_one() -> None:
    points: list[Point] = []
    whole = Given(LOSSES)
    whole.run(None, points.append)
    assert len(points) == len(LOSSES)
    for number, point in enumerate(points):
        learner, again = Given(LOSSES), list[Point]()
        learner.run(point, again.append)
        # The checkpoint that it begins with is passed again.
        assert again == points[number:]
        assert (learner.history, learner.weight) == (whole.history, whole.weight)


def test_an_exception_leaves_the_best_epoch_so_far_and_is_raised() -> None:
    learner = Given(LOSSES)

    def stop(point: Point) -> None:
        if point.history[-1].epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.run(None, stop)
    assert (learner.best_epoch, learner.weight) == (2, 2.0)
