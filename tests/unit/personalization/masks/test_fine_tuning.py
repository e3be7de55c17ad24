"""Fine-tuning by a few masks: the network between, the weight by held-out patients, and an exact resume."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personalization.errors import AdaptationError, CheckpointError
from personalization.labelled_slices import LabelledSlices
from personalization.losses import cross_entropy, soft_dice_loss
from personalization.masks import (
    Fitted,
    FoldScores,
    MasksCheckpoint,
    MasksConfig,
    fine_tuning,
    patient_dice,
)
from personalization.masks.fine_tuning import best_weight, between, folds_of, tune
from personalization.networks.capabilities import batch_norms, head_paths
from personalization.options.masks import TRAINED
from personalization.seeds import seed_of
from tests.helpers.personalization.discs import discs, space
from tests.helpers.personalization.scored_slices import score_of

CONFIG = MasksConfig(steps=20, batch_size=4, augment=False)


def parent() -> nn.Module:
    return space().plain().eval()


def examples(count: int = 8, seed: int = 0, contrast: float = -1.0) -> LabelledSlices:
    """Two slices per patient; dark discs, where the parent has learned bright ones."""
    images, truth = discs(count, seed, contrast=contrast)
    return LabelledSlices(images, truth.to(torch.uint8), tuple(f"p{i // 2}" for i in range(count)))


def fit(parent: nn.Module, of: LabelledSlices, config: MasksConfig, **more: Any) -> Fitted:
    return fine_tuning.fit(parent, of, config, score_of(of), **more)


def dice(network: nn.Module, of: LabelledSlices) -> float:
    return float(np.mean([*score_of(of)(network, {*of.patients}).values()]))


def tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_fit_learns_another_appearance_from_masks_and_leaves_the_parent() -> None:
    began = parent()
    before = tensors(began)
    found = fit(began, examples(), MasksConfig(steps=60, batch_size=8))
    others = examples(16, seed=5)
    assert found.weight > 0
    assert dice(found.network, others) > dice(began, others) + 0.3
    assert found.gain.low > 0
    assert found.gain.n == 4
    assert equal(tensors(began), before)


def test_fit_keeps_the_parent_where_no_held_out_mask_gains() -> None:
    """Masks that are the parent's own answers: nothing can be better."""
    data, began = examples(contrast=2.0), parent()
    with torch.no_grad():
        own = began(data.images).argmax(dim=1).to(torch.uint8)
    found = fit(began, replace(data, targets=own), replace_steps())
    assert found.weight == 0
    assert equal(tensors(found.network), tensors(parent()))
    assert set(found.changes.values()) == {0.0}
    assert found.means[0.0] == 1.0


def replace_steps(**more: Any) -> MasksConfig:
    return CONFIG.model_copy(update={"steps": 5, **more})


def test_tune_takes_the_steps_of_a_plain_loop() -> None:
    """AdamW with a cosine, batch statistics, soft Dice and cross-entropy, over full batches."""
    data = examples(4)
    config = CONFIG.model_copy(update={"steps": 3, "batch_size": 4})
    found, _ = tune(parent(), data, config, 3, seed=11)
    network = copy.deepcopy(parent()).train()
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-5)
    for step in range(3):
        (images, targets), *_ = data.batches(4, _epoch_seed(11, step), augment=False)
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * (1 + np.cos(np.pi * step / 3)) / 2
        optimiser.zero_grad()
        logits = network(images)
        (soft_dice_loss(logits, targets) + cross_entropy(logits, targets)).backward()
        optimiser.step()
    expected = network.state_dict()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def _epoch_seed(seed: int, epoch: int) -> int:
    return seed_of(seed, "epoch", epoch)


def test_between_is_linear_in_weights_and_measures_statistics_again() -> None:
    began, data = parent(), examples()
    tuned, _ = tune(began, data, CONFIG, 5, seed=0)
    half = between(began, tuned, 0.5, data.images)
    start = began.state_dict()
    for name, parameter in half.named_parameters():
        assert torch.allclose(parameter, (start[name] + tuned[name]) / 2, atol=1e-6)
    norm = next(iter(batch_norms(half).values()))
    path = next(iter(batch_norms(half)))
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        half(data.images)
    handle.remove()
    prior = (start[f"{path}.running_mean"] + tuned[f"{path}.running_mean"]) / 2
    share = len(data) / (len(data) + 5)
    expected = (1 - share) * prior + share * seen[0].mean(dim=(0, 2, 3))
    assert torch.allclose(half.get_buffer(f"{path}.running_mean"), expected, atol=1e-5)


