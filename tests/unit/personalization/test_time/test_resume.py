"""A run that goes on from a checkpoint is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personalization.errors import CheckpointError
from personalization.iop_fl.network import route
from personalization.test_time.adapt import Adaptation
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt
from tests.helpers.personalization.choosing import EPOCHS, with_a_choice
from tests.helpers.personalization.discs import UNGUARDED, discs, space

CASES = ("direct", "pooled")


def case_of(name: str) -> tuple[AdaptationConfig, dict[str, Any]]:
    """The hardest of each kind: direct with uneven batches; pooled with drawn weights and dropout."""
    if name == "direct":
        return with_a_choice(), {}
    config = AdaptationConfig(preset="official", router="pooled", epochs=2, batch_size=3)
    return config, {"router": "pooled", "init": "official", "dropout": 0.2}


def images() -> Tensor:
    return discs(5, 7, contrast=1.2)[0]


def run(
    case: str, seed: int = 0, resume: AdaptationCheckpoint | None = None
) -> tuple[Adaptation, nn.Module, list[bytes]]:
    config, options = case_of(case)
    network = route(space(), **options, generator=torch.Generator().manual_seed(seed))
    seen: list[bytes] = []
    result = adapt(
        network,
        images(),
        config,
        resume=resume,
        after_epoch=lambda point: seen.append(point.to_bytes()),
        limits=UNGUARDED,
    )
    return result, network, seen


@pytest.mark.parametrize("case", CASES)
def test_resuming_after_any_epoch_changes_nothing(case: str) -> None:
    result, network, points = run(case)
    assert len(points) == case_of(case)[0].epochs + 1
    for epoch, point in enumerate(points):
        # A fresh network, and for the drawn weights even one of another seed
        again, other, later = run(case, seed=1, resume=AdaptationCheckpoint.from_bytes(point))
        assert again == result
        # What it goes on from it gives once more.
        assert later == points[epoch:]
        for (name, one), (_, two) in zip(network.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(one, two), name
        assert torch.equal(network(images()), other(images()))


def test_a_run_that_was_stopped_stays_stopped() -> None:
    config = AdaptationConfig(preset="paper", bn_rate=3.0, epochs=4, batch_size=3)
    seen: list[AdaptationCheckpoint] = []
    result = adapt(route(space()), images(), config, after_epoch=seen.append)
    assert result.stopped is not None
    assert len(seen) == 2
    again = adapt(
        route(space()), images(), config, resume=AdaptationCheckpoint.from_bytes(seen[-1].to_bytes())
    )
    assert again == result


def test_a_checkpoint_comes_back_as_it_was_in_equal_bytes() -> None:
    _, _, points = run("direct")
    point = AdaptationCheckpoint.from_bytes(points[-1])
    # Its best is not its last, so that taking one for the other shows above
    assert point.best_epoch < EPOCHS
    assert point.to_bytes() == points[-1]
    assert point.epoch == EPOCHS
    assert [record.epoch for record in point.history] == [*range(EPOCHS + 1)]
    assert {name.split("/")[1] for name in point.optimiser} == {"step", "exp_avg", "exp_avg_sq"}
    assert b"torch" not in points[-1]  # nothing of a pickle


def test_another_adaptations_checkpoint_is_refused_and_says_why() -> None:
    config = AdaptationConfig(epochs=1)
    seen: list[AdaptationCheckpoint] = []
    adapt(route(space()), images(), config, after_epoch=seen.append)
    point = seen[-1]

    def resume(config: AdaptationConfig = config, inside: int = 2, images: Tensor = images()) -> None:  # noqa: B008
        network = route(space(inside))
        before = {name: value.clone() for name, value in network.state_dict().items()}
        try:
            adapt(network, images, config, resume=point)
        finally:
            for name, value in network.state_dict().items():
                assert torch.equal(value, before[name])

    with pytest.raises(CheckpointError, match=r"configuration: preset: expected 'official', found 'paper'"):
        resume(config.model_copy(update={"preset": "official"}))
    with pytest.raises(CheckpointError, match=r"configuration: epochs: expected 2, found 1"):
        resume(config.model_copy(update={"epochs": 2}))
    with pytest.raises(CheckpointError, match=r"other experts: expected digest \w{12}, found \w{12}"):
        resume(inside=1)
    with pytest.raises(CheckpointError, match=r"other images: expected digest"):
        resume(images=images().flip(0))


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "format"])
def test_bytes_that_are_no_checkpoint_are_refused(damage: str) -> None:
    seen: list[AdaptationCheckpoint] = []
    adapt(route(space()), images()[:1], AdaptationConfig(epochs=1), after_epoch=seen.append)
    good = seen[0].to_bytes()
    bad = {
        "empty": b"",
        "cut": good[:-10],
        "text": json.dumps({"epoch": 1}).encode(),
        "format": good.replace(b"locum-adaptation/1", b"locum-adaptation/9"),
    }[damage]
    with pytest.raises(CheckpointError, match=rf"not the checkpoint of an adaptation \({len(bad)} bytes\)"):
        AdaptationCheckpoint.from_bytes(bad)
