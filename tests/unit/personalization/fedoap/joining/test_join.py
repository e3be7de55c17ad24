"""Joining: learned parameters, the epoch that is kept, and an exact resume after a kill."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from personalization.errors import AdaptationError, CheckpointError
from personalization.fedoap.joining import JoiningCheckpoint, JoiningConfig, join, predict
from personalization.fedoap.losses import binary_loss
from personalization.fedoap.parts import ADAPTER, QUERY
from personalization.labelled_slices import LabelledSlices
from personalization.metrics import dice
from personalization.networks import FedOapUNet, build, initialise
from tests.helpers.personalization.discs import discs
from tests.helpers.personalization.scored_slices import score_of

CONFIG = JoiningConfig(epochs=3, batch_size=4, learning_rate=3e-3, augment=False)


def network(seed: int = 0) -> FedOapUNet:
    built = build("fedoap", in_channels=1, width=2, groups=4, heads=2, sites=2, tokens=4)
    made = initialise(built, torch.Generator().manual_seed(seed))
    assert isinstance(made, FedOapUNet)
    bank = torch.Generator().manual_seed(9)
    for part in (made.bank_key, made.bank_value):
        part.copy_(torch.randn(part.shape, generator=bank))
    made.bank_present.fill_(True)
    return made


def examples(count: int = 8, seed: int = 0, prefix: str = "p") -> LabelledSlices:
    """Two slices per patient."""
    images, truth = discs(count, seed)
    return LabelledSlices(images, truth.to(torch.uint8), tuple(f"{prefix}{i // 2}" for i in range(count)))


TRAIN, VALIDATION = examples(), examples(4, seed=1, prefix="v")
SCORE = score_of(VALIDATION)


def state(of: FedOapUNet) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.state_dict().items()}


def with_fields(config: JoiningConfig, **fields: Any) -> JoiningConfig:
    """Without validation: also to what a client may not ask."""
    return config.model_copy(update=fields)


def joined(config: JoiningConfig = CONFIG, **options: Any) -> tuple[FedOapUNet, Any]:
    made = network()
    return made, join(made, TRAIN, VALIDATION, config, SCORE, **options)


def test_join_learns_the_hospital_masks_and_keeps_the_bank() -> None:
    made, found = joined(with_fields(CONFIG, epochs=5, learning_rate=1e-2))
    assert found.best.dice > found.start.dice + 0.2
    assert [epoch.epoch for epoch in found.history] == list(range(6))
    assert found.best.dice == max(epoch.dice for epoch in found.history)
    for name in ("bank_key", "bank_value", "bank_present"):
        assert torch.equal(made.state_dict()[name], network().state_dict()[name])
    assert all(parameter.requires_grad for parameter in made.parameters())


def test_join_leaves_the_network_of_the_best_epoch() -> None:
    made, found = joined()
    maps, attention = predict(made, VALIDATION.images)
    truth = VALIDATION.targets
    # Slices 0 and 1 are one patient, 2 and 3 the other; a patient's slices count as one volume.
    volumes = [dice(maps[i : i + 2].reshape(1, -1), truth[i : i + 2].reshape(1, -1), 2)[0, 1] for i in (0, 2)]
    assert found.best.dice == pytest.approx(float(sum(volumes)) / 2)
    assert attention.shape == (4, 3)
    torch.testing.assert_close(attention.sum(dim=1), torch.ones(4))


def test_join_keeps_step_0_when_no_epoch_is_better() -> None:
    made, found = joined(with_fields(CONFIG, learning_rate=0.0, least_rate=0.0, weight_decay=0.0))
    assert found.best_epoch == 0
    before = state(network())
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_join_with_trains_personal_changes_only_the_personal_part() -> None:
    made, _ = joined(with_fields(CONFIG, trains="personal", learning_rate=0.05, epochs=1))
    before = state(network())
    # Whichever epoch was kept, the frozen parameters are unchanged.
    changed = {name for name, tensor in made.state_dict().items() if not torch.equal(tensor, before[name])}
    assert all(name.startswith((*QUERY, *ADAPTER)) for name in changed)
    seen: list[JoiningCheckpoint] = []
    joined(with_fields(CONFIG, trains="personal", epochs=1), after_epoch=seen.append)
    assert set(seen[0].state) == {name for name in before if name.startswith((*QUERY, *ADAPTER))}
    assert any(not torch.equal(seen[0].state[name], seen[1].state[name]) for name in seen[0].state)


def test_join_with_plain_loss_takes_the_hand_computed_step() -> None:
    config = with_fields(CONFIG, loss="plain", epochs=1, batch_size=8, weight_decay=0.0)
    seen: list[JoiningCheckpoint] = []
    joined(config, after_epoch=seen.append)
    reference = network()
    loss = binary_loss(reference.segment(TRAIN.images)[0], TRAIN.targets)
    assert seen[1].history[1].loss == pytest.approx(loss.item(), rel=1e-5)
    torch.autograd.backward(loss)
    # AdamW's first step is the rate times the gradient's sign, where that is not nearly zero.
    weight = reference.head.weight
    assert weight.grad is not None
    expected = weight - config.learning_rate * weight.grad.sign()
    large = weight.grad.abs() > 1e-4
    torch.testing.assert_close(
        seen[1].state["head.weight"][large], expected[large].detach(), atol=1e-5, rtol=0
    )


def test_join_with_perturbed_loss_differs_from_plain_loss() -> None:
    # A threshold of 0 perturbs every pixel, so the loss of an undecided network changes too.
    plain = with_fields(CONFIG, epochs=1, threshold=0.0, variance=4.0, loss="plain")
    found = {joined(config)[1].history[1].loss for config in (plain, with_fields(plain, loss="perturbed"))}
    assert len(found) == 2


def test_join_passes_the_configuration_to_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cosine runs over both epochs of two steps: 0.2 + 0.8 (1 + cos(pi s / 4)) / 2 at s = 0, 1, 2, 3."""
    steps: Any = sys.modules[join.__module__]
    rates: list[list[float]] = []
    losses: list[dict[str, Any]] = []
    augmented: list[bool] = []
    train, loss, batches = steps.train_adamw, steps.second_stage_loss, LabelledSlices.batches

    def train_adamw(*arguments: Any) -> Any:
        rates.append(list(arguments[3]))
        return train(*arguments)

    def second_stage_loss(*arguments: Any, **named: Any) -> Tensor:
        losses.append(named)
        return loss(*arguments, **named)

    def batches_of(self: LabelledSlices, size: int, seed: int, augment: bool, device: torch.device) -> Any:
        augmented.append(augment)
        return batches(self, size, seed, augment, device)

    monkeypatch.setattr(steps, "train_adamw", train_adamw)
    monkeypatch.setattr(steps, "second_stage_loss", second_stage_loss)
    monkeypatch.setattr(LabelledSlices, "batches", batches_of)
    given = {"variance": 0.7, "threshold": 0.3, "trade_off": 0.4}
    joined(with_fields(CONFIG, epochs=2, learning_rate=1.0, least_rate=0.2, augment=True, **given))
    assert rates[0] == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5)])
    assert rates[1] == pytest.approx([0.6, 0.2 + 0.4 * (1 - 2**-0.5)])
    assert losses == [{"perturbed": True, **given}] * 4
    assert augmented == [True, True]


