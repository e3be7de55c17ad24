"""What a site's masks can tell: places without a truth, and labels that the site does not draw.

Where a site does not draw label b, its background may be b. There b is out of the softmax, as if the network
had no such class (the restricted softmax of Li & Zhan, KDD 2021); at the voxels of another label b is wrong.
So no site contradicts another, and none teaches that its background is b, as the sum of both probabilities
(the marginal loss of Shi et al., Medical Image Analysis 2021) did on phantoms: Dice 0.15 of a label that one
of three sites draws, and 0.94 so. A region that is not drawn is left out. Scores take the classes that masks
cannot tell apart for one.

Legend: B batch, K classes, L regions, P places with a truth, ... spatial axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from personalization.losses import Loss

# A target's class index where there is no truth. `model_store.task` has the same number.
IGNORED = 255
# As a logit, a certainty that float32 cannot tell from 1.
_CERTAIN = 30.0


@dataclass(frozen=True)
class Told:
    """What masks can tell.

    Attributes:
        groups: of each of the K classes, the first class that the masks cannot tell it from.
        members: [K][L] of a task with regions, whether each class belongs to each region.
        regions: [L] whether each region is drawn; empty of classes that exclude each other.
    """

    groups: tuple[int, ...]
    members: tuple[tuple[bool, ...], ...] = ()
    regions: tuple[bool, ...] = ()

    def loss(self, loss: Loss) -> Loss:
        """A loss of logits and class indices, of what the masks can tell alone."""
        return partial(self._of_the_told, loss)

    def compared(self, found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """An answer and the truth, class indices of one shape, as scores compare them.

        Classes that the masks cannot tell apart are the first of them. A place without a truth is background
        in both.
        """
        return self.first(found).masked_fill(truth == IGNORED, 0), self.first(truth)

    def first(self, classes: Tensor) -> Tensor:
        """Class indices of one of both, as `compared`."""
        table = torch.zeros(IGNORED + 1, dtype=classes.dtype, device=classes.device)
        table[: len(self.groups)] = torch.tensor(self.groups, dtype=classes.dtype)
        return table[classes.long()]

    def _of_the_told(self, loss: Loss, logits_BK: Tensor, target_B: Tensor) -> Tensor:
        told = target_B != IGNORED
        logits, target = logits_BK, target_B
        if not bool(told.all()):
            if not bool(told.any()):
                return logits.sum() * 0
            # Losses add up over images and places, so that places may be left out.
            logits, target = logits.movedim(1, -1)[told].T[None], target[told][None]
        if self.regions:
            return self._of_regions(loss, logits, target)
        return loss(*self._merged(logits, target))

    def _merged(self, logits_BK: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
        firsts = sorted({*self.groups})
        if len(firsts) == len(self.groups):
            return logits_BK, target_B
        channels = list(logits_BK.unbind(dim=1))
        for index, first in enumerate(self.groups):
            if index != first:
                channels[index] = channels[index].masked_fill(target_B == first, -torch.inf)
        members = [
            [each for each, own in zip(channels, self.groups, strict=True) if own == first]
            for first in firsts
        ]
        logits = torch.stack([torch.stack(own).logsumexp(dim=0) for own in members], dim=1)
        numbers = torch.tensor([firsts.index(group) for group in self.groups], device=target_B.device)
        return logits, numbers[target_B.long()].to(target_B.dtype)

    def _of_regions(self, loss: Loss, logits_BL: Tensor, target_B: Tensor) -> Tensor:
        drawn = sum(self.regions)
        if drawn == len(self.regions):
            return loss(logits_BL, target_B)
        if not drawn:
            return logits_BL.sum() * 0
        # Losses are means over the regions: one that is certainly right adds nothing, and is divided out.
        members = torch.tensor(self.members, device=target_B.device)[target_B.long()].movedim(-1, 1)
        certain = torch.where(members, _CERTAIN, -_CERTAIN).to(logits_BL.dtype)
        shape = (1, len(self.regions), *(1 for _ in range(logits_BL.ndim - 2)))
        is_drawn = torch.tensor(self.regions, device=target_B.device).reshape(shape)
        return loss(torch.where(is_drawn, logits_BL, certain), target_B) * (len(self.regions) / drawn)
