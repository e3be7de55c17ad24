"""Train, validation and test by patient, the same for the same seed whatever else the federation holds."""

from __future__ import annotations

import hashlib

import numpy as np

from training.data.cases import SPLITS, AnyCase, Site, Split
from training.errors import FederationError


def split_by_patient(site: Site[AnyCase], seed: int, test: float = 0.2, val: float = 0.2) -> Site[AnyCase]:
    """Put every patient of a site into one split.

    `test` is a share of the site's patients, `val` a share of those that then remain. A split that cases.csv
    names is complete as it stands: the patients it leaves open are shared among the splits it does not name.

    Few patients: training comes first, validation second, testing last. One patient trains (and `SiteData`
    validates on it too, having no other); two give one to training and one to validation; from three on,
    every split has one.

    Raises FederationError if cases.csv leaves nobody to train on.
    """
    splits: dict[str, Split] = {c.patient: c.split for c in site.cases if c.split is not None}
    open_ = _shuffled([p for p in site.patients if p not in splits], site.name, seed)
    shares = {"train": 1.0, "val": val, "test": test}
    free = [s for s in SPLITS if s not in splits.values() and shares[s] > 0] or ["train"]
    # Test is drawn first, so that changing `val` does not move anybody into it; the first takes who is left.
    for before, split in reversed(list(enumerate(free))):
        count = _share(shares[split], len(open_), keep=before) if before else len(open_)
        splits |= dict.fromkeys(open_[:count], split)
        open_ = open_[count:]
    assigned = site.assigned(splits)
    check_trains(assigned)
    return assigned


def check_trains(site: Site[AnyCase]) -> None:
    """Raise FederationError where none of a site's patients is in the split 'train'."""
    if not site.of_split("train"):
        raise FederationError(
            f"site '{site.name}' has nobody to train on:",
            [
                f"{site.name}: none of its {len(site.patients)} patients is in the split 'train'; "
                "change its cases.csv"
            ],
        )


def all_for_testing(site: Site[AnyCase]) -> Site[AnyCase]:
    """Every patient in the test split: a hospital outside the federation."""
    return site.assigned(dict.fromkeys(site.patients, "test"))


def folds(site: Site[AnyCase], k: int, seed: int, val: float = 0.2) -> tuple[Site[AnyCase], ...]:
    """`k` versions of the site in which every patient is tested exactly once; cases.csv plays no part.

    In each, `val` is a share of the patients that are not tested. Raises ValueError unless
    2 <= k <= patients.
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
    """A rounded share, at least one, but leaving `keep`."""
    return max(0, min(max(1, round(fraction * of)), of - keep))


def _shuffled(patients: list[str], site: str, seed: int) -> list[str]:
    material = hashlib.sha256(f"split\0{seed}\0{site}".encode()).digest()
    order = np.random.default_rng(list(material)).permutation(len(patients))
    return [sorted(patients)[i] for i in order]
