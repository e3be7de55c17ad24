"""The loop on real networks and real losses: what is chosen, and what is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from personalization.errors import AdaptationError
from personalization.iop_fl.batch_norm import PRIOR_IMAGES, bake_statistics
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.iop_fl.space import GLOBAL
from personalization.networks import build
from personalization.seeds import seed_of
from personalization.state import State, clone
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, space_for
from tests.helpers.personalization.choosing import EPOCHS, with_a_choice
from tests.helpers.personalization.discs import UNGUARDED, discs, space


def learned(network: nn.Module) -> State:
    return clone({name: value for name, value in network.named_parameters() if value.requires_grad})


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def score_by_hand(
    state: State, images: Tensor, config: AdaptationConfig, parts: tuple[Tensor, ...]
) -> tuple[float, float, float]:
    """Loss without shape, consistency and entropy of a state, from the definitions, in a fresh network."""
    network = route(space(), config.router)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(state[name])
        c_sum = e_sum = 0.0
        for index, batch in enumerate(parts):
            noise = torch.randn(
                batch.shape, generator=torch.Generator().manual_seed(seed_of(config.seed, "score", index))
            )
            spread = torch.stack([image.std(correction=0) for image in batch]).view(-1, 1, 1, 1)
            p = torch.softmax(network(batch), 1)
            q = torch.softmax(network(batch + config.noise * spread * noise), 1)
            c_sum += float(((p - q) ** 2).mean()) * len(batch)
            e_sum += float((-p * torch.log(p + 1e-6)).sum(1).mean()) / math.log(2) * len(batch)
    c, e = c_sum / len(images), e_sum / len(images)
    return c + 0.01 * e, c, e


def test_the_epoch_with_the_lowest_loss_measured_after_it_wins() -> None:
    images, _ = discs(5, 7, contrast=1.2)
    config = with_a_choice()
    network, seen = route(space()), list[AdaptationCheckpoint]()
    result = adapt(network, images, config, after_epoch=seen.append, limits=UNGUARDED)
    assert [checkpoint.epoch for checkpoint in seen] == [*range(EPOCHS + 1)]
    for record, checkpoint in zip(result.history, seen, strict=True):
        batches = images[::2], images[1::2]
        loss, consistency, entropy = score_by_hand(checkpoint.state, images, config, batches)
        assert record.loss == pytest.approx(loss, rel=1e-4, abs=1e-7)
        assert record.consistency == pytest.approx(consistency, rel=1e-4, abs=1e-7)
        assert record.entropy == pytest.approx(entropy, rel=1e-4, abs=1e-6)
    losses = [record.loss for record in result.history if record.loss is not None]
    # Neither the first nor the last: the run must be one in which choosing matters
    assert 0 < result.best_epoch == losses.index(min(losses)) < EPOCHS
    assert same(learned(network), seen[result.best_epoch].state)
    assert not same(learned(network), seen[-1].state)
    assert (result.stopped, result.fell_back) == (None, False)


def test_statistics_alone_are_the_global_model_with_batch_norm_measured_anew() -> None:
    images, _ = discs(5, 7, contrast=1.2)
    config = AdaptationConfig(preset="statistics", epochs=3, batch_size=3)
    whole = space()
    routed_over = space_for(config, whole)
    network = route(routed_over)
    result = adapt(network, images, config)
    assert [record.epoch for record in result.history] == [0]
    assert (result.best_epoch, result.stopped, result.fell_back) == (0, None, False)
    merged, plain = merge(routed_over, network, images), whole.plain()
    expected = bake_statistics(whole.plain(), images, 16, whole.experts[GLOBAL], PRIOR_IMAGES)
    changed = set()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
        if not torch.equal(tensor, plain.state_dict()[name]):
            changed.add(name.rsplit(".", 1)[-1])
    assert (
        {"running_mean", "running_var"} <= changed <= {"running_mean", "running_var", "num_batches_tracked"}
    )
    assert space_for(AdaptationConfig(), whole) is whole


def test_step_0_wins_where_no_epoch_is_better() -> None:
    images, _ = discs(5, 7, contrast=1.2)
    config = AdaptationConfig(preset="paper", router="pooled", routing_rate=1.0, epochs=2, batch_size=3)
    network = route(space(), "pooled")
    before = learned(network)
    result = adapt(network, images, config, limits=UNGUARDED)
    first, *later = (record.loss for record in result.history)
    assert first is not None
    assert all(loss is not None and loss > first for loss in later)
    assert (result.best_epoch, result.fell_back, result.stopped) == (0, True, None)
    assert same(learned(network), before)


def test_it_does_what_it_is_for() -> None:
    """Lower loss at every epoch, coefficients that moved, masks that stayed: on images unlike training's."""
    images, _ = discs(6, 7, contrast=1.2)
    network = route(space())
    before = learned(network)
    result = adapt(network, images, AdaptationConfig(epochs=3, batch_size=3))
    losses = [record.loss or 0 for record in result.history]
    assert losses == sorted(losses, reverse=True)
    assert all(record.safe and record.agreement and record.agreement > 0.9 for record in result.history)
    moved = {name for name, value in learned(network).items() if not torch.equal(value, before[name])}
    assert moved == set(before)


