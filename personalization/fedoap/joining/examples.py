"""Slices with masks and patients, as the examples of a joining.

Legend: N slices, B slices of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from personalization.augmentation import Augmentation, transform
from personalization.errors import AdaptationError


@dataclass(frozen=True)
class JoiningExamples:
    """`images` float [N, C, H, W], `targets` uint8 [N, H, W] of 0 and 1, and each slice's patient.

    Raises AdaptationError for shapes or values that do not fit.
    """

    images: Tensor
    targets: Tensor
    patients: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = self.images.shape
        fits = len(shape) == 4 and self.targets.shape == (shape[0], *shape[2:])
        if not fits or len(self.patients) != len(self.images):
            raise AdaptationError(
                f"joining: expected images [N, C, H, W], targets [N, H, W] and N patients, found "
                f"{list(shape)}, {list(self.targets.shape)} and {len(self.patients)}"
            )
        if not len(self.images):
            raise AdaptationError("joining: expected at least one slice with a mask, found none")
        if not bool(torch.isfinite(self.images).all()):
            raise AdaptationError("joining: images have values that are not finite")
        if self.targets.dtype != torch.uint8 or int(self.targets.max()) > 1:
            raise AdaptationError(
                f"joining: expected targets of 0 and 1 as uint8, found {self.targets.dtype} up to "
                f"{int(self.targets.max())}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def ill(self) -> frozenset[str]:
        """The patients with a tumour in their masks."""
        drawn = self.targets.flatten(1).any(dim=1).tolist()
        return frozenset(patient for patient, there in zip(self.patients, drawn, strict=True) if there)

    def batches(self, size: int, seed: int, augment: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch, shuffled and, with `augment`, rotated and flipped. `seed` determines all of it."""
        draw = torch.Generator().manual_seed(seed)
        recipe = Augmentation() if augment else None
        for chosen in torch.split(torch.randperm(len(self), generator=draw), size):
            batch = self.images[chosen], self.targets[chosen]
            yield transform(*batch, *recipe.draw(len(chosen), draw)) if recipe else batch
