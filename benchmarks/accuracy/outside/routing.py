"""The arms that route: learned on one set of scans, as learned and merged, reported on the same or another.

What is learned per image and what comes from the batch are separated:

                   batch norm of each batch      batch norm baked on what was learned from
    per image      (dynamic, test)               (dynamic, baked)   the dynamic graph
    mean           (mean, test)                  (merged)           one plain network: what is served

With direct coefficients the rows coincide, since they are the same for every image.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.accuracy.outside.arms import Arms, HeldOutHospital, Models, Turn, halves, rounded
from benchmarks.accuracy.outside.gate import Judge
from benchmarks.harness.evaluation import BATCH, Scans, mean_dice, predict
from personalization.iop_fl.batch_norm import recalibrate_statistics
from personalization.iop_fl.merge import mean_coefficients, merge
from personalization.iop_fl.network import route, with_coefficients
from personalization.iop_fl.routers import PooledRouter
from personalization.iop_fl.space import RoutingSpace
from personalization.test_time.adapt import Adaptation
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, space_for
from personalization.test_time.safety import SafetyLimits

_LIMITS = SafetyLimits()


@dataclass(frozen=True)
class Adapted:
    """A routed network at the epoch that the unsupervised loss chose, and the same merged."""

    routed: nn.Module
    merged: nn.Module
    coefficients_LE: Tensor
    adaptation: Adaptation
    diagnostic_dice: tuple[float, ...]


def learn(
    space: RoutingSpace,
    scans: Scans,
    config: AdaptationConfig,
    diagnosed: Scans | None = None,
    limits: SafetyLimits = _LIMITS,
) -> Adapted:
    """Route the space over these scans. The Dice of `diagnosed` is recorded per epoch and never used."""
    network = route(space, config.router)
    images = scans.images
    dice: list[float] = []

    def note(_checkpoint: AdaptationCheckpoint) -> None:
        if diagnosed is not None:
            dice.append(mean_dice(diagnosed.dice(predict(network, diagnosed.images))))

    adaptation = adapt(network, images, config, after_epoch=note, limits=limits)
    coefficients = mean_coefficients(network, images, BATCH)
    return Adapted(network, merge(space, network, images), coefficients, adaptation, tuple(dice))


def arms_of(space: RoutingSpace, adapted: Adapted, turn: Turn) -> Arms:
    """Dice per patient of the four ways to predict; of two where coefficients do not depend on the image."""
    networks = {"dynamic, test": adapted.routed, "merged": adapted.merged}
    if any(isinstance(module, PooledRouter) for module in adapted.routed.modules()):
        networks |= {
            "dynamic, baked": recalibrate_statistics(space, adapted.routed, turn.learned.images),
            "mean, test": with_coefficients(adapted.routed, adapted.coefficients_LE),
        }
    reported = turn.reported
    return {name: reported.dice(predict(network, reported.images)) for name, network in networks.items()}


def routing_arms(
    models: Models, judge: Judge, hospital: HeldOutHospital, config: AdaptationConfig
) -> dict[str, Any]:
    """A cell's result for one preset and router: Dice, the epochs, and the gate's verdict on each candidate.

    The transductive candidate's replicas are those of the halves. The inductive ones get theirs, which cost
    three adaptations each, only where no other check refuses them: the verdict is the same.
    """
    space, whole = space_for(config, models.space()), hospital.whole()
    name = f"routing {config.preset}" + (" pooled" if config.router == "pooled" else "")
    candidate = learn(space, whole.learned, config, whole.learned)
    transductive = arms_of(space, candidate, whole)
    inductive: Arms = {}
    parts, candidates = [], []
    for turn in hospital.turns():
        part = learn(space, turn.learned, config)
        parts.append(part)
        for arm, dice in arms_of(space, part, turn).items():
            inductive.setdefault(f"{name} ({arm})", {}).update(dice)
        record = judge.record(f"{name}, inductive", part.merged, [], turn)
        if record["verdict"]["passed"]:
            replicas = replicas_of(space, turn.learned, config)
            record = judge.record(f"{name}, inductive", part.merged, replicas, turn)
        candidates.append(record)
    replicas = [part.merged for part in parts]
    candidates.append(judge.record(f"{name}, transductive", candidate.merged, replicas, whole))
    return {
        "dice": {
            "transductive": rounded({f"{name} ({arm})": dice for arm, dice in transductive.items()}),
            "inductive": rounded(inductive),
        },
        "adaptations": [facts_of(adapted) for adapted in (candidate, *parts)],
        "gate": candidates,
        "diagnostic_dice_by_epoch": {name: [round(d, 4) for d in candidate.diagnostic_dice]},
    }


def replicas_of(
    space: RoutingSpace, scans: Scans, config: AdaptationConfig, limits: SafetyLimits = _LIMITS
) -> list[nn.Module]:
    """What the gate holds a candidate against: another seed, and each half of several patients."""
    ways = [(scans, other_seed(config))]
    if len(scans.patients) > 1:
        ways += [(scans.of(half), config) for half in halves(scans.patients, config.seed)]
    return [learn(space, some, settings, limits=limits).merged for some, settings in ways]


def other_seed(config: AdaptationConfig) -> AdaptationConfig:
    """The same with other noise."""
    return config.model_copy(update={"seed": config.seed + 1000})


def facts_of(adapted: Adapted) -> dict[str, Any]:
    """How an adaptation went: the losses, which epoch won, how it ended, and the mixture of each layer."""
    found = adapted.adaptation
    return {
        "best_epoch": found.best_epoch,
        "stopped": found.stopped,
        "fell_back": found.fell_back,
        "history": [
            {field: _short(value) for field, value in asdict(record).items()} for record in found.history
        ],
        "coefficients": [[round(float(r), 3) for r in row] for row in adapted.coefficients_LE],
    }


def _short(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