@pytest.mark.parametrize(
    ("count", "size", "inside", "router", "preset", "classes"),
    [
        (1, (32, 32), 2, "direct", "paper", 2),
        (2, (32, 48), 2, "pooled", "official", 2),
        (17, (32, 32), 2, "direct", "paper", 2),
        (5, (48, 32), 1, "pooled", "paper", 2),
        (3, (32, 32), 0, "direct", "paper", 2),
        (3, (32, 32), 0, "pooled", "official", 2),
        (5, (32, 32), 2, "direct", "official", 2),  # the last batch is one image
        (3, (32, 48), 2, "direct", "paper", 3),
    ],
)
def test_any_number_size_and_space(
    count: int, size: tuple[int, int], inside: int, router: str, preset: str, classes: int
) -> None:
    images, _ = discs(count, size=size, classes=classes)
    network = route(space(inside, classes), router)  # type: ignore[arg-type]
    config = AdaptationConfig(preset=preset, router=router, epochs=1, batch_size=4)  # type: ignore[arg-type]
    result = adapt(network, images, config)
    assert [record.epoch for record in result.history] == [0, 1]
    assert result.stopped is None
    assert all(math.isfinite(record.loss or math.nan) for record in result.history)
    assert network(images).shape == (count, classes, *size)


def test_without_bn_only_the_routing_learns() -> None:
    images, _ = discs(2)
    network = route(space())
    before = clone(dict(network.named_parameters()))
    adapt(network, images, AdaptationConfig(epochs=1, train_bn_affine=False))
    for name, value in network.named_parameters():
        assert torch.equal(value, before[name]) == ("router" not in name), name
    # Set at each call, so that a call without it does not decide the next
    adapt(network, images, AdaptationConfig(epochs=1))
    assert any(not torch.equal(v, before[n]) for n, v in network.named_parameters() if "router" not in n)


def test_batch_norm_alone_learns_where_there_is_one_model() -> None:
    images, _ = discs(2)
    network = route(space(0))
    before = clone(dict(network.named_parameters()))
    result = adapt(network, images, AdaptationConfig(epochs=1))
    moved = {name for name, value in network.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "router" not in name}
    assert result.best_epoch == 1


@pytest.mark.parametrize(("preset", "shape_weight"), [("paper", None), ("paper", 0.0)])
def test_the_shape_weight_is_heeded(preset: str, shape_weight: float | None) -> None:
    images, _ = discs(2)
    config = AdaptationConfig(preset=preset, epochs=1, shape_weight=shape_weight)
    record = adapt(route(space()), images, config).history[0]
    assert record.loss is not None
    assert record.consistency is not None
    assert record.shape is not None
    assert record.entropy is not None
    weight = 0.01 if shape_weight is None else shape_weight
    assert record.shape > 0.01
    assert record.loss == pytest.approx(record.consistency + weight * record.shape + 0.01 * record.entropy)