@pytest.mark.parametrize("trains", TRAINED)
def test_each_baseline_moves_its_parameters_alone(trains: str) -> None:
    began, data = parent(), examples(4)
    tuned, _ = tune(began, data, CONFIG.model_copy(update={"trains": trains}), 3, seed=0)
    assert tuned.keys() == began.state_dict().keys()
    moved = {name for name, p in began.named_parameters() if not torch.equal(tuned[name], p)}
    norms = {f"{path}.{part}" for path in batch_norms(began) for part in ("weight", "bias")}
    names = {name for name, _ in began.named_parameters()}
    heads = tuple(f"{path}." for path in head_paths(began))
    expected = {
        "all": names,
        "scratch": names,
        "head": {name for name in names if name.startswith(heads)},
        "norms": norms & names,
        "ssf": names,
    }[trains]
    assert moved == expected
    if trains == "ssf":
        far = []
        convolutions = [name for name, p in began.named_parameters() if p.shape[2:] == (3, 3)]
        for name in convolutions:
            after, before = tuned[name], began.state_dict()[name]
            # One factor per output channel, by least squares.
            factor = (after * before).sum((1, 2, 3), keepdim=True) / before.square().sum(
                (1, 2, 3), keepdim=True
            )
            assert torch.allclose(after, factor * before, atol=1e-6)
            far.append(not torch.allclose(factor, torch.ones_like(factor), atol=1e-6))
        # Batch norm undoes a factor before it, so that some move by rounding alone.
        assert any(far)


def test_folds_hold_every_patient_out_once_and_spread_targets() -> None:
    images, truth = discs(14)
    truth[10:] = 0
    data = LabelledSlices(images, truth.to(torch.uint8), tuple(f"p{i // 2}" for i in range(14)))
    folds = folds_of(data, 3, seed=1)
    assert sorted(patient for fold in folds for patient in fold) == sorted({*data.patients})
    assert [len(fold & data.ill) for fold in folds] == [2, 2, 1]
    assert folds == folds_of(data, 3, seed=1)
    assert len(folds_of(data, 10, seed=1)) == 5  # as many as patients with a target


def test_no_network_is_scored_on_a_patient_it_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[set[str]] = []
    scored: list[set[str]] = []
    plain_tune, data = fine_tuning.tune, examples()
    plain_score = score_of(data)

    def noted_tune(began: Any, data: LabelledSlices, *rest: Any) -> Any:
        learned.append({*data.patients})
        return plain_tune(began, data, *rest)

    def noted_score(network: Any, patients: Any) -> Any:
        if learned:
            scored.append({*patients})
            assert not learned[-1] & scored[-1]
        return plain_score(network, patients)

    monkeypatch.setattr(fine_tuning, "tune", noted_tune)
    found = fine_tuning.fit(parent(), data, replace_steps(folds=2), noted_score)
    assert len(scored) == 2 * 4  # folds times weights but the parent's
    assert len(learned) == 2 + (found.weight > 0)


def test_changes_are_scored_at_the_weight_that_the_other_patients_choose() -> None:
    scores = {"a": (0.5, 0.9), "b": (0.5, 0.4), "c": (0.5, 0.45)}
    found = Fitted(nn.Identity(), (0.0, 1.0), 1.0, 1, (FoldScores(0.0, scores),))
    # Without a: b and c are worse at 1, so a stays at the parent; without b or c the mean is better at 1.
    assert found.changes == pytest.approx({"a": 0.0, "b": -0.1, "c": -0.05})
    assert found.means == pytest.approx({0.0: 0.5, 1.0: 1.75 / 3})
    assert found.gain.mean == pytest.approx(-0.05)


def test_best_weight_is_the_smallest_of_equals() -> None:
    assert best_weight(np.array([[0.5, 0.7, 0.7], [0.5, 0.6, 0.6]])) == 1
    assert best_weight(np.array([[0.5, 0.5], [0.5, 0.5]])) == 0


def test_patient_dice_counts_an_empty_patient_as_right_unless_more_than_a_speck_is_found() -> None:
    truth = np.zeros((4, 40, 40), np.uint8)
    truth[:2, :10, :10] = 1
    found = truth.copy()
    found[1, :10, 5:10] = 0
    found[2, 0, 0] = 1  # a pixel of 1600 is a speck
    found[3, :4, :4] = 1
    pairs = [*zip(found, truth, strict=True)]
    assert patient_dice(pairs[:2], 2) == pytest.approx(2 * 150 / (200 + 150))
    assert patient_dice([(found[:2].transpose(1, 2, 0), truth[:2].transpose(1, 2, 0))], 2) == patient_dice(
        pairs[:2], 2
    )
    assert (patient_dice(pairs[2:3], 2), patient_dice(pairs[3:], 2)) == (1.0, 0.0)


