"""Load a site's classification images into memory, with the preprocessing that serving uses.

Shape suffixes: N images (a volume's slices count one by one), C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import LocumStoreError
from model_store.guard import ReferenceStatistics, summarise
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Task
from personalization.augmentation import Augmentation, transform_images
from personalization.transfer import CPU, sent
from training.data.cases import LabelledCase, Site
from training.data.classification.npz import read_arrays
from training.data.examples import Examples
from training.data.scan_files import read_scan
from training.errors import FederationError


@dataclass(frozen=True)
class LabelledData:
    """One hospital's images by split, and the intensity statistics of its training scans.

    A site without validation images validates on its training images. `test` may be empty, and any class may
    be absent.
    """

    site: str
    train: Examples
    val: Examples
    test: Examples
    statistics: ReferenceStatistics | None

    @property
    def all_train(self) -> Examples:
        """Every training image: none is left out of training."""
        return self.train

    @property
    def images(self) -> int:
        """The number of training images, which a site announces before the first round."""
        return len(self.train)

    @property
    def scored(self) -> int:
        """The number of images that scores count, those of validation."""
        return len(self.val)

    @classmethod
    def load(cls, site: Site[LabelledCase], task: Task) -> LabelledData:
        """Decode and prepare a site. Every case must have a split.

        Raises FederationError naming the image that cannot be prepared.
        """
        source = _Source()
        statistics: list[ReferenceStatistics] = []
        train = _prepared(site, site.of_split("train"), task, source, statistics)
        val = _prepared(site, site.of_split("val"), task, source)
        test = _prepared(site, site.of_split("test"), task, source)
        merged = reduce(ReferenceStatistics.merge, statistics) if statistics else None
        return cls(site.name, train, val if len(val) else train, test, merged)


def labelled_batches(
    images: Examples,
    batch_size: int,
    generator: torch.Generator,
    augment: bool,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield one epoch, shuffled: images [B, C, H, W] float32 and labels [B] int64 on a device, and indices
    [B] int64.

    The order and every augmentation depend on `generator` alone. The last batch may be smaller. A last batch
    of a single image is left out after larger batches, because batch norm cannot normalise one image. With
    fewer than `least` images in all, they are taken several times.
    """
    order = torch.randperm(len(images), generator=generator)
    batch_size = max(batch_size, least)
    if 0 < len(order) < least:
        order = order.repeat(math.ceil(least / len(order)))
    pixels, labels = torch.from_numpy(images.images), torch.from_numpy(images.targets)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        if len(chosen) == 1 < len(order) and batch_size > 1:
            continue
        batch = sent(pixels[chosen], device)
        if augment:
            batch = transform_images(batch, *Augmentation().draw(len(chosen), generator))
        yield batch, sent(labels[chosen], device), chosen


class _Source:
    """Reads the scans of cases. An .npz is read only once."""

    def __init__(self) -> None:
        self._arrays: dict[Path, dict[str, NDArray[Any]]] = {}

    def scan(self, case: LabelledCase) -> Scan:
        if case.row is None:
            return read_scan(case.image)
        if case.image not in self._arrays:
            self._arrays[case.image] = read_arrays(case.image)
        name, index = case.row
        voxels = self._arrays[case.image][name][index]
        # The same scan as a PNG of these pixels.
        return Scan(voxels[..., None] if voxels.ndim == 2 else voxels, None, "png")


def _prepared(
    site: Site[LabelledCase],
    cases: Sequence[LabelledCase],
    task: Task,
    source: _Source,
    statistics: list[ReferenceStatistics] | None = None,
) -> Examples:
    """Prepare the images of `cases`, in order, and append each scan's statistics to `statistics`."""
    images: list[NDArray[np.float32]] = [np.empty((0, task.in_channels, *task.size), np.float32)]
    labels: list[int] = []
    patients: list[str] = []
    names: list[str] = []
    positions: list[int] = []
    for case in cases:
        try:
            scan = source.scan(case)
            prepared = prepare(scan, task)
            if statistics is not None:
                statistics.append(ReferenceStatistics.of(summarise(scan, prepared)))
        except LocumStoreError as error:
            raise FederationError(
                f"site '{site.name}' cannot be loaded:", [f"{site.name}/{case.name}: {error}"]
            ) from error
        count = len(prepared.slices)
        images.append(prepared.slices)
        labels += [case.label] * count
        patients += [case.patient] * count
        names += [case.name] * count
        positions += range(count)
    return Examples(
        np.concatenate(images),
        np.array(labels, np.int64),
        tuple(patients),
        tuple(names),
        tuple(positions),
    )
