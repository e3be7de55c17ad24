"""Split a site into train, validation and test by patient. A split depends on the seed and the site alone."""

from __future__ import annotations

import hashlib

import numpy as np

from training.data.cases import SPLITS, AnyCase, Site, Split
from training.errors import FederationError


def split_by_patient(site: Site[AnyCase], seed: int, test: float = 0.2, val: float = 0.2) -> Site[AnyCase]:
    """Put every patient of a site into one split.

    `test` is a share of the site's patients, `val` a share of the patients that then remain. A split named in
    cases.csv is complete: patients without a split are divided among the splits that cases.csv does not name.

    With few patients, training comes first, validation second, testing last. One patient is used for training
    (and `SiteData` also validates on it); two give one to training and one to validation; with three or more,
    every split has at least one.

    Raises FederationError if cases.csv leaves no patient to train on.
    """
    splits: dict[str, Split] = {c.patient: c.split for c in site.cases if c.split is not None}
    open_ = _shuffled([p for p in site.patients if p not in splits], site.name, seed)
    shares = {"train": 1.0, "val": val, "test": test}
    free = [s for s in SPLITS if s not in splits.values() and shares[s] > 0] or ["train"]
    # Test is drawn first, so that changing `val` moves no patient into it. The first split gets the rest.
    for before, split in reversed(list(enumerate(free))):
        count = _share(shares[split], len(open_), keep=before) if before else len(open_)
        splits |= dict.fromkeys(open_[:count], split)
        open_ = open_[count:]
    assigned = site.assigned(splits)
    check_trains(assigned)
    return assigned


def check_trains(site: Site[AnyCase]) -> None:
    """Raise FederationError if no patient of a site is in the split 'train'."""
    if not site.of_split("train"):
        raise FederationError(
            f"site '{site.name}' has no patient to train on:",
            [
                f"{site.name}: none of its {len(site.patients)} patients is in the split 'train'; "
                "change its cases.csv"
            ],
        )


def all_for_testing(site: Site[AnyCase]) -> Site[AnyCase]:
    """Put every patient in the test split, as for a hospital outside the federation."""
    return site.assigned(dict.fromkeys(site.patients, "test"))


def folds(site: Site[AnyCase], k: int, seed: int, val: float = 0.2) -> tuple[Site[AnyCase], ...]:
    """Make `k` versions of the site for cross-validation: every patient is in the test split of exactly one.

    The splits in cases.csv are ignored. In each version `val` is a share of the patients that are not tested.
    Raises ValueError unless 2 <= k <= patients.
    """
    patients = _shuffled(list(site.patients), site.name, seed)
    if not 2 <= k <= len(patients):
        raise ValueError(
            f"site '{site.name}': {k} folds of {len(patients)} patients; "
            "expected from 2 folds to one per patient"
        )
    versions = []
    for fold in range(k):
        tested = patients[fold::k]
        rest = [p for p in patients if p not in tested]
        n_val = _share(val, len(rest), keep=1) if val > 0 else 0
        splits: dict[str, Split] = dict.fromkeys(tested, "test")
        splits |= dict.fromkeys(rest[:n_val], "val")
        splits |= dict.fromkeys(rest[n_val:], "train")
        versions.append(site.assigned(splits))
    return tuple(versions)


def _share(fraction: float, of: int, keep: int) -> int:
    """Round a share to at least one, but leave `keep` of the total."""
    return max(0, min(max(1, round(fraction * of)), of - keep))


def _shuffled(patients: list[str], site: str, seed: int) -> list[str]:
    material = hashlib.sha256(f"split\0{seed}\0{site}".encode()).digest()
    order = np.random.default_rng(list(material)).permutation(len(patients))
    return [sorted(patients)[i] for i in order]