@pytest.mark.parametrize("after", [1, 4])
def test_resume_after_a_fold_gives_the_same_network(after: int) -> None:
    kept: list[bytes] = []
    whole = fit(
        parent(), examples(), CONFIG, after_fold=lambda checkpoint, _: kept.append(checkpoint.to_bytes())
    )
    assert len(kept) == 4
    again = fit(parent(), examples(), CONFIG, resume=MasksCheckpoint.from_bytes(kept[after - 1]))
    assert (again.weight, again.folds) == (whole.weight, whole.folds)
    assert equal(tensors(again.network), tensors(whole.network))


def test_checkpoint_of_another_fit_or_of_other_bytes_is_refused() -> None:
    kept: list[MasksCheckpoint] = []
    fit(parent(), examples(), replace_steps(), after_fold=lambda checkpoint, _: kept.append(checkpoint))
    with pytest.raises(CheckpointError, match="another fit"):
        fit(parent(), examples(seed=3), replace_steps(), resume=kept[0])
    with pytest.raises(CheckpointError, match="another fit"):
        fit(parent(), examples(), replace_steps(seed=3), resume=kept[0])
    with pytest.raises(CheckpointError, match="not the checkpoint"):
        MasksCheckpoint.from_bytes(b"no")


def test_fit_stops_when_check_cancelled_raises() -> None:
    ticks = iter(range(30))

    def check_cancelled() -> None:
        if next(ticks, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(parent(), examples(), CONFIG, check_cancelled=check_cancelled)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit(parent(), examples(2), CONFIG), "at least 2 patients"),
        (lambda: replace(examples(), targets=examples().targets * 2), "up to 2"),
        (lambda: MasksConfig(steps=0), "steps"),
        (lambda: MasksConfig(trains="nothing"), "trains"),
        (lambda: MasksConfig(preset="ladder"), "preset"),
    ],
)
def test_fit_refuses_what_does_not_fit(make: Any, words: str) -> None:
    with pytest.raises(AdaptationError, match=words):
        make()


def test_steps_grow_with_the_patients_within_bounds() -> None:
    assert [MasksConfig().steps_for(n) for n in (2, 5, 10, 20, 100)] == [60, 60, 120, 240, 240]
    assert MasksConfig(steps=7).steps_for(100) == 7


def test_classes_beyond_two_are_learned() -> None:
    images, truth = discs(8, 0, classes=3)
    data = LabelledSlices(images, truth.to(torch.uint8), tuple(f"p{i // 2}" for i in range(8)), classes=3)
    found = fit(space(classes=3).plain().eval(), data, replace_steps(folds=2))
    assert set(found.dice) == {"p0", "p1", "p2", "p3"}


def test_places_without_a_truth_teach_and_score_nothing() -> None:
    of = examples(8)
    half = of.targets.clone()
    half[:, :, 16:] = 255
    half[:2] = 255
    ignoring = replace(of, targets=half)
    assert "p0" in of.ill
    assert ignoring.ill == of.ill - {"p0"}
    logits = torch.randn(8, 2, *half.shape[1:], requires_grad=True)
    ignoring.loss(lambda z, y: soft_dice_loss(z, y) + cross_entropy(z, y))(logits, half).backward()
    assert logits.grad is not None
    taught = logits.grad.abs().sum(dim=1) > 0
    assert torch.equal(taught, half != 255)
    found, truth = np.ones((4, 4), np.uint8), np.full((4, 4), 255, np.uint8)
    truth[0], truth[1] = 1, 0
    assert patient_dice([(found, truth)], 2) == pytest.approx(2 * 4 / (8 + 4))


def test_patches_are_flipped_along_the_mirrored_axes_alone_with_their_masks() -> None:
    images = torch.rand(1, 1, 3, 3, 3)
    targets = (images[:, 0] > 0.5).to(torch.uint8)
    of = LabelledSlices(images, targets, ("p",), mirror=(0, 2))
    seen = set()
    for epoch in range(30):
        for image, target in of.batches(4, epoch, augment=False):
            assert torch.equal(target, (image[:, 0] > 0.5).to(torch.uint8))
            seen.add(image.numpy().tobytes())
    turns = [(), (2,), (4,), (2, 4)]
    assert seen == {images.flip(axes).contiguous().numpy().tobytes() for axes in turns}


def test_patches_with_a_target_are_a_third_of_an_epoch() -> None:
    images, targets = torch.rand(9, 1, 4, 4, 4), torch.zeros(9, 4, 4, 4, dtype=torch.uint8)
    targets[0, 0] = 1
    of = LabelledSlices(images, targets, tuple(f"p{index}" for index in range(9)))
    drawn = [own for _, batch in of.batches(4, 0, augment=False) for own in batch]
    assert len(drawn) == 9 + 3
    assert sum(bool(own.any()) for own in drawn) == 4
    flat = LabelledSlices(images[..., 0], targets[..., 0], of.patients)
    assert sum(len(batch) for batch, _ in flat.batches(4, 0, augment=True)) == 9
