"""What `auto` serves: the dose that the shift of a hospital's scans asks for, and the gate's verdict on it.

The members' moments are enough (`personalization.iop_fl.spread`). What they practised adds a cap and a
licence.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.dose.playbook import Playbook, ShiftRecord
from personalization.dose.view import View, size_gain, view
from personalization.gate import (
    BY_SHIFT,
    BY_SHIFT_WITHOUT_MASKS,
    GateVerdict,
    ObservedClasses,
    ObservedDose,
    Shifted,
    Targets,
    judge,
)
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import Dose, dose_by_shift, mirrored
from personalization.test_time.recipe import Adapted, recipe_of

# Stands for the largest shift that was practised where nothing was, so that the limit is R = 60: phantoms had
# no more behind the strongest drawn scanners. Members practise little, so twice their largest is allowed.
UNPRACTISED = 30.0
# Nearer scans are not looked at in negative. Of phantoms 148 of 160 inverted cohorts are at least as far; of
# X-rays with a shift of 4, some are nearer in negative and are not inverted.
FAR = 4.0


@dataclass(frozen=True)
class ByShift:
    """A dose by shift at a hospital, and what the networks with and without it say of the scans.

    Attributes:
        dose: that the shift asks for; 0 is an answer, that the scans look like the members'.
        spread: how far the members are apart.
        config: the recipe `ladder` with these doses, which repeats it.
        adapted: its candidate, the global model where the dose is 0.
        parent, candidate: views of the global model and of the candidate, with profiles.
        patients: of every image.
        classes: how many there are, background included.
        targets: of the members, as far as they are known.
        record: what the members practised; None: they did not practise it.
        negative: how many times farther the scans are than in negative (`mirrored`); None: they are too near
            to be inverted.
        mistaken: share of the scans that no training scan resembles in kind.
        practising: a member practises it now, so that a classifier needs no licence.
    """

    dose: Dose
    spread: Spread
    config: AdaptationConfig
    adapted: Adapted
    parent: View
    candidate: View
    patients: tuple[Hashable, ...]
    classes: int
    targets: Targets
    record: ShiftRecord | None
    negative: float | None = None
    mistaken: float = 0.0
    practising: bool = False

    @cached_property
    def verdict(self) -> GateVerdict:
        """By the gate for a bounded recipe in closed form. Costs no forward pass."""
        record, moves = self.record, self.dose.share > 0
        candidate, parent = self.candidate, self.parent
        assert candidate.profile is not None
        shifted = Shifted(
            beyond=self.dose.shift / (UNPRACTISED if record is None else record.largest),
            left=dose_by_shift(candidate.profile, self.spread).shift / self.dose.shift,
            lost=record.lost if record is not None and moves else None,
            negative=self.negative,
            mistaken=self.mistaken,
        )
        if candidate.maps.ndim == 1:
            licensed = record is not None or not moves or self.practising
            classes = ObservedClasses(candidate.maps, parent.maps, self.classes, shifted, licensed=licensed)
            return judge(BY_SHIFT_WITHOUT_MASKS, classes)
        dose = ObservedDose(
            candidate.maps,
            parent.maps,
            np.unique([str(each) for each in self.patients], return_inverse=True)[1],
            self.classes,
            self.targets,
            shifted,
            size_gain(parent, candidate, self.targets.share, self.spread.size),
        )
        return judge(BY_SHIFT, dose)

    @property
    def passed(self) -> bool:
        """Whether the candidate may be assigned."""
        return self.verdict.passed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that it does not pass."""
        return tuple(result.name for result in self.verdict.checks if not result.passed)


def by_shift(
    space: RoutingSpace,
    spread: Spread,
    playbook: Playbook | None,
    images_NCHW: Tensor,
    patients: Sequence[Hashable],
    device: torch.device | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    mistaken: float = 0.0,
    *,
    practising: bool = False,
) -> ByShift:
    """The dose by shift for images [N, C, H, W]; `patients` has that of every image. Deterministic.

    `mistaken` is the share of the scans of which the guard says that they are of another kind; `practising`
    says that a member practises.

    Costs three forward passes: of the global model, which measures the shift too; of the candidate's
    statistics; of the candidate. With a dose of 0 it is one; where the scans are far away, a twelfth more, to
    see whether they are inverted. Raises NetworkError for a network without batch norm to move, RoutingError
    for a spread of another network.
    """
    device = device or images_NCHW.device
    images, space = images_NCHW.to(device), space.alone()
    parent = view(space.plain().to(device), images, check_cancelled, patients=patients)
    assert parent.profile is not None
    dose = dose_by_shift(parent.profile, spread)
    config = AdaptationConfig(preset="ladder", doses=dose.doses)
    candidate, negative = parent, None
    if dose.shift > FAR:
        network = space.plain().to(device)
        negative = mirrored(network, images, parent.profile, spread, check_cancelled)
    adapted = recipe_of(config.preset).adapt(space, images, config, device, check_cancelled)
    if dose.share:
        candidate = view(adapted.merged, images, check_cancelled, patients=patients)
    return ByShift(
        dose=dose,
        spread=spread,
        config=config,
        adapted=adapted,
        parent=parent,
        candidate=candidate,
        patients=tuple(patients),
        classes=int(space.arguments["classes"]),
        targets=targets_known(spread, playbook),
        record=None if playbook is None else playbook.by_shift,
        negative=negative,
        mistaken=mistaken,
        practising=practising,
    )


def targets_known(spread: Spread, playbook: Playbook | None) -> Targets:
    """The targets of the members, by the playbook, else by their moments."""
    if playbook is not None:
        return playbook.targets
    return Targets(spread.share, spread.largest, spread.pieces)