def test_join_resumed_after_any_epoch_equals_an_uninterrupted_run() -> None:
    config = with_fields(CONFIG, epochs=2, augment=True)
    left: list[bytes] = []
    whole, straight = joined(config, after_epoch=lambda c: left.append(c.to_bytes()))
    assert len(left) == 3
    for content in left:
        resumed: list[bytes] = []
        made, found = joined(
            config,
            resume=JoiningCheckpoint.from_bytes(content),
            after_epoch=lambda c, resumed=resumed: resumed.append(c.to_bytes()),  # type: ignore[misc]
        )
        assert found == straight
        assert all(
            torch.equal(tensor, made.state_dict()[name]) for name, tensor in whole.state_dict().items()
        )
        assert resumed == left[len(left) - len(resumed) :]


def test_join_rejects_a_checkpoint_of_another_run() -> None:
    left: list[JoiningCheckpoint] = []
    joined(with_fields(CONFIG, epochs=1), after_epoch=left.append)
    with pytest.raises(CheckpointError, match="epochs: expected 3, found 1"):
        joined(CONFIG, resume=left[-1])
    with pytest.raises(CheckpointError, match="train"):
        join(
            network(),
            examples(seed=5),
            VALIDATION,
            with_fields(CONFIG, epochs=1),
            SCORE,
            resume=left[-1],
        )
    with pytest.raises(CheckpointError, match="weights"):
        join(
            network(1),
            TRAIN,
            VALIDATION,
            with_fields(CONFIG, epochs=1),
            SCORE,
            resume=left[-1],
        )
    with pytest.raises(CheckpointError, match="not the checkpoint"):
        JoiningCheckpoint.from_bytes(left[-1].to_bytes()[:-7])


def test_join_with_non_finite_loss_stops_and_keeps_the_best_epoch() -> None:
    made, found = joined(with_fields(CONFIG, learning_rate=1e30))
    assert found.stopped is not None
    assert "lower learning_rate" in found.stopped
    assert not found.history[-1].safe
    assert all(math.isfinite(float(tensor.sum())) for tensor in made.state_dict().values())


def test_join_stops_when_check_cancelled_raises() -> None:
    ticks = iter(range(5))

    def check_cancelled() -> None:
        if next(ticks, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        joined(with_fields(CONFIG, epochs=100), check_cancelled=check_cancelled)


def test_false_positives_count_slices_without_a_tumour() -> None:
    images, truth = discs(4, seed=1)
    drawn = truth.to(torch.uint8)
    drawn[2:] = 0
    validation = LabelledSlices(images, drawn, ("v", "v", "w", "x"))
    made = network()
    found = join(made, TRAIN, validation, with_fields(CONFIG, epochs=1), score_of(validation))
    maps, _ = predict(made, images[2:])
    # At 32 x 32 pixels a single pixel does not count as a false alarm.
    assert found.best.false_positives == sum(int(one.sum()) >= 2 for one in maps) / 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: join(network(), TRAIN, TRAIN, CONFIG, SCORE),
            "different patients for training and validation",
        ),
        (
            lambda: join(
                network(),
                TRAIN,
                replace(VALIDATION, targets=VALIDATION.targets * 0),
                CONFIG,
                SCORE,
            ),
            "no validation slice",
        ),
        (
            lambda: join(network(), replace(TRAIN, targets=TRAIN.targets * 0), VALIDATION, CONFIG, SCORE),
            "no training slice",
        ),
        (lambda: replace(TRAIN, targets=TRAIN.targets * 2), "up to 2"),
        (lambda: replace(TRAIN, patients=("p",)), "N patients"),
        (lambda: replace(TRAIN, images=TRAIN.images * math.nan), "not finite"),
        (lambda: JoiningConfig(epochs=0), "epochs"),
        (lambda: JoiningConfig(trade_off=1.5), "trade_off"),
        (lambda: JoiningConfig(learning_rate=math.nan), "learning_rate"),
        (lambda: JoiningConfig(learning_rate=1e-4, least_rate=1e-3), "least_rate: expected at most"),
    ],
)
def test_join_rejects_invalid_examples_and_configuration(make: Any, words: str) -> None:
    with pytest.raises(AdaptationError, match=words):
        make()
