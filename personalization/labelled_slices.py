"""Slices with masks and patients: what a joining, and an adaptation by masks, learn from.

Legend: N slices, B slices of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from personalization.augmentation import Augmentation, transform
from personalization.errors import AdaptationError
from personalization.losses import Loss
from personalization.told import IGNORED, Told
from personalization.transfer import CPU, sent

# (a network, patients) -> the Dice of each, of what the service would answer to their scans
Score = Callable[[nn.Module, Collection[str]], Mapping[str, float]]


@dataclass(frozen=True)
class LabelledSlices:
    """`images` float [N, C, H, W], `targets` uint8 [N, H, W] of class indices, and each slice's patient.

    A target is IGNORED where there is no truth.

    Of volumes they are patches, with a third spatial axis. `mirror` are the spatial axes along which the
    network's answer is a mean over mirrored passes: batches are flipped along them, so that it learns each.

    Raises AdaptationError for shapes or values that do not fit.
    """

    images: Tensor
    targets: Tensor
    patients: tuple[str, ...]
    classes: int = 2
    mirror: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = self.images.shape
        fits = len(shape) in (4, 5) and self.targets.shape == (shape[0], *shape[2:])
        if not fits or len(self.patients) != len(self.images):
            raise AdaptationError(
                f"masks: expected images [N, C, H, W], targets [N, H, W] and N patients, found "
                f"{list(shape)}, {list(self.targets.shape)} and {len(self.patients)}"
            )
        if not len(self.images):
            raise AdaptationError("masks: expected at least one slice with a mask, found none")
        if not bool(torch.isfinite(self.images).all()):
            raise AdaptationError("masks: images have values that are not finite")
        if self.targets.dtype != torch.uint8 or not bool(
            ((self.targets < self.classes) | (self.targets == IGNORED)).all()
        ):
            raise AdaptationError(
                f"masks: expected targets of 0 to {self.classes - 1} as uint8, found {self.targets.dtype} up "
                f"to {int(self.targets.max())}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def ill(self) -> frozenset[str]:
        """The patients with a target in their masks."""
        drawn = self._drawn.tolist()
        return frozenset(patient for patient, there in zip(self.patients, drawn, strict=True) if there)

    @property
    def _drawn(self) -> Tensor:
        """Whether each slice shows a target, [N]."""
        return ((self.targets > 0) & (self.targets != IGNORED)).flatten(1).any(dim=1)

    def loss(self, loss: Loss) -> Loss:
        """A loss that leaves places without a truth out."""
        if not bool((self.targets == IGNORED).any()):
            return loss
        return Told(tuple(range(self.classes))).loss(loss)

    def of(self, patients: Collection[str]) -> LabelledSlices:
        """The slices of some patients."""
        kept = [index for index, patient in enumerate(self.patients) if patient in patients]
        own = tuple(self.patients[index] for index in kept)
        return replace(self, images=self.images[kept], targets=self.targets[kept], patients=own)

    def batches(
        self, size: int, seed: int, augment: bool, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch on a device, shuffled and, with `augment`, rotated and flipped.

        `seed` determines all of it. Patches of volumes are flipped along `mirror` alone, since a label may be
        of one side of the body; those with a target are repeated until they are a third, as a target may fill
        few of them.
        """
        draw = torch.Generator().manual_seed(seed)
        volumes = self.images.ndim == 5
        recipe = Augmentation(flip=not volumes) if augment else None
        indices = torch.arange(len(self))
        if volumes:
            ill = torch.nonzero(self._drawn).flatten()
            without = len(self) - len(ill)
            more = max(0, math.ceil(without / 2) - len(ill))
            if len(ill):
                indices = torch.cat([indices, ill.repeat(math.ceil(more / len(ill)))[:more]])
        for chosen in torch.split(indices[torch.randperm(len(indices), generator=draw)], size):
            batch = sent(self.images[chosen], device), sent(self.targets[chosen], device)
            if recipe:
                batch = transform(*batch, *recipe.draw(len(chosen), draw))
            for axis in self.mirror:
                turned = (torch.rand(len(chosen), generator=draw) < 0.5).to(device)
                batch = _turned(batch[0], turned, 2 + axis), _turned(batch[1], turned, 1 + axis)
            yield batch


def _turned(values: Tensor, which_B: Tensor, axis: int) -> Tensor:
    """Some of a batch flipped along an axis."""
    return torch.where(which_B.view(-1, *[1] * (values.ndim - 1)), values.flip(axis), values)
