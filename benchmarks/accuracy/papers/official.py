"""The official protocol, a diagnostic: the published loss, scored as IOP-FL's published code scores itself.

Labels choose what is scored and when, so its figures are no evidence for what Locum serves:

- only slices with a target in their label, at the network's resolution;
- batches of five neighbouring slices, in the order of the cases;
- each batch is stepped on and then scored at once, in train mode: with its own statistics in batch norm,
  and dropout in the routers;
- Dice per slice, mean over the classes with the background, averaged over slices;
- ten epochs, of which the one with the highest such Dice is reported.

The routers are the published ones too: pooled, with PyTorch's initial weights, at a rate of 0.001. The
published code leaves those of the bottleneck as they are, which preset `as-published` does too; with preset
`official` they are learned.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.evaluation import Scans
from model_store.preprocessing import prepare_mask
from model_store.task import Task
from personalization.cancellation import never_cancelled
from personalization.iop_fl.layers import use_batch_statistics
from personalization.iop_fl.network import route
from personalization.iop_fl.space import RoutingSpace
from personalization.metrics import dice
from personalization.state import State
from personalization.test_time.adapt import learn, routing
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, LossWeights, WeightedSum
from personalization.test_time.presets.official import Official
from personalization.test_time.recipe import objective_of, recipe_of
from personalization.test_time.safety import SafetyLimits
from training.data.cases import Case
from training.data.scan_files import mask_of

BATCH = 5
EPOCHS = 10
DROPOUT = 0.2
# Batches that are scored at most: 200 slices.
MOST_BATCHES = 40
CPU = torch.device("cpu")
NO_LIMITS = SafetyLimits(
    agreement=0, collapse=0, explosion=math.inf, room=1, divergence=math.inf, slack=math.inf
)


class Score(NamedTuple):
    """Mean over slices of their Dice, over all classes and over the targets alone."""

    with_background: float
    foreground: float

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Score:
        """The mean over the slices of `_dice_of_slices`, batch by batch."""
        with_background, foreground = torch.cat([*parts]).mean(dim=0).tolist()
        return cls(with_background, foreground)

    def rounded(self) -> list[float]:
        """As rows have it."""
        return [round(value, 5) for value in self]


@dataclass(frozen=True)
class TargetSlices:
    """Slices [N, C, H, W] with a target, and their classes [N, H, W] at the network's resolution."""

    images: Tensor
    truth: Tensor
    classes: int

    @classmethod
    def of(cls, cases: Sequence[Case], scans: Scans, task: Task) -> TargetSlices:
        """Those of the cases that `scans` was loaded from, at most `MOST_BATCHES` evenly spaced batches."""
        masks = [
            torch.from_numpy(prepare_mask(mask_of(case), task, scan.geometry))
            for case, scan in zip(cases, scans.scans, strict=True)
        ]
        truth = torch.cat(masks)
        with_target = truth.flatten(1).any(dim=1).nonzero().flatten()
        kept = with_target[evenly_spaced(len(with_target))]
        return cls(scans.images[kept], truth[kept], scans.classes)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and classes of neighbours, the last batch with what is left."""
        return zip(torch.split(self.images, BATCH), torch.split(self.truth, BATCH), strict=True)


@dataclass(frozen=True)
class OfficialResult:
    """`row` has the scores, `network` is routed, as it was after the epoch that the labels choose."""

    row: dict[str, Any]
    network: nn.Module
    config: AdaptationConfig

    def merged(self, space: RoutingSpace, images_NCHW: Tensor) -> nn.Module:
        """The plain network that Locum would serve of it, with batch norm's statistics of these images."""
        images = images_NCHW.to(_device_of(self.network))
        return recipe_of(self.config.preset).merged(space, self.network, images, self.config, never_cancelled)


