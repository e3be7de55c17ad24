"""Load a site's slices or volumes into memory, with the preprocessing that serving uses.

Shape suffixes: N slices, C channels (a slice and its neighbours), H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import LocumStoreError
from model_store.guard import ReferenceStatistics, summarise
from model_store.preprocessing import (
    Geometry,
    prepare,
    prepare_mask,
    prepare_volume,
    prepare_volume_mask,
)
from model_store.task import Task
from personalization.augmentation import Augmentation, transform
from personalization.transfer import CPU, sent
from training.data.cases import Case, Site
from training.data.examples import Data, Examples, Volumes
from training.data.scan_files import read_case, read_mask, read_scan
from training.errors import FederationError


@dataclass(frozen=True)
class SiteData:
    """One hospital's slices or volumes by split, and the intensity statistics of its training scans.

    A site with one patient has no validation split of its own: `val` is then `all_train`. `test` may be
    empty. `unfiltered` has every training slice, where slices without foreground are left out of `train`.
    """

    site: str
    train: Data
    val: Data
    test: Data
    statistics: ReferenceStatistics | None
    unfiltered: Data | None = None

    @property
    def all_train(self) -> Data:
        """Every training slice, whatever its mask: what a network meets when it serves."""
        return self.train if self.unfiltered is None else self.unfiltered

    @property
    def images(self) -> int:
        """The number of training slices, which a site announces before the first round."""
        return len(self.all_train)

    @property
    def held_out(self) -> bool:
        """Whether `val` has patients that are not trained on."""
        return self.val is not self.all_train

    @classmethod
    def load(cls, site: Site, task: Task, *, keep_empty: bool = True) -> SiteData:
        """Decode and prepare a site. Every case must have a split.

        `keep_empty=False` drops slices without foreground from training (not from validation and testing),
        unless no slice would remain. Statistics are computed over the training scans only, and are None
        without any. Raises FederationError naming the file that cannot be prepared.
        """
        statistics: list[ReferenceStatistics] = []
        train = _prepared(site, site.of_split("train"), task, statistics)
        unfiltered = None
        if not keep_empty and any(target.any() for target in train.targets):
            train, unfiltered = train.with_foreground(), train
        val = _prepared(site, site.of_split("val"), task)
        test = _prepared(site, site.of_split("test"), task)
        merged = reduce(ReferenceStatistics.merge, statistics) if statistics else None
        if not len(val):
            val = train if unfiltered is None else unfiltered
        return cls(site.name, train, val, test, merged, unfiltered)


def batches(
    slices: Examples,
    batch_size: int,
    generator: torch.Generator,
    augment: bool,
    augmentation: Augmentation | None = None,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch, shuffled: images [B, C, H, W] float32, targets [B, H, W] uint8, on a device.

    The order and every augmentation depend on `generator` alone. The last batch may be smaller; one of fewer
    than `least` slices joins the batch before it. With fewer slices in all, they are taken several times.
    """
    order = torch.randperm(len(slices), generator=generator)
    images, targets = torch.from_numpy(slices.images), torch.from_numpy(slices.targets)
    recipe = (augmentation or Augmentation()) if augment else None
    for chosen in grouped(order, batch_size, least):
        batch = sent(images[chosen], device), sent(targets[chosen], device)
        yield transform(*batch, *recipe.draw(len(chosen), generator)) if recipe else batch


def grouped(order: Tensor, batch_size: int, least: int) -> list[Tensor]:
    """Split indices into batches of at least `least`, by joining a smaller last one to the one before it."""
    if 0 < len(order) < least:
        order = order.repeat(math.ceil(least / len(order)))
    groups = list(torch.split(order, max(batch_size, least))) if len(order) else []
    if len(groups) > 1 and len(groups[-1]) < least:
        groups[-2:] = [torch.cat(groups[-2:])]
    return groups


def _prepared(
    site: Site, cases: Sequence[Case], task: Task, statistics: list[ReferenceStatistics] | None = None
) -> Data:
    """Prepare the images of `cases`, in order, and append each scan's statistics to `statistics`."""
    if task.is_volume:
        return _volumes(site, cases, task, statistics)
    height, width = task.size
    images: list[NDArray[np.float32]] = [np.empty((0, task.in_channels, height, width), np.float32)]
    targets: list[NDArray[np.uint8]] = [np.empty((0, height, width), np.uint8)]
    patients: list[str] = []
    names: list[str] = []
    positions: list[int] = []
    spacings: list[tuple[float, ...] | None] = []
    for case in cases:
        try:
            scan = read_scan(case.image)
            prepared = prepare(scan, task)
            classes = prepare_mask(read_mask(case.mask), task, prepared.geometry)
            if statistics is not None:
                statistics.append(ReferenceStatistics.of(summarise(scan, prepared)))
        except LocumStoreError as error:
            raise FederationError(
                f"site '{site.name}' cannot be loaded:", [f"{site.name}/{case.name}: {error}"]
            ) from error
        images.append(prepared.slices)
        targets.append(classes)
        count = len(classes)
        patients += [case.patient] * count
        names += [case.name] * count
        positions += range(count)
        spacings += [_of_the_input(prepared.geometry)] * count
    return Examples(
        np.concatenate(images),
        np.concatenate(targets),
        tuple(patients),
        tuple(names),
        tuple(positions),
        tuple(spacings),
        task,
    )


def _volumes(
    site: Site, cases: Sequence[Case], task: Task, statistics: list[ReferenceStatistics] | None
) -> Volumes:
    """Prepare whole volumes, as `_prepared` does slices."""
    images: list[NDArray[np.float32]] = []
    targets: list[NDArray[np.uint8]] = []
    spacings: list[tuple[float, ...]] = []
    for case in cases:
        try:
            scan = read_case(case, task)
            prepared = prepare_volume(scan, task)
            targets.append(prepare_volume_mask(read_mask(case.mask), task, prepared.grid))
            if statistics is not None:
                statistics.append(ReferenceStatistics.of(summarise(scan, prepared)))
        except LocumStoreError as error:
            raise FederationError(
                f"site '{site.name}' cannot be loaded:", [f"{site.name}/{case.name}: {error}"]
            ) from error
        images.append(prepared.volume)
        spacings.append(prepared.grid.spacing)
    return Volumes(
        tuple(images),
        tuple(targets),
        tuple(case.patient for case in cases),
        tuple(case.name for case in cases),
        tuple(spacings),
        task,
    )


def _of_the_input(geometry: Geometry) -> tuple[float, ...] | None:
    """Millimetres from slice to slice, row to row and column to column of the network's input, if known."""
    if geometry.spacing is None:
        return None
    slice_, *pixel = geometry.spacing
    sides = zip(pixel, geometry.slices[1:], geometry.size, strict=True)
    return (slice_, *(mm * own / resized for mm, own, resized in sides))
