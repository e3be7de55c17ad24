"""What an outside hospital could use without routing: the federation's models as they are, and Tent.

Legend: N slices, C channels, K classes, H and W height and width. *Running*: batch norm with the statistics
of training; *test*: with those of each batch of the hospital's own scans (Nado et al. 2020); *baked*: with
those of its whole cohort, taken once (AdaBN, Li et al. 2016), so that one slice and a batch agree.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.harness.evaluation import BATCH, Scans, mean_dice, predict
from model_store.manifest import NetworkSpec
from personalization.iop_fl.batch_norm import PRIOR_IMAGES, bake_statistics
from personalization.iop_fl.layers import use_batch_statistics
from personalization.iop_fl.network import route
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.state import State, StreamingMean
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import WeightedSum
from personalization.test_time.recipe import adapt, objective_of, space_for
from personalization.test_time.safety import SafetyLimits
from training.methods.common.local_training import network_of

NO_LIMITS = SafetyLimits(
    agreement=0, collapse=0, explosion=math.inf, room=1, divergence=math.inf, slack=math.inf
)

# arm -> patient -> Dice
Arms: TypeAlias = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Models:
    """What the federation published: `states` by site, and the global one, last."""

    spec: NetworkSpec
    states: Mapping[str, State]
    device: torch.device

    def space(self) -> RoutingSpace:
        """The same, to be routed over."""
        inside = {name: state for name, state in self.states.items() if name != GLOBAL}
        return RoutingSpace.of(self.spec.name, self.spec.arguments, inside, self.states[GLOBAL])

    def network(self, name: str = GLOBAL) -> nn.Module:
        """One of the models, with a copy of its weights."""
        return network_of(self.spec, self.states[name], self.device)

    def average(self) -> nn.Module:
        """Everything averaged, each model counting once."""
        mean = StreamingMean()
        for name, state in self.states.items():
            mean.add(state, 1.0, name)
        return network_of(self.spec, mean.result(), self.device)

    def uniform(self) -> nn.Module:
        """Where routing starts: convolutions averaged, batch norm the global model's."""
        network = self.average()
        norms = dict(norms_of(self.network()))
        for name, norm in norms_of(network):
            norm.load_state_dict(norms[name].state_dict())
        return network


def norms_of(network: nn.Module) -> list[tuple[str, nn.BatchNorm2d]]:
    """Its batch-norm layers by name."""
    return [(name, m) for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)]


def with_test_statistics(network: nn.Module) -> nn.Module:
    """A copy with batch norm on each batch's own statistics, in either mode."""
    changed = copy.deepcopy(network)
    use_batch_statistics(changed)
    return changed


def unadapted(models: Models, scans: Scans) -> dict[str, dict[str, float]]:
    """Dice per patient of every arm that learns nothing from the hospital's scans."""
    average = models.average()
    dice = {
        "average (running)": scans.dice(predict(average, scans.images)),
        "average (test)": scans.dice(predict(with_test_statistics(average), scans.images)),
        "uniform (test)": scans.dice(predict(with_test_statistics(models.uniform()), scans.images)),
    }
    sums: dict[str, Tensor] = {}
    for name in models.states:
        network = models.network(name)
        label = name if name == GLOBAL else f"single {name}"
        for statistics, used in (("running", network), ("test", with_test_statistics(network))):
            found = predict(used, scans.images)
            sums[statistics] = sums[statistics] + found if statistics in sums else found
            dice[f"{label} ({statistics})"] = scans.dice(found)
    count = len(models.states)
    return dice | {f"ensemble ({s})": scans.dice(total / count) for s, total in sums.items()}


@dataclass(frozen=True)
class TentResult:
    """The network of the epoch with the lowest entropy, that epoch (0: as it was), and the entropies.

    The network is routed over the global model alone, and uses the statistics of each batch.
    """

    network: nn.Module
    best_epoch: int
    entropies: tuple[float, ...]
    diagnostic_dice: tuple[float, ...]


class _ShuffledTent(WeightedSum):
    """Preset `tent` on batches that are drawn again for every epoch, as the recorded rows have it."""

    def epoch_batches(self, count: int, config: AdaptationConfig, epoch: int) -> Sequence[Tensor]:
        """In random order, the last batch with what is left."""
        generator = torch.Generator().manual_seed(config.seed + epoch)
        return torch.split(torch.randperm(count, generator=generator), config.batch_size)


