"""A member plays the hospital from outside: the dose adapts to its scans, its labels score the change.

Half of the patients are adapted to without labels and the other half is scored, in turn, as a hospital would
use a candidate. The scans are taken as they are and through drawn scanners (`personalization.scanner`), since
members are often alike and a hospital from outside need not be. What counts is the change as the gate
serves it, a lens before the dose where the others know what their scans look like, of the answers that the
service would give: masks on each scan's own grid, of volumes by windows, or classes.

Legend: n images of one scan, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.dose.auto import by_shift
from personalization.dose.lensed import by_lens
from personalization.dose.playbook import Episode
from personalization.gate import ThroughLens
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


class Scans(Protocol):
    """The scans of a member."""

    @property
    def patients(self) -> Sequence[str]:
        """The patient of each image, or volume."""

    def take(self, indices: Sequence[int]) -> Self:
        """Some of them, in this order."""

    def changed_by(self, change: Change) -> Self:
        """The scans with other intensities; `change` gets the images [n, C, ...] of one scan at a time."""

    def met(self) -> Any:
        """Their `images` [N, C, ...], with `patients` of each, as a job sees a cohort."""


AnyScans = TypeVar("AnyScans", bound=Scans)
# Changes the images [n, C, ...] of one scan.
Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
# The lens of some scans, None where it has no step, and what its features say of them.
FitLens = Callable[[AnyScans], tuple[Change | None, ThroughLens]]
# What a network scores at some scans, by what the service would answer: the foreground Dice of every patient,
# NaN without a target, or of a classification the share of each class that is recognised.
Score = Callable[[nn.Module, AnyScans], Mapping[str, float]]


def practise(
    space: RoutingSpace,
    spread: Spread,
    scans: AnyScans,
    score: Score[AnyScans],
    practice: Practice,
    seed: int,
    device: torch.device,
    check_cancelled: CancelCheck = never_cancelled,
    fit_lens: FitLens[AnyScans] | None = None,
) -> Iterator[Episode]:
    """The episodes of one member; deterministic. A member with one patient has no other half, and none.

    `spread` is how far the other members are apart. With `fit_lens`, what is served is `by_lens`.
    """
    halves = _halves(scans.patients)
    if halves is None:
        return
    for number, severity in enumerate(practice.severities):
        generator = torch.Generator().manual_seed(seed_of(seed, "scanner", number))
        seen = scans.changed_by(_Through(severity, generator)) if severity else scans
        changes: dict[str, float] = {}
        shifts = []
        for half, (learned, scored) in enumerate((halves, halves[::-1])):
            own, others, plain = seen.take(learned), seen.take(scored), space.plain().to(device)
            images, patients = _cohort(own, practice.most)
            common = space, spread, None, images
            if fit_lens is None:
                dosed = by_shift(*common, patients, device, check_cancelled, practising=True)
                served, through = dosed.adapted.merged if dosed.passed else None, None
            else:
                change, features = fit_lens(own)
                lensed = None if change is None else _cohort(own.changed_by(change), practice.most)[0]
                made = by_lens(*common, lensed, patients, features, device, check_cancelled, practising=True)
                assert made.dosed is not None
                dosed, through = made.dosed, change if made.sees_through else None
                served = None if made.served == "nothing" else made.network or plain
            shifts.append(dosed.dose.shift)
            check_cancelled()
            before = _defined(score(plain, others))
            after = before
            if served is not None:
                after = _defined(score(served, others if through is None else others.changed_by(through)))
            changes |= {f"{half}/{name}": after[name] - before[name] for name in before}
        yield Episode(severity, math.fsum(changes.values()) / len(changes), max(shifts))


def passes(practice: Practice, images: int, answers: int, *, lensed: bool = False) -> int:
    """Images that `practise` sends through the network, in halves of equal size.

    The scans of the member give `images`, and are answered in so many passes.

    Some are fewer where the dose is 0 or a gate refuses, and some more where the scans are looked at in
    negative.
    """
    cohort = len(_evenly(range(images // 2), practice.most)) if images > 1 else 0
    # The dose of the scans as they are is made too where the lens has no licence.
    each = 5 if lensed else 3
    return len(practice.severities) * 2 * (each * cohort + 2 * (answers // 2))


def _cohort(scans: Scans, most: int) -> tuple[Tensor, list[str]]:
    """The images that a job sees, and the patient of each."""
    met = scans.met()
    used = _evenly(range(len(met.images)), most)
    return torch.from_numpy(met.images[used]), [met.patients[index] for index in used]


def _defined(scores: Mapping[str, float]) -> dict[str, float]:
    """1 of a patient without a target in whom none is found."""
    return {name: 1.0 if math.isnan(value) else value for name, value in scores.items()}


def _halves(patients: Sequence[str]) -> tuple[list[int], list[int]] | None:
    """Indices of the images of every other patient, and of the others."""
    order = {patient: index for index, patient in enumerate(dict.fromkeys(patients))}
    if len(order) < 2:
        return None
    first = [index for index, patient in enumerate(patients) if order[patient] % 2 == 0]
    second = [index for index, patient in enumerate(patients) if order[patient] % 2]
    return first, second


def _evenly(indices: range, most: int) -> list[int]:
    return [*indices[:: math.ceil(len(indices) / most)]]


class _Through:
    """Shows all scans through one scanner, which is drawn at the first of them."""

    def __init__(self, severity: float, generator: torch.Generator) -> None:
        self._severity, self._generator = torch.tensor([severity]), generator
        self._scanner: Scanners | None = None

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._scanner is None:
            self._scanner = Scanners.draw(self._severity, self._generator, images.ndim - 2).repeated(BATCH)
        parts = [
            self._scanner.first(len(batch)).apply(batch, self._generator)
            for batch in torch.split(torch.from_numpy(images), BATCH)
        ]
        return torch.cat(parts).numpy()
