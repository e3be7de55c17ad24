"""Examples in memory: images of a site with the answers that are learned.

Shape suffixes: N examples (a volume's slices count one by one), C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Examples:
    """Images [N, C, H, W] float32 and class indices, with the patient and the origin of each image.

    `targets` has a class for every pixel, [N, H, W] uint8, or one for the image, [N] int64. `cases` has the
    names of files or cases, `positions` the index of the slice within its volume (0 for a 2-D image).
    """

    images: NDArray[np.float32]
    targets: NDArray[Any]
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    positions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def has_masks(self) -> bool:
        """Whether every pixel has a class, and not the image."""
        return self.targets.ndim > 1

    def take(self, indices: Sequence[int]) -> Examples:
        """Return some of the examples, in this order."""
        chosen = list(indices)
        return Examples(
            self.images[chosen],
            self.targets[chosen],
            tuple(self.patients[index] for index in chosen),
            tuple(self.cases[index] for index in chosen),
            tuple(self.positions[index] for index in chosen),
        )

    def with_foreground(self) -> Examples:
        """Return only the examples with a pixel of another class than background."""
        return self.take([index for index, target in enumerate(self.targets) if target.any()])