def tent(models: Models, scans: Scans, epochs: int, seed: int, diagnosed: Scans | None = None) -> TentResult:
    """Tent (Wang et al. 2021) from the global model: the preset, on shuffled batches and without a guard.

    Adam at 1e-3, as for the batch norm of routing. The epoch is chosen as routing's is, by the loss over all
    slices after it. `diagnosed` are scans with labels: their mean Dice is recorded per epoch and not used.
    """
    config = AdaptationConfig(preset="tent", epochs=epochs, batch_size=BATCH, seed=seed)
    network = route(space_for(config, models.space())).to(models.device)
    dice: list[float] = []

    def diagnose(_checkpoint: AdaptationCheckpoint) -> None:
        if diagnosed is not None:
            dice.append(mean_dice(diagnosed.dice(predict(network, diagnosed.images))))

    tent_objective = objective_of("tent")
    assert isinstance(tent_objective, WeightedSum)
    objective = _ShuffledTent(tent_objective.weights(config))
    found = adapt(
        network,
        scans.images.to(models.device),
        config,
        after_epoch=diagnose,
        limits=NO_LIMITS,
        objective=objective,
    )
    entropies = tuple(math.nan if record.entropy is None else record.entropy for record in found.history)
    return TentResult(network, found.best_epoch, entropies, tuple(dice))


def halves(patients: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two disjoint halves of the patients, drawn from the seed; the first is the larger of an odd number."""
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [sorted(patients)[i] for i in order]
    middle = (len(drawn) + 1) // 2
    return tuple(sorted(drawn[:middle])), tuple(sorted(drawn[middle:]))


@dataclass(frozen=True)
class Turn:
    """What is learned from, and what is reported."""

    learned: Scans
    reported: Scans


@dataclass(frozen=True)
class HeldOutHospital:
    """The site left out: all its scans, and the halves of its patients for the inductive comparison.

    At most about `most` slices are learned from at a time; all are reported.
    """

    scans: Scans
    halves: tuple[Scans, Scans]
    most: int

    @classmethod
    def of(cls, scans: Scans, seed: int, most: int) -> HeldOutHospital:
        """Halves drawn from the seed."""
        first, second = halves(scans.patients, seed)
        return cls(scans, (scans.of(first), scans.of(second)), most)

    def whole(self) -> Turn:
        """Transductive: learned from all patients, who are reported."""
        return Turn(self.scans.thinned(self.most), self.scans)

    def turns(self) -> tuple[Turn, Turn]:
        """Inductive: each half to learn from, with the other to report."""
        first, second = self.halves
        return Turn(first.thinned(self.most), second), Turn(second.thinned(self.most), first)


def plain_arms(models: Models, hospital: HeldOutHospital, epochs: int, seed: int) -> dict[str, Any]:
    """A cell's result for all arms without routing: those that learn nothing, baked batch norm, Tent."""
    whole = hospital.whole()
    tented = tent(models, whole.learned, epochs, seed, whole.learned)
    transductive = {
        "global (baked)": _dice(baked(models, models.network(), whole.learned), whole.reported),
        "tent": _dice(tented.network, whole.reported),
    }
    inductive: Arms = {"global (baked)": {}, "tent": {}}
    for turn in hospital.turns():
        own = baked(models, models.network(), turn.learned)
        inductive["global (baked)"] |= _dice(own, turn.reported)
        inductive["tent"] |= _dice(tent(models, turn.learned, epochs, seed).network, turn.reported)
    return {
        "dice": {
            "unadapted": rounded(unadapted(models, hospital.scans)),
            "transductive": rounded(transductive),
            "inductive": rounded(inductive),
        },
        "tent": {"best_epoch": tented.best_epoch, "entropies": [round(e, 6) for e in tented.entropies]},
        "diagnostic_dice_by_epoch": {"tent": [round(d, 4) for d in tented.diagnostic_dice]},
    }


def _dice(network: nn.Module, scans: Scans) -> dict[str, float]:
    return scans.dice(predict(network, scans.images))


def baked(models: Models, network: nn.Module, scans: Scans, prior: str = GLOBAL) -> nn.Module:
    """The network, in place, with its statistics taken from these scans as merging takes them.

    They are drawn towards those that the model named `prior` has from training, the more the fewer scans.
    """
    return bake_statistics(network, scans.images, BATCH, models.states[prior], prior_images=PRIOR_IMAGES)


def rounded(arms: Arms) -> dict[str, dict[str, float | None]]:
    """As rows have it: an undefined Dice is None."""
    return {
        arm: {patient: None if math.isnan(d) else round(d, 6) for patient, d in dice.items()}
        for arm, dice in arms.items()
    }