def test_dropout_is_repeatable_and_the_global_generator_is_left_alone() -> None:
    images, _ = discs(2)

    def run(seed: int, dropout: float = 0.2) -> tuple[State, Tensor]:
        generator = torch.Generator().manual_seed(3)
        network = route(space(), "pooled", "official", dropout, generator)
        adapt(network, images, AdaptationConfig(preset="official", router="pooled", epochs=1, seed=seed))
        return learned(network), network(images)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = run(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, run(1)[0])
    assert not same(first, run(2)[0])
    assert not same(first, run(1, dropout=0.0)[0])


class Stopped(Exception):
    pass


def stop_at(call: int) -> Callable[[], None]:
    calls = 0

    def check_cancelled() -> None:
        nonlocal calls
        calls += 1
        assert calls <= call, "called again after it had raised"
        if calls == call:
            raise Stopped

    return check_cancelled


def test_tick_is_called_before_every_step_and_every_measured_batch() -> None:
    images, _ = discs(5)
    calls: list[None] = []
    config = AdaptationConfig(epochs=2, batch_size=2)
    adapt(route(space()), images, config, check_cancelled=lambda: calls.append(None))
    # 3 batches: step 0's masks and its loss; then, per epoch, steps and the loss.
    assert len(calls) == 3 + 3 + 2 * (3 + 3)


# 1: nothing done yet; 4: amid the measure of step 0; 7 and 8: before and amid the first epoch's steps;
# 10: amid its measure; 14: amid the second epoch.
@pytest.mark.parametrize("call", [1, 4, 7, 8, 10, 14])
def test_a_tick_that_raises_leaves_the_best_state_so_far(call: int) -> None:
    images, _ = discs(5, 7, contrast=1.2)
    network, seen = route(space()), list[AdaptationCheckpoint]()
    before = learned(network)
    config = AdaptationConfig(epochs=2, batch_size=2)
    with pytest.raises(Stopped):
        adapt(network, images, config, after_epoch=seen.append, check_cancelled=stop_at(call))
    assert len(seen) == (0 if call < 7 else 1 if call < 13 else 2)
    assert same(learned(network), seen[-1].best if seen else before)
    assert all(value.grad is None for value in network.parameters())
    if call == 14:
        assert seen[-1].best_epoch == 1
        assert not same(learned(network), before)


def test_after_epoch_sees_the_network_as_it_then_is_and_may_raise() -> None:
    images, _ = discs(2)
    network = route(space())

    def look(checkpoint: AdaptationCheckpoint) -> None:
        assert same(learned(network), checkpoint.state)
        if checkpoint.epoch == 1:
            raise Stopped

    with pytest.raises(Stopped):
        adapt(network, images, AdaptationConfig(epochs=3), after_epoch=look)


def test_what_cannot_be_adapted_is_refused() -> None:
    network, config = route(space()), AdaptationConfig(epochs=1)
    images, _ = discs(3)
    with pytest.raises(AdaptationError, match=r"images: expected at least one.*found \[0, 1, 32, 32\]"):
        adapt(network, images[:0], config)
    with pytest.raises(AdaptationError, match=r"found \[3, 1, 32, 32\] torch\.int64"):
        adapt(network, images.long(), config)
    images[1, 0, 0, 0] = math.nan
    with pytest.raises(AdaptationError, match=r"1 of 3 have values that are not finite, first image 1"):
        adapt(network, images, config)
    plain = build("unet", in_channels=1, classes=2, width=4)
    with pytest.raises(AdaptationError, match="expected a routed network"):
        adapt(plain, discs(1)[0], config)
    with pytest.raises(AdaptationError, match="says 'pooled', the network was routed with 'direct'"):
        adapt(network, discs(1)[0], AdaptationConfig(router="pooled"))
