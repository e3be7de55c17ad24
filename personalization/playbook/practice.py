"""A member plays the hospital from outside: recipes adapt to its scans, its labels score the change.

Half of the patients are adapted to without labels and the other half is scored, in turn, as a hospital would
use a candidate. The scans are taken as they are and through drawn scanners (`personalization.scanner`), since
members are often alike and a hospital from outside need not be.

Legend: N images, C channels, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.space import RoutingSpace
from personalization.metrics import foreground_dice
from personalization.playbook.features import Features, features_of, view
from personalization.scanner import Scanners
from personalization.seeds import seed_of
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import recipe_of

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
    """

    trials: tuple[Trial, ...]
    severities: tuple[float, ...] = (0.0, 1.0, 2.0)
    most: int = 64


@dataclass(frozen=True)
class Episode:
    """One recipe at one member behind one scanner: aggregates over patients, and features of the cohort.

    `change` is the mean over the patients of their Dice minus that of the global model, `spread` its standard
    deviation, `patients` how many there are; `worse` and `much_worse` the shares of them that lose more than
    a point, and five.
    """

    trial: str
    severity: float
    change: float
    spread: float
    patients: int
    worse: float
    much_worse: float
    features: Features


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
) -> Iterator[Episode]:
    """The episodes of one member; deterministic. A member with one patient has no other half, and none.

    `share` is the share of pixels that are a target at the other members.
    """
    device = device or images_NCHW.device
    halves = _halves(patients)
    if halves is None:
        return
    classes = int(space.arguments["classes"])
    for number, severity in enumerate(practice.severities):
        generator = torch.Generator().manual_seed(seed_of(seed, "scanner", number))
        images = _through(images_NCHW, severity, generator)
        changes: dict[str, dict[str, float]] = {trial.name: {} for trial in practice.trials}
        found: dict[str, list[Features]] = {trial.name: [] for trial in practice.trials}
        for learned, scored in (halves, halves[::-1]):
            cohort = images[_evenly(learned, practice.most)].to(device)
            reported, truth = images[scored].to(device), targets_NHW[scored]
            names = [patients[index] for index in scored]
            parent = space.plain().to(device).eval()
            before_here = view(parent, cohort, check_cancelled, shift=True)
            before = _dice(parent, reported, truth, names, classes, check_cancelled)
            for trial in practice.trials:
                config = trial.config.model_copy(update={"target_share": share or None})
                adapted = recipe_of(config.preset).adapt(space, cohort, config, device, check_cancelled)
                after_here = view(adapted.merged, cohort, check_cancelled)
                found[trial.name].append(features_of(before_here, after_here, share))
                after = _dice(adapted.merged, reported, truth, names, classes, check_cancelled)
                changes[trial.name] |= {patient: after[patient] - before[patient] for patient in before}
        for trial in practice.trials:
            yield _episode(trial.name, severity, list(changes[trial.name].values()), found[trial.name])


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


def _dice(
    network: nn.Module,
    images: Tensor,
    truth: Tensor,
    names: Sequence[str],
    classes: int,
    check_cancelled: CancelCheck,
) -> dict[str, float]:
    """Foreground Dice of every patient; 1 where there is no target and none is found."""
    found = view(network, images, check_cancelled).maps
    dice = foreground_dice(found, truth, names, classes)
    return {patient: 1.0 if math.isnan(value) else value for patient, value in dice.items()}


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
