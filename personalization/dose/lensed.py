"""What `auto` serves where a lens moves the scans first: the lens and a dose, the lens alone, or neither.

The lens is fitted elsewhere, since it knows no network (`model_store.lens`). Here the network says whether
the lens helped it, and what is still worth moving:

    the lens has no step, or no licence        the dose by shift of the scans as they are, and its gate
    the dose of the lensed scans passes        lens and dose
    else the lens passes                       lens
    else                                       the global model, as it is
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.dose.auto import UNPRACTISED, ByShift, by_shift, targets_known
from personalization.dose.playbook import Playbook
from personalization.dose.view import View, view
from personalization.gate import (
    BY_LENS,
    BY_LENS_WITHOUT_MASKS,
    GateVerdict,
    ObservedClassesThroughLens,
    ObservedLens,
    Shifted,
    ThroughLens,
    judge,
)
from personalization.gate.parent import UNKNOWN_TARGETS
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.test_time.ladder import dose_by_shift

Served = Literal["lens and dose", "lens", "dose", "nothing"]


@dataclass(frozen=True)
class Lensed:
    """What is served of a lens at a hospital, and the verdicts that decided it.

    Attributes:
        served: what may be assigned.
        verdict: on the lens alone; None where it has no step.
        both: on lens and dose together, None where the scans through the lens ask for no dose.
        dosed: the dose by shift: of the scans through the lens, or as they are where the lens is not served;
            None of a network without batch norm to move.
        parent, through: views of the global model, of the scans as they are and through the lens.
        shifts: the network's own R of both; None of a network without batch norm to move.
    """

    served: Served
    verdict: GateVerdict | None
    both: GateVerdict | None
    dosed: ByShift | None
    parent: View
    through: View
    shifts: tuple[float, float] | None

    @property
    def network(self) -> nn.Module | None:
        """The network that is served; None where it is the global model."""
        if self.dosed is None or self.served not in ("lens and dose", "dose"):
            return None
        return self.dosed.adapted.merged

    @property
    def sees_through(self) -> bool:
        """Whether what is served sees the scans through the lens."""
        return self.served in ("lens and dose", "lens")


def by_lens(
    space: RoutingSpace,
    spread: Spread | None,
    playbook: Playbook | None,
    images_NCHW: Tensor,
    lensed_NCHW: Tensor | None,
    patients: Sequence[Hashable],
    lens: ThroughLens,
    device: torch.device | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    mistaken: float = 0.0,
) -> Lensed:
    """Decide for images [N, C, H, W] and the same through a lens, None where it has no step.

    `patients` has the patient of every image, `lens` what its features say, `mistaken` the share of the scans
    that no training scan resembles in kind, whatever their colour. Without `spread`, the network is asked for
    its masks alone. Deterministic. Costs two to five forward passes.
    """
    device = device or images_NCHW.device
    network, images = space.alone().plain().to(device), images_NCHW.to(device)
    asked = None if spread is None else patients
    parent = view(network, images, check_cancelled, patients=asked)

    def dose(of_images: Tensor) -> ByShift | None:
        if spread is None:
            return None
        return by_shift(space, spread, playbook, of_images, patients, device, check_cancelled, mistaken)

    def without_lens(
        through: View, verdict: GateVerdict | None, shifts: tuple[float, float] | None
    ) -> Lensed:
        made = dose(images)
        served: Served = "dose" if made is not None and made.passed and made.dose.share else "nothing"
        return Lensed(served, verdict, None, made, parent, through, shifts)

    if lensed_NCHW is None:
        return without_lens(parent, None, None)
    lensed = lensed_NCHW.to(device)
    through, made, shifts = parent, None, None
    if spread is None:
        through = view(network, lensed, check_cancelled)
    else:
        assert parent.profile is not None
        made = dose(lensed)
        assert made is not None
        through, before = made.parent, dose_by_shift(parent.profile, spread).shift
        shifts = before, made.dose.shift
        lens = replace(lens, licence=made.dose.shift / before)
    judged = _Judge(
        lens, parent, patients, spread, playbook, int(space.arguments["classes"]), shifts, mistaken
    )
    verdict = judged.of(through)
    if not _licensed(verdict):
        return without_lens(through, verdict, shifts)
    both = None
    if made is not None and made.dose.share:
        whole = judged.of(made.candidate)
        both = GateVerdict(whole.passed and made.passed, (*whole.checks, *made.verdict.checks))
    served: Served = "lens and dose" if both and both.passed else "lens" if verdict.passed else "nothing"
    return Lensed(served, verdict, both, made, parent, through, shifts)


@dataclass(frozen=True)
class _Judge:
    lens: ThroughLens
    parent: View
    patients: Sequence[Hashable]
    spread: Spread | None
    playbook: Playbook | None
    classes: int
    shifts: tuple[float, float] | None
    mistaken: float

    def of(self, candidate: View) -> GateVerdict:
        record = None if self.playbook is None else self.playbook.by_shift
        largest = UNPRACTISED if record is None else record.largest
        beyond = 0.0 if self.shifts is None else self.shifts[1] / largest
        shifted = Shifted(beyond, left=self.lens.left, mistaken=self.mistaken)
        maps, parent = candidate.maps, self.parent.maps
        if maps.ndim == 1:
            # No member has practised a lens yet.
            return judge(
                BY_LENS_WITHOUT_MASKS,
                ObservedClassesThroughLens(maps, parent, self.classes, self.lens, shifted, licensed=False),
            )
        scans = np.unique([str(each) for each in self.patients], return_inverse=True)[1]
        targets, natural = UNKNOWN_TARGETS, 0.0
        if self.spread is not None:
            targets, natural = targets_known(self.spread, self.playbook), self.spread.size
        return judge(
            BY_LENS,
            ObservedLens(maps, parent, scans, self.classes, targets, natural, self.lens, shifted),
        )


def _licensed(verdict: GateVerdict) -> bool:
    return all(result.passed for result in verdict.checks if result.name == "lens_licence")
