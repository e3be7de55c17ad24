"""The data of `benchmarks.cross_organ`: sites of several sets as one federation, few labels, test images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.evaluation import Scans, predict
from model_store.preprocessing import restore
from model_store.task import Task
from personalization.gate.evidence import SPECK
from personalization.metrics import dice
from training.data.cases import Case, Site, Split
from training.data.dataset import SiteData, SliceSet
from training.data.splits import split_by_patient

# The site's name, and where it lies.
SITES: Mapping[str, str] = {
    "bladder_mri": "tumour_organs/bladder_mri",
    "skin_dermoscopy": "tumour_organs/skin_dermoscopy",
    "breast_ultrasound": "breast_ultrasound/BUSI_tumour",
    "brain_flair": "brain_lgg_flair/HT",
    "breast_dce_mri": "tumour_organs/breast_dce_mri",
    "brain_mri_t1ce": "tumour_organs/brain_mri_t1ce",
}
OUTSIDE = ("breast_dce_mri", "brain_mri_t1ce")
# Per patient: mean Dice of the images with a tumour (None without one), how many these are, on how many of
# the images without one a tumour is found, and how many those are.
Found: TypeAlias = dict[str, tuple[float | None, int, int, int]]


def assemble(data: Path, root: Path) -> Path:
    """A folder of links to the sites, which load as one federation; nothing is copied. Returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for name, place in SITES.items():
        link, target = root / name, (data / place).resolve()
        if not target.is_dir():
            raise FileNotFoundError(f"{target}: expected the site '{name}' there; give its folder as --data")
        if not link.is_symlink() or link.resolve() != target:
            # Made aside: another run may be reading it.
            aside = root / f".{name}.{os.getpid()}"
            aside.symlink_to(target)
            aside.replace(link)
    return root


def load_inside(site: Site, task: Task, seed: int, most: Sequence[int]) -> tuple[SiteData, TestSet]:
    """A site's data, at most so many images for training and for validation, and its test images."""
    own = split_by_patient(site, seed)
    data = SiteData.load(replace(own, cases=own.of_split("train") + own.of_split("val")), task)
    train, val = most
    data = replace(data, train=thinned(data.train, train), val=thinned(data.val, val))
    return data, TestSet.load(own.of_split("test"), task)


def thinned(slices: SliceSet, most: int) -> SliceSet:
    """Evenly spaced slices, `most` at most."""
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
    """A site's test cases, and for each budget the site with that many labelled images, a fifth to validate.

    The pool that all budgets draw from is one stretch of the numbers, where neighbours may be slices of one
    patient, and begins elsewhere for every seed. Smaller budgets are part of it, evenly spaced. Raises
    ValueError when nothing is left to test on.
    """
    ordered = sorted(site.cases, key=lambda case: (len(case.name), case.name))
    largest = max(budgets)
    if len(ordered) <= largest:
        raise ValueError(f"site '{site.name}': {len(ordered)} images, expected more than {largest}")
    shift = seed * len(ordered) // 3 % len(ordered)
    turned = ordered[shift:] + ordered[:shift]
    pool, test = turned[:largest], turned[largest:]
    versions = {}
    for budget in budgets:
        chosen = [pool[index * largest // budget] for index in range(budget)]
        validating = max(1, budget // 5)
        splits: list[Split] = ["train" if index < budget - validating else "val" for index in range(budget)]
        # By image: numbers are all that is known of a patient here.
        cases = (
            replace(case, split=split, patient=case.name) for case, split in zip(chosen, splits, strict=True)
        )
        versions[budget] = Site(site.name, tuple(cases))
    return tuple(test), versions


@dataclass(frozen=True)
class TestSet:
    """Test images, decoded once for many networks; `patients` has the patient of every image's name."""

    __test__ = False  # no test case of pytest's

    scans: Scans
    patients: Mapping[str, str]

    @classmethod
    def load(cls, cases: Sequence[Case], task: Task) -> TestSet:
        """Decode and prepare."""
        scans = Scans.load((replace(case, patient=case.name) for case in cases), task)
        return cls(scans, {case.name: case.patient for case in cases})

    def of(self, network: nn.Module) -> Found:
        """What a network finds, on every image's own grid."""
        probabilities = torch.split(predict(network, self.scans.images), [s.slices for s in self.scans.scans])
        images = {}
        for scan, part in zip(self.scans.scans, probabilities, strict=True):
            predicted = torch.from_numpy(np.ascontiguousarray(restore(part.numpy(), scan.geometry)))
            images[scan.patient] = judged(predicted, scan.truth)
        return by_patient(images, self.patients)


def judged(predicted: Tensor, truth: Tensor) -> float | bool:
    """Dice of an image with a tumour; of one without, whether more than specks of one is found."""
    if bool(truth.any()):
        return float(dice(predicted.flatten()[None], truth.flatten()[None], 2)[0, 1])
    return bool((predicted > 0).double().mean() >= SPECK)


def by_patient(images: Mapping[str, float | bool], patients: Mapping[str, str]) -> Found:
    """Every patient's images together."""
    found: dict[str, tuple[list[float], list[bool]]] = {}
    for name, value in images.items():
        bearing, empty = found.setdefault(patients[name], ([], []))
        if isinstance(value, bool):
            empty.append(value)
        else:
            bearing.append(value)
    return {
        patient: (round(float(np.mean(b)), 6) if b else None, len(b), sum(e), len(e))
        for patient, (b, e) in sorted(found.items())
    }


def as_json(found: Found) -> dict[str, Any]:
    """As rows have it."""
    return {patient: list(values) for patient, values in found.items()}
