"""Do the dose by shift, and training with batches of one kind, help a hospital from outside?

The third amendment of `docs/results/protocol-outside.md` says what was fixed before it was run. Each hospital
of a set is left out in turn. The others train by the recipe before and by the one with batches of one kind,
and the hospital is served what `auto` makes of its scans: as they are, behind a scanner that is turned up,
and after kinds of shift that neither training nor practice draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from PIL import Image

from benchmarks.accuracy.dose.classification import Classifiers
from benchmarks.accuracy.dose.hospital import RUNGS, Hospitals
from benchmarks.accuracy.dose.report import changes, not_computed, sections
from benchmarks.accuracy.outside.federation import PHANTOM, SetOf, federation_of
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.figures import strip_chart
from training.choices.fedavg import FedAvgConfig
from training.data.cases import Federation
from training.data.federation import load_federation
from training.tasks import template

POLYPS = "polyp_centres"
# A set of another modality than any other here.
FOREIGN = "breast_ultrasound"
# Sites, folder of runs, method, workers and device.
_Parts: TypeAlias = tuple[Federation[Any], Path, Mapping[str, Any], int, str]
# Fields of FedAvgConfig.
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "before": {"domain_randomisation": "none"},
    "after": {"domain_randomisation": "throughout"},
}

# With masks, by the default alone.
PARTS: Mapping[str, Sequence[str]] = {"served": tuple(TRAININGS), "masks": ("before",)}


@dataclass(frozen=True)
class Profile:
    """Sets and seeds; `phantoms` patients for each of so many drawn scanners.

    `decides`: seeds of the protocol's seventh amendment, for segmentations that are served.
    """

    sets: Mapping[str, SetOf]
    seeds: tuple[int, ...] = (3, 4, 5)
    scanners: int = 8
    phantoms: int = 8
    decides: tuple[int, ...] = ()


_TINY = {"rounds": 2, "width": 4, "batch_size": 8}
_SETS = {
    "retina_vessels": SetOf(144, {"rounds": 25, "batch_size": 4}),
    "lungs_cxr": SetOf(96, {"rounds": 15}),
    PHANTOM: SetOf(48, {"rounds": 12, "width": 8, "batch_size": 8, "learning_rate": 0.004}),
    "brain_lgg_flair": SetOf(96, {"rounds": 25}),
    POLYPS: SetOf(64, {"rounds": 15}),
}
PROFILES = {
    "smoke": Profile({PHANTOM: SetOf(32, _TINY)}, (3,), 3, 6),
    "cpu": Profile(_SETS, decides=(6, 7)),
}


class Dose(Experiment[Profile]):
    """What `auto` serves an outside hospital by the dose by shift, after two trainings."""

    name = "dose"
    title = "A dose by shift, and training with batches of one kind"
    question = "Do the dose by shift, and training with batches of one kind, help a hospital from outside?"
    profiles = PROFILES
    tables = (Table("dose.cpu", data="../shared/data"),)
    # Sites are known from the data, so the page shows every row.
    shows_tries = True
    data_help = "the folder that has the sets; the phantom is written to the state folder"

    def cells(self) -> list[Cell]:
        """The cells of the sets that are there."""
        there = [set_ for set_ in self.profile.sets if set_ == PHANTOM or (self.data / set_).is_dir()]
        return cells_of(self.profile, {set_: self._federation(set_).names for set_ in there})

    @property
    def _device(self) -> str:
        """A GPU where there is one: a result has the device that made it."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train without the hospital, and serve it."""
        federation, folder = self._federation(cell["set"]), self._folder(cell["set"]) / "runs"
        parts = (federation, folder, cell["method"], self.options.workers, self._device)
        served = {"segmentation": self._by_hospitals, "classification": self._by_classifiers}
        return served[federation.task.kind](cell, parts)

    def _by_classifiers(self, cell: Cell, parts: _Parts) -> dict[str, Any]:
        return Classifiers(*parts).served(cell["site"], cell["seed"], cell["rungs"])

    def _by_hospitals(self, cell: Cell, parts: _Parts) -> dict[str, Any]:
        hospitals = Hospitals(*parts, self._foreign)
        if cell["part"] == "masks":
            severities = [int(rung) for rung in cell["rungs"] if rung in ("0", "3")]
            return hospitals.by_masks(cell["site"], cell["seed"], severities)
        return hospitals.served(cell["site"], cell["seed"], cell["rungs"])

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The criteria first, then every set, and what is not computed yet."""
        planned: dict[tuple[str, str, str], list[int]] = {}
        for seed, part, training, set_ in _planned(self.profile, tuple(self.profile.sets)):
            planned.setdefault((part, training, set_), []).append(seed)
        figure = self._figure if changes(rows) else ""
        return [*sections(rows, figure), *not_computed(rows, planned, self.command)]

    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """What `auto` changes at each hospital, by set and rung."""
        found = changes(rows)
        return {self._figure: strip_chart(found, "points")} if found else {}

    @property
    def _figure(self) -> str:
        return f"{self.rows_path.stem}.svg"

    @cached_property
    def _federations(self) -> dict[str, Federation[Any]]:
        return {}

    def _federation(self, set_: str) -> Federation[Any]:
        if set_ not in self._federations:
            size, phantoms = self.profile.sets[set_].size, (self.profile.scanners, self.profile.phantoms)
            folder = self._folder(POLYPS)
            root = png_frames(self.data / POLYPS, folder) if set_ == POLYPS else self.data
            found = federation_of(set_, root, self._folder(set_), size, phantoms)
            self._federations[set_] = found
        return self._federations[set_]

    def _folder(self, set_: str) -> Path:
        return self.options.state_dir / f"{self.name}.{self.options.profile}" / set_

    @cached_property
    def _foreign(self) -> Federation | None:
        root = self.data / FOREIGN
        return load_federation(root, template(FOREIGN)) if root.is_dir() else None


def png_frames(source: Path, folder: Path) -> Path:
    """A folder with the polyps' frames as PNG, made once: they come as JPEG, which Locum refuses."""
    if not (folder / POLYPS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as unfinished:
            for frame in source.glob("*/*/*.jpg"):
                copy = Path(unfinished) / POLYPS / frame.relative_to(source).with_suffix(".png")
                copy.parent.mkdir(parents=True, exist_ok=True)
                Image.open(frame).save(copy)
            # Another run may have made it meanwhile.
            with suppress(OSError):
                (Path(unfinished) / POLYPS).rename(folder / POLYPS)
    return folder


def cells_of(profile: Profile, sites: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Seed by seed, each training with every hospital of `sites` left out; then with masks."""
    return [
        _cell(profile, set_, site, seed, training, part)
        for seed, part, training, set_ in _planned(profile, tuple(sites))
        for site in sites[set_]
    ]


def _planned(profile: Profile, sets: Sequence[str]) -> list[tuple[int, str, str, str]]:
    """Seed, part, training and set, in the order in which they are computed."""
    asked = [
        (seed, part, training, set_)
        for seed in profile.seeds
        for part, trainings in PARTS.items()
        for set_ in sets
        if part == "served" or set_ != POLYPS
        for training in trainings
    ]
    return asked + [
        (seed, "served", training, set_)
        for seed in profile.decides
        for training in PARTS["served"]
        for set_ in sets
        if set_ != POLYPS
    ]


def _cell(profile: Profile, set_: str, site: str, seed: int, training: str, part: str) -> Cell:
    chosen = profile.sets[set_]
    return {
        "part": part,
        "set": set_,
        "site": site,
        "seed": seed,
        "training": training,
        "size": chosen.size,
        "rungs": ["0"] if set_ == PHANTOM else [*RUNGS],
        "method": FedAvgConfig(**chosen.method, **TRAININGS[training]).identity(),
    }
