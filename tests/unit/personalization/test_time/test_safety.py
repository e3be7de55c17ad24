"""Runs that truly go wrong, and are stopped for the right reason."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from personalization.iop_fl.network import route
from personalization.state import clone
from personalization.test_time.adapt import Adaptation
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt
from personalization.test_time.safety import MaskOverlap, MaskStats, SafetyLimits, unsafe_reason
from tests.helpers.personalization.discs import discs, space

LIMITS = SafetyLimits()


def run(
    images: Tensor, config: AdaptationConfig, limits: SafetyLimits = LIMITS, classes: int = 2
) -> tuple[Adaptation, list[AdaptationCheckpoint]]:
    """Adapt, and check what holds for every run: the network is at the best safe state, and that is JSON."""
    network, seen = route(space(classes=classes), config.router), list[AdaptationCheckpoint]()
    result = adapt(network, images, config, after_epoch=seen.append, limits=limits)
    best = seen[result.best_epoch].state
    assert all(torch.equal(value, best[name]) for name, value in network.named_parameters())
    assert result.history[result.best_epoch].safe
    assert result.fell_back == (result.best_epoch == 0)
    json.dumps([asdict(record) for record in result.history], allow_nan=False)
    return result, seen


def nothing_in_them() -> Tensor:
    return torch.randn(6, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def test_entropy_collapses_on_empty_images_and_the_best_safe_epoch_is_kept() -> None:
    result, _ = run(nothing_in_them(), AdaptationConfig(epochs=8, batch_size=3, bn_rate=0.03))
    last = result.history[-1]
    assert not last.safe
    assert last.epoch < 8  # stopped, not merely marked
    assert last.loss == min(record.loss or math.inf for record in result.history)  # the loss alone liked it
    assert result.stopped == f"stopped at epoch {last.epoch}: {last.reason}"
    assert "the foreground collapsed" in result.stopped
    assert "at step 0 it was" in result.stopped
    assert result.best_epoch == last.epoch - 1


def test_images_of_one_value_end_in_a_defined_state() -> None:
    for preset in ("paper", "official"):
        result, _ = run(torch.zeros(2, 1, 32, 32), AdaptationConfig(preset=preset, epochs=2))
        assert all(record.loss is not None for record in result.history)
        assert result.history[0].safe


def test_a_far_too_high_rate_wipes_the_masks_out_and_is_undone() -> None:
    images, _ = discs(5, 7, contrast=1.2)
    result, _ = run(images, AdaptationConfig(preset="paper", bn_rate=3.0, epochs=4, batch_size=3))
    assert result.stopped is not None
    assert "stopped at epoch 1: the foreground collapsed" in result.stopped
    assert (result.best_epoch, result.fell_back) == (0, True)
    assert len(result.history) == 2


def test_with_several_classes_the_one_that_went_wrong_is_named() -> None:
    images, _ = discs(6, 7, contrast=1.2, classes=3)
    result, _ = run(images, AdaptationConfig(bn_rate=1.0, epochs=4, batch_size=3), classes=3)
    assert result.stopped is not None
    assert "class 1 collapsed" in result.stopped
    assert result.fell_back


def test_a_loss_that_rises_is_a_divergence() -> None:
    images, _ = discs(5, 7, contrast=1.2)
    config = AdaptationConfig(preset="paper", router="pooled", routing_rate=1.0, epochs=4, batch_size=3)
    result, _ = run(images, config, replace(LIMITS, divergence=1.2, slack=0.0))
    assert result.stopped is not None
    assert "stopped at epoch 1: the loss diverged" in result.stopped
    assert "lower the learning rates" in result.stopped


def test_a_loss_that_is_no_number_stops_before_the_step_that_would_learn_from_it() -> None:
    images, _ = discs(2)
    network = route(space())
    start = clone(dict(network.named_parameters()))

    def poison(checkpoint: AdaptationCheckpoint) -> None:
        if checkpoint.epoch == 0:
            with torch.no_grad():
                next(network.parameters()).fill_(math.nan)

    result = adapt(network, images, AdaptationConfig(epochs=3), after_epoch=poison)
    assert result.stopped == (
        "stopped at epoch 1: the loss of step 1 is not a finite number; lower the learning rates"
    )
    assert result.history[1].loss is None
    assert all(torch.equal(value, start[name]) for name, value in network.named_parameters())


def test_images_too_large_for_their_type_are_stopped_at_step_0() -> None:
    images, _ = discs(2)
    result = adapt(route(space()), images * 1e38, AdaptationConfig(epochs=2))
    assert result.stopped == "stopped at epoch 0: the loss is not a finite number; lower the learning rates"
    assert (len(result.history), result.fell_back, result.history[0].loss) == (1, True, None)


def reading(*sizes: float, loss: float = 0.1, agreement: float = 0.9) -> MaskStats:
    return MaskStats(loss, 1.0, (1 - sum(sizes), *sizes), agreement)


@pytest.mark.parametrize(
    ("now", "start", "expected"),
    [
        (reading(0.06), reading(0.06), None),
        (reading(0.0201), reading(0.06), None),
        (
            reading(0.0199),
            reading(0.06),
            r"the foreground collapsed: 1\.990%.* was 6\.000% \(at least 2\.000%",
        ),
        (reading(0.179), reading(0.06), None),
        (reading(0.181), reading(0.06), r"the foreground exploded: 18\.100%.*\(at most 18\.000%"),
        # From nothing there is room to grow to 2%, and specks may vanish
        (reading(0.019), reading(0.0), None),
        (reading(0.021), reading(0.0), "the foreground exploded"),
        (reading(0.0), reading(0.00009), None),
        (reading(0.0), reading(0.00011), "the foreground collapsed"),
        # 0.9 of the image thrice is more than there is; the background says it
        (reading(0.97), reading(0.9), "the background collapsed"),
        (reading(0.06, 0.01), reading(0.06, 0.06), "class 2 collapsed"),
        (reading(0.06, agreement=0.5), reading(0.06), None),
        (
            reading(0.06, agreement=0.49),
            reading(0.06),
            r"no longer agree.*Dice 0\.49, expected at least 0\.50",
        ),
        (reading(0.06, loss=0.2), reading(0.06), None),
        (
            reading(0.06, loss=0.21),
            reading(0.06),
            r"the loss diverged: 0\.21, at step 0 it was 0\.1 \(at most 0\.2",
        ),
        # Twice nearly nothing is nearly nothing: a hundredth of the most it can be
        (reading(0.06, loss=0.0109), reading(0.06, loss=0.001), None),
        (reading(0.06, loss=0.0111), reading(0.06, loss=0.001), "the loss diverged"),
        (reading(0.06, loss=math.nan), reading(0.06), "not a finite number"),
        (reading(0.06, loss=math.inf), reading(0.06), "not a finite number"),
    ],
)
def test_each_limit_by_hand(now: MaskStats, start: MaskStats, expected: str | None) -> None:
    reason = unsafe_reason(now, start, LIMITS)
    assert (reason is None) == (expected is None), reason
    if expected is not None and reason is not None:
        assert re.search(expected, reason), reason


def test_overlap_by_hand() -> None:
    overlap = MaskOverlap(3)
    overlap.add(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[0, 1, 0, 2]]))
    overlap.add(torch.tensor([[1, 1, 0, 0]], dtype=torch.uint8), torch.tensor([[1, 2, 0, 0]]))
    # Class 1 had 2, has 4, shares 2: 4/6. Class 2 had 2, has 1, shares 1: 2/3.
    assert overlap.sizes() == (3 / 8, 4 / 8, 1 / 8)
    assert overlap.agreement() == pytest.approx((4 / 6 + 2 / 3) / 2)
    # A class that is nowhere, or no more than specks, does not count
    assert overlap.agreement(smallest=0.3) == pytest.approx(4 / 6)
    empty = MaskOverlap(2)
    empty.add(torch.zeros(1, 4), torch.zeros(1, 4))
    assert (empty.agreement(), empty.sizes()) == (1.0, (1.0, 0.0))