def by_official_protocol(
    space: RoutingSpace,
    slices: TargetSlices,
    seed: int,
    preset: Literal["official", "as-published"] = "official",
    device: torch.device = CPU,
) -> OfficialResult:
    """Adapt and score on `device`. A score is `[Dice with background, foreground Dice]`; the row's keys are

    - `slices`: their number;
    - `models`: the number of models that are mixed: the global one, and those of members who kept their own;
    - `running`, `batch`: scores of the global model, with the statistics of training and of each batch;
    - `start`: score of the routed network before any step;
    - `epochs`: a score per epoch, each batch scored right after the step on it;
    - `best`: number of the epoch with the highest Dice with background, from 1;
    - `by_loss`: number of the epoch that Locum's loop chooses without labels, 0 for before any step.
    """
    config = AdaptationConfig(preset=preset, router="pooled", epochs=EPOCHS, batch_size=BATCH, seed=seed)
    published = objective_of(config.preset)
    assert isinstance(published, WeightedSum)
    objective = _ScoredAfterStep(published.weights(config), slices)
    if preset == "official":
        network = route(space, "pooled", "official", DROPOUT, torch.Generator().manual_seed(seed)).to(device)
        learning = routing(network, config, objective)
    else:
        found = recipe_of(preset).learning(space, slices.images.to(device), config, never_cancelled)
        assert found is not None
        learning, network = replace(found, objective=objective), found.network
    start = score_of(network.train(), slices)
    epochs: list[Score] = []
    states: list[State] = []

    def note(checkpoint: AdaptationCheckpoint) -> None:
        if checkpoint.epoch:
            epochs.append(objective.taken())
            states.append(checkpoint.state)

    adaptation = learn(learning, slices.images, config, after_epoch=note, limits=NO_LIMITS)
    best = max(range(len(epochs)), key=lambda index: epochs[index].with_background)
    # A checkpoint has what was learned: routers that were left out are as they were drawn.
    network.load_state_dict({**network.state_dict(), **states[best]})
    plain = space.plain().to(device)
    row = {
        "slices": len(slices.images),
        "models": len(space.names),
        "running": score_of(plain.eval(), slices).rounded(),
        "batch": score_of(with_test_statistics(plain), slices).rounded(),
        "start": start.rounded(),
        "epochs": [score.rounded() for score in epochs],
        "best": best + 1,
        "by_loss": adaptation.best_epoch,
    }
    return OfficialResult(row, network.eval(), config)


def with_test_statistics(network: nn.Module) -> nn.Module:
    """A copy with batch norm on each batch's own statistics, in either mode."""
    changed = copy.deepcopy(network)
    use_batch_statistics(changed)
    return changed


def evenly_spaced(count: int) -> Tensor:
    """Indices of the slices of at most `MOST_BATCHES` batches, of `count` slices in a row."""
    batches = torch.split(torch.arange(count), BATCH)
    number = min(len(batches), MOST_BATCHES)
    return torch.cat([batches[index * len(batches) // number] for index in range(number)])


class _ScoredAfterStep(Official):
    """The published objective; every batch is scored right after the step on it, in the mode of the step."""

    def __init__(self, weights: LossWeights, slices: TargetSlices) -> None:
        super().__init__(weights)
        self._slices = slices
        self._parts: list[Tensor] = []

    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        """The published step, then the score."""
        loss = super().step(network, batch, config, optimiser, seed)
        truth = self._slices.truth[batch.indices]
        self._parts.append(_dice_of_slices(network, batch.images, truth, self._slices.classes))
        return loss

    def taken(self) -> Score:
        """The score since the last call."""
        score, self._parts = Score.of(self._parts), []
        return score


def score_of(network: nn.Module, slices: TargetSlices) -> Score:
    """A network's score on the slices, in batches of neighbours, on the network's device."""
    return Score.of(
        [_dice_of_slices(network, images, truth, slices.classes) for images, truth in slices.batches()]
    )


@torch.no_grad()
def _dice_of_slices(network: nn.Module, images_BCHW: Tensor, truth_BHW: Tensor, classes: int) -> Tensor:
    """[B, 2]: of each slice the fields of a score. A class in neither counts 0, as in the published code."""
    predicted = network(images_BCHW.to(_device_of(network))).argmax(dim=1)
    found_BK = dice(predicted, truth_BHW.to(predicted.device), classes, empty="zero")
    return torch.stack([found_BK.mean(dim=1), found_BK[:, 1:].mean(dim=1)], dim=1)


def _device_of(network: nn.Module) -> torch.device:
    return next(network.parameters()).device
