"""What `auto` serves where a lens moves the scans first: the lens and a dose, the lens alone, or neither.

The lens is fitted elsewhere, since it knows no network (`model_store.lens`). Here the network says whether
the lens helped it, and what is still worth moving:

    the lens has no step, or no licence        the dose by shift of the scans as they are, and its gate, if
                                               they show what the members' scans show
    the dose of the lensed scans passes        lens and dose
    else the lens passes                       lens
    else                                       the global model, as it is

Where structures are smaller than the members', the network sees the scans larger in place of all that
(`by_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    SHOWS,
    GateVerdict,
    ObservedClassesThroughLens,
    ObservedLens,
    ObservedScans,
    Shifted,
    Targets,
    ThroughLens,
    judge,
)
from personalization.gate.parent import UNKNOWN_TARGETS
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.test_time.ladder import dose_by_shift

# What a candidate is made of; "nothing" is the global model as it is.
Made = Literal["lens and dose", "lens", "dose", "scale", "nothing"]


@dataclass(frozen=True)
class Lensed:
    """What is served of a lens at a hospital, and the verdicts that decided it.

    Attributes:
        served: what may be assigned.
        verdict: on the lens alone; None of a network with batch norm where the lens has no step.
        both: on lens and dose together, None where the scans through the lens ask for no dose.
        dosed: the dose by shift: of the scans through the lens, or as they are where there is no lens or no
            licence; None of a network without batch norm to move.
        parent, through: views of the global model, of the scans as they are and through the lens.
        shifts: the network's own R of both; None where it was not measured.
        as_they_are: on the dose of the scans as they are; None of one through the lens.
    """

    served: Made
    verdict: GateVerdict | None
    both: GateVerdict | None
    dosed: ByShift | None
    parent: View
    through: View
    shifts: tuple[float, float] | None
    as_they_are: GateVerdict | None = None

    @property
    def candidate(self) -> Made:
        """What is made: what is served, or else what was refused."""
        if self.served != "nothing":
            return self.served
        if self.verdict is not None and not self.verdict.passed and licensed(self.verdict):
            return "lens"
        return "dose" if self.dosed is not None and self.dosed.dose.share else "nothing"

    @property
    def judged(self) -> GateVerdict:
        """The verdict on the candidate."""
        by_dose = self.as_they_are or (self.verdict if self.dosed is None else self.dosed.verdict)
        verdicts = {"lens and dose": self.both, "dose": by_dose, "nothing": by_dose}
        found = verdicts.get(self.candidate, self.verdict)
        assert found is not None
        return found

    @property
    def network(self) -> nn.Module | None:
        """The network of the candidate; None where it is the global model."""
        moved = self.candidate in ("lens and dose", "dose")
        return self.dosed.adapted.merged if moved and self.dosed is not None else None

    @property
    def sees_through(self) -> bool:
        """Whether the candidate sees the scans through the lens."""
        return self.candidate in ("lens and dose", "lens")


def by_lens(
    space: RoutingSpace,
    spread: Spread,
    playbook: Playbook | None,
    images_NCHW: Tensor,
    lensed_NCHW: Tensor | None,
    patients: Sequence[Hashable],
    lens: ThroughLens,
    device: torch.device | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    mistaken: float = 0.0,
    *,
    practising: bool = False,
) -> Lensed:
    """Decide for images [N, C, H, W] and the same through a lens, None where it has no step.

    `patients` has the patient of every image, `lens` what its features say, `mistaken` the share of the scans
    that no training scan resembles in kind, whatever their colour; `practising` says that a member practises,
    so that a classifier needs no licence. Deterministic. Costs two to five forward
    passes. Raises as `by_shift`.
    """
    device = device or images_NCHW.device

    def dosed(images: Tensor) -> ByShift:
        common = images, patients, device, check_cancelled, mistaken
        return by_shift(space, spread, playbook, *common, practising=practising)

    def without_lens(verdict: GateVerdict | None, shifts: tuple[float, float] | None) -> Lensed:
        made, shows = dosed(images_NCHW), judge(SHOWS, ObservedScans(lens))
        whole = GateVerdict(shows.passed and made.passed, (*shows.checks, *made.verdict.checks))
        served: Made = "dose" if whole.passed and made.dose.share else "nothing"
        return Lensed(served, verdict, None, made, made.parent, made.parent, shifts, whole)

    if lensed_NCHW is None:
        return without_lens(None, None)
    network = space.alone().plain().to(device)
    parent = view(network, images_NCHW.to(device), check_cancelled, patients=patients)
    assert parent.profile is not None
    made, before = dosed(lensed_NCHW), dose_by_shift(parent.profile, spread).shift
    shifts = before, made.dose.shift
    record = None if playbook is None else playbook.by_shift
    largest = UNPRACTISED if record is None else record.largest
    judged = _Judge(
        lens=replace(lens, licence=made.dose.shift / before),
        parent=parent,
        patients=patients,
        classes=int(space.arguments["classes"]),
        shifted=Shifted(
            made.dose.shift / largest,
            left=lens.left,
            lost=None if record is None or not record.lensed else record.lost,
            mistaken=mistaken,
        ),
        targets=targets_known(spread, playbook),
        natural=spread.size,
        practised=practising or (record is not None and record.lensed),
    )
    verdict, both = judged.of(made.parent), None
    if not licensed(verdict):
        return without_lens(verdict, shifts)
    if made.dose.share:
        whole = judged.of(made.candidate)
        both = GateVerdict(whole.passed and made.passed, (*whole.checks, *made.verdict.checks))
    served: Made = "lens and dose" if both and both.passed else "lens" if verdict.passed else "nothing"
    return Lensed(served, verdict, both, made, parent, made.parent, shifts)


def by_lens_alone(
    see: Callable[[Tensor], View],
    classes: int,
    images_NCHW: Tensor,
    lensed_NCHW: Tensor | None,
    patients: Sequence[Hashable],
    lens: ThroughLens,
    mistaken: float = 0.0,
) -> Lensed:
    """`by_lens` of a network without batch norm to move, or one that is a graph: `see` gives its masks.

    Without a step nothing is served, and the verdict is that on the global model as it is.
    """
    parent = see(images_NCHW)
    through = parent if lensed_NCHW is None else see(lensed_NCHW)
    shifted = Shifted(0.0, left=lens.left, mistaken=mistaken)
    verdict = _Judge(lens, parent, patients, classes, shifted).of(through)
    served: Made = "lens" if verdict.passed and lensed_NCHW is not None else "nothing"
    return Lensed(served, verdict, None, None, parent, through, None)


def by_scale(
    network: nn.Module,
    classes: int,
    images_NCHW: Tensor,
    enlarged_NCHW: Tensor,
    middle_NCHW: Tensor,
    patients: Sequence[Hashable],
    lens: ThroughLens,
    spread: Spread | None = None,
    playbook: Playbook | None = None,
    check_cancelled: CancelCheck = never_cancelled,
    mistaken: float = 0.0,
) -> Lensed:
    """Decide for images [N, C, H, W] and the same `lens.zoom` times larger, on the network's device.

    With a `spread`, the network's own shift is asked, too: of the middle of the enlarged images, [N, C, H, W]
    again. No dose follows. Deterministic. Costs two or three forward passes, one of which is `lens.zoom`
    squared times longer. Raises as `view`.
    """
    known = None if spread is None else patients
    parent = view(network, images_NCHW, check_cancelled, patients=known)
    through = view(network, enlarged_NCHW, check_cancelled)
    shifts: tuple[float, float] | None = None
    if spread is not None:
        central = view(network, middle_NCHW, check_cancelled, patients=known)
        assert parent.profile is not None
        assert central.profile is not None
        before, after = (dose_by_shift(each, spread).shift for each in (parent.profile, central.profile))
        shifts = before, after
        lens = replace(lens, licence=after / before)
    judged = _Judge(
        lens,
        parent,
        patients,
        classes,
        Shifted(0.0, left=lens.left, mistaken=mistaken),
        UNKNOWN_TARGETS if spread is None else targets_known(spread, playbook),
        0.0 if spread is None else spread.size,
    )
    verdict = judged.of(through)
    return Lensed("scale" if verdict.passed else "nothing", verdict, None, None, parent, through, shifts)


@dataclass(frozen=True)
class _Judge:
    lens: ThroughLens
    parent: View
    patients: Sequence[Hashable]
    classes: int
    shifted: Shifted
    targets: Targets = UNKNOWN_TARGETS
    natural: float = 0.0
    # By the members, with a lens.
    practised: bool = False

    def of(self, candidate: View) -> GateVerdict:
        maps, parent = candidate.maps, self.parent.maps
        if maps.ndim == 1:
            classes = ObservedClassesThroughLens(
                maps, parent, self.classes, self.lens, self.shifted, licensed=self.practised
            )
            return judge(BY_LENS_WITHOUT_MASKS, classes)
        if maps.shape != parent.shape:
            # Of enlarged images: on the parent's pixels, by the nearest.
            own = nn.functional.interpolate(maps[:, None], parent.shape[1:], mode="nearest-exact")
            maps = own[:, 0]
        scans = np.unique([str(each) for each in self.patients], return_inverse=True)[1]
        observed = ObservedLens(
            maps, parent, scans, self.classes, self.targets, self.natural, self.lens, self.shifted
        )
        return judge(BY_LENS, observed)


def licensed(verdict: GateVerdict) -> bool:
    """Whether the network sees through the lens what it expects, as far as it was asked."""
    return all(result.passed for result in verdict.checks if result.name == "lens_licence")
