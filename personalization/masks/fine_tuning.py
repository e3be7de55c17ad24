"""Fine-tune a network on a few masks, and keep as much of the change as held-out masks gain by.

    theta_w = theta_0 + w (theta_1 - theta_0)        w in 0, 1/4, 1/2, 3/4, 1

theta_0 is the parent, theta_1 what S steps of AdamW make of it by soft Dice and cross-entropy, with the
batches' own statistics in batch norm. The statistics of theta_w are measured again, on the slices from which
theta_1 learned. Between both are networks that keep what the federation knew (WiSE-FT, Wortsman et al., CVPR
2022). w has the highest mean Dice over the patients, each of whom was held out of the fit that is scored; of
equals the smallest, and 0 is the parent. Rate, steps and batch statistics were chosen on phantoms.

The change of Dice that a hospital may expect is measured on the same masks, but never at a weight that a
patient helped to choose: each is scored at the weight that the others choose.

Legend: N slices, C channels, H rows, W columns, F folds.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils import parametrize

from personalization.adamw import Optimiser, cosine, train_adamw
from personalization.cancellation import CancelCheck, never_cancelled
from personalization.checkpoint import digest, from_bytes, to_bytes
from personalization.errors import AdaptationError, CheckpointError
from personalization.gate.bounds import Bounds, bounds
from personalization.gate.masks import MIN_COMPONENT
from personalization.iop_fl.network import MOST_VOXELS_LEARNED, at_once
from personalization.labelled_slices import LabelledSlices, Score
from personalization.losses import cross_entropy, soft_dice_loss
from personalization.metrics import dice
from personalization.networks import initialise
from personalization.networks.capabilities import (
    TransposedConvolution,
    batch_norms,
    convolutions,
    head_paths,
    moving_norms,
)
from personalization.options.checked import Checked
from personalization.options.masks import MasksOptions
from personalization.seeds import seed_of
from personalization.state import State, clone
from personalization.test_time.ladder import blended
from personalization.told import IGNORED

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Between another network's random weights and the parent's lies no network that segments.
FROM_SCRATCH = (0.0, 1.0)
# Gradient steps where none are asked for: in proportion to the patients, within these bounds.
STEPS_PER_PATIENT, FEWEST_STEPS, MOST_STEPS = 12, 60, 240
FORMAT = "locum-masks/2"


class MasksConfig(Checked, MasksOptions):
    """The fields of MasksOptions. Raises AdaptationError naming the invalid field."""

    WHAT: ClassVar[str] = "masks"

    @property
    def weights(self) -> tuple[float, ...]:
        """The shares of the fine-tuned weights that are compared."""
        return FROM_SCRATCH if self.trains == "scratch" else WEIGHTS

    def steps_for(self, patients: int) -> int:
        """Gradient steps of a fit for the masks of so many patients."""
        if self.steps is not None:
            return self.steps
        return min(max(STEPS_PER_PATIENT * patients, FEWEST_STEPS), MOST_STEPS)


@dataclass(frozen=True)
class FoldScores:
    """A fit without some patients: the Dice of each of these, at every weight, and the mean training loss."""

    loss: float
    dice: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class MasksCheckpoint:
    """The folds that are done. `about` identifies the fit."""

    about: Mapping[str, Any]
    folds: tuple[FoldScores, ...]

    def to_bytes(self) -> bytes:
        """Serialise. Equal checkpoints give equal bytes."""
        folds = [asdict(fold) for fold in self.folds]
        return to_bytes({}, {"format": FORMAT, "about": self.about, "folds": folds})

    @classmethod
    def from_bytes(cls, data: bytes) -> MasksCheckpoint:
        """Read a checkpoint from bytes. Raises CheckpointError if they are not one."""
        try:
            _, facts = from_bytes(data, (), FORMAT)
            folds = tuple(
                FoldScores(fold["loss"], {name: tuple(dice) for name, dice in fold["dice"].items()})
                for fold in facts["folds"]
            )
            return cls(facts["about"], folds)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"not the checkpoint of a fit by masks ({len(data)} bytes): {error!r}; start again"
            ) from error


@dataclass(frozen=True)
class Fitted:
    """A finished fit: the network, and the Dice of every held-out patient at each of `weights`.

    `weight` is the share of the fine-tuned weights in the network, 0 for the parent.
    """

    network: nn.Module
    weights: tuple[float, ...]
    weight: float
    steps: int
    folds: tuple[FoldScores, ...]

    @property
    def dice(self) -> dict[str, tuple[float, ...]]:
        """By patient, sorted."""
        return dict(sorted((name, each) for fold in self.folds for name, each in fold.dice.items()))

    @property
    def means(self) -> dict[float, float]:
        """Mean Dice over the held-out patients, by weight."""
        means = np.array(list(self.dice.values())).mean(axis=0)
        return dict(zip(self.weights, means.tolist(), strict=True))

    @property
    def changes(self) -> dict[str, float]:
        """By patient the change of Dice against the parent, at the weight that the others choose.

        Nothing changes where the parent is kept.
        """
        if self.weight == 0:
            return dict.fromkeys(self.dice, 0.0)
        values = np.array(list(self.dice.values()))
        chosen = [best_weight(np.delete(values, own, axis=0)) for own in range(len(values))]
        return {
            name: float(values[own, index] - values[own, 0])
            for own, (name, index) in enumerate(zip(self.dice, chosen, strict=True))
        }

    @property
    def gain(self) -> Bounds:
        """Mean of the changes, with its bounds."""
        return bounds([*self.changes.values()])


def fit(
    parent: nn.Module,
    examples: LabelledSlices,
    config: MasksConfig,
    score: Score,
    *,
    resume: MasksCheckpoint | None = None,
    after_fold: Callable[[MasksCheckpoint, nn.Module], None] | None = None,
    check_cancelled: CancelCheck = never_cancelled,
) -> Fitted:
    """Fit copies of a network, which stays as it is. The result is deterministic, also after a resume.

    Args:
        parent: the network to start from, on the device where it is computed.
        examples: the hospital's slices with masks, of at least two patients with a target.
        config: the settings.
        score: the `patient_dice` of patients.
        resume: checkpoint of an earlier process; all other arguments must be the same as then.
        after_fold: called with a checkpoint and the network of the fold after each, and once after a resume
            with the parent.
        check_cancelled: called before every step; it may raise, to stop.

    Raises:
        AdaptationError: fewer than two patients with a target, or nothing to train.
        CheckpointError: `resume` belongs to another fit.
    """
    held_out = folds_of(examples, config.folds, config.seed)
    steps = config.steps_for(len({*examples.patients}))
    parent = copy.deepcopy(parent).eval()
    about = _about(parent, examples, config)
    done: list[FoldScores] = []
    if resume is not None:
        if resume.about != about or len(resume.folds) > len(held_out):
            raise CheckpointError("checkpoint of another fit by masks: other masks, weights or options")
        done = [*resume.folds]
        if after_fold is not None:
            after_fold(resume, parent)
    before = score(parent, {*examples.patients})
    for number, patients in enumerate(held_out):
        if number < len(done):
            continue
        train = examples.of({*examples.patients} - patients)
        seed = seed_of(config.seed, "fold", number)
        tuned, loss = tune(parent, train, config, steps, seed, check_cancelled)
        found: dict[str, list[float]] = {patient: [before[patient]] for patient in sorted(patients)}
        for weight in config.weights[1:]:
            network = between(parent, tuned, weight, train.images, check_cancelled)
            for patient, value in score(network, patients).items():
                found[patient].append(value)
        done.append(FoldScores(loss, {patient: tuple(values) for patient, values in found.items()}))
        if after_fold is not None:
            after_fold(MasksCheckpoint(about, tuple(done)), network)
    values = np.array([each for fold in done for each in fold.dice.values()])
    weight, network = config.weights[best_weight(values)], parent
    if weight:
        tuned, _ = tune(parent, examples, config, steps, seed_of(config.seed, "all"), check_cancelled)
        network = between(parent, tuned, weight, examples.images, check_cancelled)
    return Fitted(network, config.weights, weight, steps, tuple(done))


def best_weight(dice: NDArray[np.float64]) -> int:
    """Index of the weight with the highest mean of Dice [patients, weights], the first of equals."""
    return int(dice.mean(axis=0).argmax())


def folds_of(examples: LabelledSlices, most: int, seed: int) -> tuple[frozenset[str], ...]:
    """The patients who are held out, fold by fold; those with a target are spread evenly.

    There are as many folds as patients with a target, at most `most`. Raises AdaptationError for fewer than
    two such patients.
    """
    ill = examples.ill
    if len(ill) < 2:
        raise AdaptationError(
            f"masks: expected targets of at least 2 patients, to learn from one and to hold one out, found "
            f"{len(ill)}"
        )
    folds: list[set[str]] = [set() for _ in range(min(most, len(ill)))]
    others = {*examples.patients} - ill
    for number, patient in enumerate([*_shuffled(ill, seed), *_shuffled(others, seed)]):
        folds[number % len(folds)].add(patient)
    return tuple(map(frozenset, folds))


def _shuffled(patients: Iterator[str] | frozenset[str] | set[str], seed: int) -> list[str]:
    # Sorted by hash, because the order of names may follow dates or wards.
    return sorted(patients, key=lambda patient: hashlib.sha256(f"{seed}/{patient}".encode()).digest())


def tune(
    parent: nn.Module,
    examples: LabelledSlices,
    config: MasksConfig,
    steps: int,
    seed: int,
    check_cancelled: CancelCheck = never_cancelled,
) -> tuple[State, float]:
    """theta_1 with the moving statistics of its last batches, and the mean loss of all steps."""
    network = copy.deepcopy(parent)
    if config.trains == "scratch":
        initialise(network, torch.Generator().manual_seed(seed_of(seed, "weights")))
    _freeze_others(network, config)

    of_both = examples.loss(
        lambda logits, truth: soft_dice_loss(logits, truth) + cross_entropy(logits, truth)
    )

    def loss(images: Tensor, targets: Tensor) -> Tensor:
        check_cancelled()
        return of_both(network(images), targets)

    rates = cosine(config.learning_rate, 0.0, steps, range(steps))
    device = next(network.parameters()).device
    drawn = _endless(examples, config, seed, device)
    mean, _ = train_adamw(network, drawn, loss, rates, Optimiser())
    for layer in convolutions(network).values():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    return clone(network.state_dict()), mean if math.isfinite(mean) else 0.0


def _of_both(logits: Tensor, targets: Tensor) -> Tensor:
    return soft_dice_loss(logits, targets) + cross_entropy(logits, targets)


def _endless(
    examples: LabelledSlices, config: MasksConfig, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches without end, so that batch norm never has a single slice where there are several."""
    size = at_once(min(config.batch_size, len(examples)), examples.images.shape[2:], MOST_VOXELS_LEARNED)
    images: list[Tensor] = []
    targets: list[Tensor] = []
    epoch = 0
    while True:
        for some, drawn in examples.batches(size, seed_of(seed, "epoch", epoch), config.augment, device):
            images += some.unbind()
            targets += drawn.unbind()
            if len(images) >= size:
                yield torch.stack(images[:size]), torch.stack(targets[:size])
                del images[:size], targets[:size]
        epoch += 1


