"""A member plays the hospital from outside: the dose adapts to its scans, its labels score the change.

Half of the patients are adapted to without labels and the other half is scored, in turn, as a hospital would
use a candidate. The scans are taken as they are and through drawn scanners (`personalization.scanner`), since
members are often alike and a hospital from outside need not be. What counts is the change as the gate of the
dose serves it.

Legend: N images, C channels, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.dose.auto import by_shift
from personalization.dose.playbook import Episode
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.scanner import Scanners
from personalization.seeds import seed_of

BATCH = 16


@dataclass(frozen=True)
class Practice:
    """What is practised.

    Attributes:
        severities: of the drawn scanners, one after the other; 0 are the scans as they are. A scanner of a
            severity above 0 is drawn, so a severity may come twice.
        most: images that are adapted to at most, evenly spaced.
    """

    severities: tuple[float, ...] = (0.0, 1.0, 1.0, 2.0, 2.0, 3.0)
    most: int = 64


# (a network, images [n, C, ...], their indices) -> the foreground Dice of every patient of these images, of
# what the service would answer; NaN without a target
Score = Callable[[nn.Module, Tensor, list[int]], Mapping[str, float]]


def practise(
    space: RoutingSpace,
    spread: Spread,
    images_NCHW: Tensor,
    patients: Sequence[str],
    score: Score,
    practice: Practice,
    seed: int,
    device: torch.device | None = None,
    check_cancelled: CancelCheck = never_cancelled,
) -> Iterator[Episode]:
    """The episodes of one member; deterministic. A member with one patient has no other half, and none.

    `spread` is how far the other members are apart. `patients` has each image's.
    """
    device = device or images_NCHW.device
    halves = _halves(patients)
    if halves is None:
        return
    for number, severity in enumerate(practice.severities):
        generator = torch.Generator().manual_seed(seed_of(seed, "scanner", number))
        images = _through(images_NCHW, severity, generator)
        changes: dict[str, float] = {}
        shifts = []
        for learned, scored in (halves, halves[::-1]):
            cohort = _evenly(learned, practice.most)
            made = by_shift(
                space,
                spread,
                None,
                images[cohort],
                [patients[index] for index in cohort],
                device,
                check_cancelled,
            )
            shifts.append(made.dose.shift)
            check_cancelled()
            networks = space.plain().to(device), made.adapted.merged
            before, after = (_defined(score(network, images[scored], scored)) for network in networks)
            changes |= {name: after[name] - before[name] if made.passed else 0.0 for name in before}
        yield Episode(severity, math.fsum(changes.values()) / len(changes), max(shifts))


def passes(practice: Practice, images: int) -> int:
    """Images that `practise` sends through the network, of a member with so many in halves of equal size.

    Some are fewer where the dose is 0, and some more where the scans are looked at in negative.
    """
    half = images // 2
    cohort = len(_evenly(list(range(half)), practice.most)) if half else 0
    return len(practice.severities) * 2 * (3 * cohort + 2 * half)


def _defined(dice: Mapping[str, float]) -> dict[str, float]:
    """1 of a patient without a target in whom none is found."""
    return {name: 1.0 if math.isnan(value) else value for name, value in dice.items()}


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
