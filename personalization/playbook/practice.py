"""A member plays the hospital from outside: recipes adapt to its scans, its labels score the change.

Half of the patients are adapted to without labels and the other half is scored, in turn, as a hospital would
use a candidate. The scans are taken as they are and through drawn scanners (`personalization.scanner`), since
members are often alike and a hospital from outside need not be.

Where it is known how far the other members are apart, the dose by shift is practised too, as its gate serves
it. Damage is planted among the episodes, in forward passes alone, so that a gate has seen some.

Legend: N images, C channels, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.metrics import foreground_dice
from personalization.networks.capabilities import batch_norms, convolutions, moving_norms
from personalization.playbook.dose import ByShift, by_shift
from personalization.playbook.features import Features, View, features_of, view
from personalization.scanner import Scanners
from personalization.seeds import seed_of
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import blended
from personalization.test_time.recipe import recipe_of

# Names of the episodes of the dose by shift, and of planted damage.
BY_SHIFT, PLANTED = "by shift", "planted, "
# How far a hundred times the usual rate moves batch norm's scale and shift in four steps.
_WRECKED = 0.4
# One point of Dice, and five: a patient that loses more is counted.
POINT, FIVE_POINTS = -0.01, -0.05


@dataclass(frozen=True)
class Trial:
    """A recipe with its settings, by the name that the playbook has it under.

    `after` names the trial with the next smaller dose, which must be accepted before this one.
    """

    name: str
    config: AdaptationConfig
    after: str | None = None


@dataclass(frozen=True)
class Practice:
    """What is practised.

    Attributes:
        trials: the recipes.
        severities: of the drawn scanners, one after the other; 0 are the scans as they are.
        most: images that are adapted to at most, evenly spaced.
        damage: behind every so many scanners damage is planted; 0: nowhere.
    """

    trials: tuple[Trial, ...]
    severities: tuple[float, ...] = (0.0, 1.0, 2.0)
    most: int = 64
    damage: int = 3


@dataclass(frozen=True)
class Episode:
    """One recipe at one member behind one scanner: aggregates over patients, and features of the cohort.

    `change` is the mean over the patients of their Dice minus that of the global model, `spread` its standard
    deviation, `patients` how many there are; `worse` and `much_worse` the shares of them that lose more than
    a point, and five. For the dose by shift, and planted damage in its place, `served` is the change as its
    gate serves it, none where it refuses, and `shift` the largest of the cohorts.
    """

    trial: str
    severity: float
    change: float
    spread: float
    patients: int
    worse: float
    much_worse: float
    features: Features
    served: float | None = None
    shift: float | None = None


def practise(
    space: RoutingSpace,
    images_NCHW: Tensor,
    targets_NHW: Tensor,
    patients: Sequence[str],
    practice: Practice,
    share: float,
    seed: int,
    device: torch.device | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    spread: Spread | None = None,
) -> Iterator[Episode]:
    """The episodes of one member; deterministic. A member with one patient has no other half, and none.

    `share` is the share of pixels that are a target at the other members, `spread` how far they are apart;
    without it the dose by shift is not practised.
    """
    device = device or images_NCHW.device
    halves = _halves(patients)
    if halves is None:
        return
    classes = int(space.arguments["classes"])
    for number, severity in enumerate(practice.severities):
        generator = torch.Generator().manual_seed(seed_of(seed, "scanner", number))
        images = _through(images_NCHW, severity, generator)
        tried: dict[str, _Tried] = {}
        for turn, (learned, scored) in enumerate((halves, halves[::-1])):
            chosen = _evenly(learned, practice.most)
            cohort, own = images[chosen].to(device), [patients[index] for index in chosen]
            reported = _Reported(
                images[scored].to(device),
                targets_NHW[scored],
                [patients[index] for index in scored],
                classes,
                check_cancelled,
            )
            parent = space.plain().to(device).eval()
            before = reported.dice(parent)
            dose = None
            if spread is not None:
                dose = by_shift(space, spread, None, cohort, own, device, check_cancelled)
            seen = view(parent, cohort, check_cancelled, shift=True) if dose is None else dose.parent
            candidates = _candidates(space, cohort, practice, share, device, check_cancelled)
            for name, network, found, where in chain(
                candidates,
                [(BY_SHIFT, dose.adapted.merged, dose.candidate, dose)] if dose is not None else [],
                _planted(space, cohort, own, dose, generator, check_cancelled)
                if practice.damage and number % practice.damage == 0 and turn == 0
                else [],
            ):
                after = reported.dice(network)
                changes = {patient: after[patient] - before[patient] for patient in before}
                each = tried.setdefault(name, _Tried())
                each.changes |= changes
                each.features.append(features_of(seen, found, share))
                if where is not None:
                    passed = replace(where, candidate=found).passed
                    each.served |= changes if passed else dict.fromkeys(changes, 0.0)
                    each.shifts.append(where.dose.shift)
        for name, each in tried.items():
            yield each.episode(name, severity)


# Name, network, its view of the cohort, and the dose in place of which the gate judges it, if it does.
_Candidate = tuple[str, nn.Module, View, ByShift | None]


def passes(practice: Practice, images: int, *, shifted: bool) -> int:
    """Images that `practise` sends through the network, of a member with so many in halves of equal size.

    The count is exact but for the dose by shift, of which the number of passes depends on what it finds.
    """
    half = images // 2
    cohort = len(_evenly(list(range(half)), practice.most)) if half else 0
    trials = len(practice.trials)
    # A view of the cohort and, for each recipe, its adaptation and another; the scores of all of these.
    turn = cohort * (1 + 2 * trials) + half * (1 + trials)
    if shifted:
        turn += 2 * cohort + half
    damaged = math.ceil(len(practice.severities) / practice.damage) if practice.damage else 0
    return len(practice.severities) * 2 * turn + damaged * (6 * cohort + 4 * half)


def _candidates(
    space: RoutingSpace,
    cohort: Tensor,
    practice: Practice,
    share: float,
    device: torch.device,
    check_cancelled: CancelCheck,
) -> Iterator[_Candidate]:
    """The recipes on a cohort."""
    for trial in practice.trials:
        config = trial.config.model_copy(update={"target_share": share or None})
        adapted = recipe_of(config.preset).adapt(space, cohort, config, device, check_cancelled)
        yield trial.name, adapted.merged, view(adapted.merged, cohort, check_cancelled), None


def _planted(
    space: RoutingSpace,
    cohort: Tensor,
    patients: Sequence[str],
    dose: ByShift | None,
    generator: torch.Generator,
    check_cancelled: CancelCheck,
) -> Iterator[_Candidate]:
    """The damage, in the place of the dose."""
    for kind, bad in damaged(space, cohort, generator, check_cancelled):
        seen = view(bad, cohort, check_cancelled, patients=None if dose is None else patients)
        yield PLANTED + kind, bad, seen, dose


@dataclass(frozen=True)
class _Reported:
    """The half that is scored."""

    images: Tensor
    truth: Tensor
    names: Sequence[str]
    classes: int
    check_cancelled: CancelCheck

    def dice(self, network: nn.Module) -> dict[str, float]:
        """Foreground Dice of every patient; 1 where there is no target and none is found."""
        found = view(network, self.images, self.check_cancelled).maps
        dice = foreground_dice(found, self.truth, self.names, self.classes)
        return {patient: 1.0 if math.isnan(value) else value for patient, value in dice.items()}


@dataclass
class _Tried:
    """What one recipe did in both halves, by patient, and what was seen of it."""

    changes: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    features: list[Features] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)

    def episode(self, name: str, severity: float) -> Episode:
        found = _episode(name, severity, list(self.changes.values()), self.features)
        if not self.shifts:
            return found
        served = math.fsum(self.served.values()) / len(self.served)
        return replace(found, served=served, shift=max(self.shifts))


def damaged(
    space: RoutingSpace,
    images_NCHW: Tensor,
    generator: torch.Generator,
    check_cancelled: CancelCheck = never_cancelled,
) -> Iterator[tuple[str, nn.Module]]:
    """Candidates that are bad on purpose, with their kind: statistics of noise and of inverted scans, a layer
    with its weights in random order, and batch norm as a hundred times the usual rate leaves it."""

    def plain() -> nn.Module:
        return space.plain().to(images_NCHW.device).eval()

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=generator).to(images_NCHW)

    noise = torch.randn(images_NCHW.shape, generator=generator).to(images_NCHW)
    if moving_norms(space.outline()):
        yield "statistics of noise", blended(plain(), noise, (1.0, 1.0, 1.0), check_cancelled)
        inverted = blended(plain(), -images_NCHW, (1.0, 1.0, 1.0), check_cancelled)
        yield "statistics of inverted scans", inverted
    shuffled = plain()
    layers = list(convolutions(shuffled).values())
    weights = layers[len(layers) // 2].weight
    order = torch.randperm(weights.numel(), generator=generator).to(weights.device)
    with torch.no_grad():
        weights.copy_(weights.flatten()[order].view_as(weights))
    yield "one layer shuffled", shuffled
    wrecked = plain()
    with torch.no_grad():
        for norm in batch_norms(wrecked).values():
            for parameter in norm.parameters():
                parameter.add_(_WRECKED * (2 * drawn(parameter.shape) - 1))
    if batch_norms(wrecked):
        yield "rate x100", wrecked


def _halves(patients: Sequence[str]) -> tuple[list[int], list[int]] | None:
    """Indices of the images of every other patient, and of the others."""
    order = {patient: index for index, patient in enumerate(dict.fromkeys(patients))}
    if len(order) < 2:
        return None
    first = [index for index, patient in enumerate(patients) if order[patient] % 2 == 0]
    second = [index for index, patient in enumerate(patients) if order[patient] % 2]
    return first, second


def _evenly(indices: list[int], most: int) -> list[int]:
    return indices[:: math.ceil(len(indices) / most)]


def _through(images_NCHW: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """All images through one drawn scanner."""
    if not severity:
        return images_NCHW
    scanner = Scanners.draw(torch.tensor([severity]), generator, images_NCHW.ndim - 2).repeated(BATCH)
    parts = []
    for batch in torch.split(images_NCHW, BATCH):
        parts.append(scanner.first(len(batch)).apply(batch, generator))
    return torch.cat(parts)


BATCH = 16


def _episode(trial: str, severity: float, changes: list[float], features: list[Features]) -> Episode:
    count = len(changes)
    mean = math.fsum(changes) / count
    spread = math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / max(count - 1, 1))
    columns = zip(*(each.values() for each in features), strict=True)
    return Episode(
        trial,
        severity,
        mean,
        spread,
        count,
        sum(change < POINT for change in changes) / count,
        sum(change < FIVE_POINTS for change in changes) / count,
        Features(*(sum(column) / len(column) for column in columns)),
    )