def between(
    parent: nn.Module,
    tuned: Mapping[str, Tensor],
    weight: float,
    images_NCHW: Tensor,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """theta_w, in eval mode, with its batch norm's statistics on the images."""
    network = copy.deepcopy(parent)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(tuned[name].to(tensor), weight)
    if moving_norms(network):
        images = images_NCHW.to(next(network.parameters()).device)
        blended(network, images, (1.0, 1.0, 1.0), check_cancelled)
    return network.eval()


class _Scale(nn.Module):
    """A factor per output channel of a convolution: SSF (Lian et al., 2022), shifted by bias or norm."""

    def __init__(self, weight: Tensor, axis: int) -> None:
        super().__init__()
        shape = [1] * weight.ndim
        shape[axis] = weight.shape[axis]
        self.factor = nn.Parameter(weight.new_ones(shape))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def _freeze_others(network: nn.Module, config: MasksConfig) -> None:
    """Leave gradients to what is trained. Raises AdaptationError where that is nothing."""
    trains = config.trains
    network.requires_grad_(trains in ("all", "scratch"))
    if trains == "head":
        for path in head_paths(network):
            network.get_submodule(path).requires_grad_(True)
    if trains in ("norms", "ssf"):
        for norm in batch_norms(network).values():
            norm.requires_grad_(True)
    if trains == "ssf":
        for layer in convolutions(network).values():
            if layer.bias is not None:
                layer.bias.requires_grad_(True)
            axis = 1 if isinstance(layer, TransposedConvolution) else 0
            parametrize.register_parametrization(layer, "weight", _Scale(layer.weight.detach(), axis))
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise AdaptationError(
            f"masks: trains={trains}, but the network has nothing of it; expected trains=all"
        )


def patient_dice(scans: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]], classes: int) -> float:
    """A patient's Dice: the mean over the classes that are there, with all scans as one volume.

    `scans` has the answer and the mask of each, class indices [H, W] or [I, J, K] on its own grid; places
    that the mask has IGNORED do not count. A patient without a target has 1 where nothing larger than a speck
    of a plane is found, else 0.
    """
    scans = [
        (np.where(drawn == IGNORED, np.uint8(0), answer), np.where(drawn == IGNORED, np.uint8(0), drawn))
        for answer, drawn in scans
    ]
    found, truth = (
        torch.from_numpy(np.concatenate([each[side].ravel(order="F") for each in scans])) for side in (0, 1)
    )
    if bool(truth.any()):
        return float(dice(found[None], truth[None], classes)[0, 1:].nanmean())
    share = sum(np.count_nonzero(answer) / math.prod(answer.shape[:2]) for answer, _ in scans)
    return float(share < MIN_COMPONENT)


def _about(parent: nn.Module, examples: LabelledSlices, config: MasksConfig) -> dict[str, Any]:
    return {
        **config.model_dump(mode="json"),
        "weights": digest(parent.state_dict()),
        "examples": digest({"images": examples.images, "targets": examples.targets}),
        "patients": list(examples.patients),
    }
