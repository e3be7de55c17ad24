"""The data of `cross_organ`: sites of several sets as one federation, and the test patients."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from benchmarks.accuracy.cross_organ.judging import TestSet
from model_store.task import Task
from training.data.cases import Case, Federation, Site
from training.data.segmentation.dataset import SiteData, SliceSet
from training.data.splits import folds

# The site's name, and its folder in the data.
SITES: Mapping[str, str] = {
    "bladder_mri": "tumour_organs/bladder_mri",
    "skin_dermoscopy": "tumour_organs/skin_dermoscopy",
    "breast_ultrasound": "breast_ultrasound/BUSI_tumour",
    "brain_flair": "brain_lgg_flair/HT",
    "breast_dce_mri": "tumour_organs/breast_dce_mri",
    "brain_mri_t1ce": "tumour_organs/brain_mri_t1ce",
}
OUTSIDE = ("breast_dce_mri", "brain_mri_t1ce")
# Of 25 breast images 22 are of one patient: training on some and testing on others would test memory.
JOINING = ("brain_mri_t1ce",)
APART = 2
_FOLDS = 5


def assemble(data: Path, root: Path) -> Path:
    """Make a folder of links to the sites, which loads as one federation. Returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for name, place in SITES.items():
        link, target = root / name, (data / place).resolve()
        if not target.is_dir():
            raise FileNotFoundError(f"{target}: expected the site '{name}' there; give its folder as --data")
        if not link.is_symlink() or link.resolve() != target:
            # Created under another name and renamed: another run may be reading the link.
            aside = root / f".{name}.{os.getpid()}"
            aside.symlink_to(target)
            aside.replace(link)
    return root


@dataclass(frozen=True)
class Inside:
    """A seed's data of the sites of the federation, and their test images."""

    data: Mapping[str, SiteData]
    tests: Mapping[str, TestSet]


@dataclass(frozen=True)
class Outside:
    """A seed's test images of the outside sites and, for those that join, the labelled images by budget."""

    tests: Mapping[str, TestSet]
    labelled: Mapping[str, Mapping[int, SiteData]]


class Hospitals:
    """All sites, with the data of the last requested seed cached: cells come seed by seed."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.inside = lru_cache(maxsize=1)(self._inside)
        self.outside = lru_cache(maxsize=1)(self._outside)

    def task(self, side: int) -> Task:
        """The federation's task with this image size."""
        return self.federation.task.model_copy(update={"size": (side, side)})

    def _inside(self, seed: int, side: int, most: tuple[int, int]) -> Inside:
        """`most` bounds a site's images for training and for validation."""
        found = {
            site.name: load_inside(site, self.task(side), seed, most)
            for site in self.federation.sites
            if site.name not in OUTSIDE
        }
        return Inside(
            {name: data for name, (data, _) in found.items()},
            {name: tests for name, (_, tests) in found.items()},
        )

    def _outside(self, seed: int, side: int, budgets: tuple[int, ...]) -> Outside:
        tests, labelled, task = {}, {}, self.task(side)
        for site in self.federation.sites:
            if site.name not in OUTSIDE:
                continue
            cases: Sequence[Case] = site.cases
            if site.name in JOINING:
                cases, versions = few_labels(site, seed, budgets)
                labelled[site.name] = {n: SiteData.load(few, task) for n, few in versions.items()}
            tests[site.name] = TestSet.load(cases, task)
        return Outside(tests, labelled)


def load_inside(site: Site, task: Task, seed: int, most: tuple[int, int]) -> tuple[SiteData, TestSet]:
    """A site's data, with at most `most` images for training and for validation, and its test images.

    Five consecutive seeds test every patient once, so that three seeds test three fifths of the patients.
    """
    own = folds(site, _FOLDS, seed // _FOLDS)[seed % _FOLDS]
    data = SiteData.load(replace(own, cases=own.of_split("train") + own.of_split("val")), task)
    train, val = most
    data = replace(data, train=thinned(data.train, train), val=thinned(data.val, val))
    return data, TestSet.load(own.of_split("test"), task)


def thinned(slices: SliceSet, most: int) -> SliceSet:
    """At most `most` evenly spaced slices."""
    if len(slices) <= most:
        return slices
    kept = [index * len(slices) // most for index in range(most)]
    return SliceSet(
        slices.images[kept],
        slices.targets[kept],
        tuple(slices.patients[i] for i in kept),
        tuple(slices.cases[i] for i in kept),
        tuple(slices.positions[i] for i in kept),
    )


def few_labels(site: Site, seed: int, budgets: Sequence[int]) -> tuple[tuple[Case, ...], dict[int, Site]]:
    """Choose a site's test cases, and for each budget the site with that many labelled images.

    All budgets draw from one pool of consecutive image numbers, since neighbours may be slices of one
    patient. The pool begins with another patient for every seed. Smaller budgets are evenly spaced images of
    the pool. Some of the labelled patients are for validation. Patients of the pool are not tested, nor are
    `APART` images on either side of it, since patients are distinguished by the look of their images.

    Raises ValueError when nothing is left to test or to train on.
    """
    ordered = sorted(site.cases, key=lambda case: number_order(case.name))
    largest = max(budgets)
    if len(ordered) <= largest:
        raise ValueError(f"site '{site.name}': {len(ordered)} images, expected more than {largest}")
    patients = list(dict.fromkeys(case.patient for case in ordered))
    first = patients[seed * len(patients) // 3 % len(patients)]
    shift = next(index for index, case in enumerate(ordered) if case.patient == first)
    turned = ordered[shift:] + ordered[:shift]
    pool = turned[:largest]
    drawn = {case.patient for case in pool}
    test = [case for case in turned if case.patient not in drawn][APART:-APART]
    if not test:
        raise ValueError(f"site '{site.name}': no patient is left to test beside {largest} labelled images")
    versions = {}
    for budget in budgets:
        chosen = [pool[index * largest // budget] for index in range(budget)]
        validating = _a_fifth(Counter(case.patient for case in chosen))
        if len(validating) == len({case.patient for case in chosen}):
            raise ValueError(f"site '{site.name}': {budget} labelled images are of one patient")
        cases = (replace(c, split="val" if c.patient in validating else "train") for c in chosen)
        versions[budget] = Site(site.name, tuple(cases))
    return tuple(test), versions


def _a_fifth(images: Counter[str]) -> set[str]:
    """Patients with a fifth of the images at most, those with most images first; at least one patient."""
    left = max(1, images.total() // 5)
    found = set()
    for patient, count in images.most_common():
        if count <= left:
            found.add(patient)
            left -= count
    return found or {min(images, key=images.__getitem__)}


def number_order(name: str) -> tuple[int, str]:
    """A key that sorts 999.png before 1000.png."""
    return len(name), name
