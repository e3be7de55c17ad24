"""Hospitals of `polyp_centres` as the clients of a table: few frames of each, dealt by sequence.

A frame with a polyp is a patient; frames without one come from a few sequences, of which none is on both
sides of a split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.accuracy.papers.classification import Classify, Clients
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Task
from training.local.images import Images
from training.local.site import SiteData
from training.tasks import template

SET = "polyp_centres"
SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class Frames:
    """How many frames of each class a hospital has in each split, and the pre-trained weights: the name of
    their file, and the digest of the file that they were published in."""

    weights: str
    sha256: str
    train: int
    val: int
    test: int

    def count(self, split: str) -> int:
        """Frames of each class."""
        found: int = getattr(self, split)
        return found


@dataclass(frozen=True)
class Hospitals(Clients):
    """Every hospital is a client; `outside` names one that takes no part and is tested alone."""

    frames: Frames | None = None
    outside: str | None = None

    @cached_property
    def task(self) -> Task:
        """The task of the template, at the size of its frames."""
        return template(SET)

    @cached_property
    def _hospitals(self) -> dict[str, SiteData[Images]]:
        folders = sorted(path for path in self.folder.iterdir() if path.is_dir())
        return {folder.name: self._read(folder) for folder in folders}

    @property
    def data(self) -> dict[str, SiteData[Images]]:
        """The hospitals that train."""
        return {name: own for name, own in self._hospitals.items() if name != self.outside}

    @property
    def aside(self) -> SiteData[Images]:
        """The part that no client holds: the hospital outside. Raise ValueError where there is none."""
        if self.outside is None:
            raise ValueError(f"{self.set}: no frames are set aside, since no hospital is outside")
        return self._hospitals[self.outside]

    @property
    def place(self) -> dict[str, Any]:
        """What a run's identity says about its data."""
        assert self.frames is not None
        counts = {split: self.frames.count(split) for split in SPLITS}
        return {"set": SET, "seed": self.seed, "outside": self.outside, **counts}

    def judge(self, models: Mapping[str, Classify]) -> dict[str, dict[str, Any]]:
        """As of clients; with a hospital outside, of the shared model on that hospital's frames alone."""
        if self.outside is None:
            return super().judge(models)
        alone = replace(self, outside=None)
        answer, own = next(iter(models.values())), alone._hospitals[self.outside].test
        right = (answer(own).numpy() == own.targets).astype(int)
        scores = dict(zip(own.cases, right.tolist(), strict=True))
        return {self.outside: {"ours": scores, "paper": round(float(right.mean()), 5)}}

    def _read(self, folder: Path) -> SiteData[Images]:
        assert self.frames is not None
        draw = np.random.default_rng([self.seed, *folder.name.encode()])
        dealt: dict[str, list[tuple[Path, int]]] = {split: [] for split in SPLITS}
        for label, name in enumerate(self.task.class_names):
            sequences: dict[str, list[Path]] = {}
            for path in sorted((folder / name).iterdir()):
                sequences.setdefault(path.name.split("_")[0], []).append(path)
            left = [sequences[key] for key in draw.permutation(sorted(sequences))]
            for split in SPLITS:
                count, taken = self.frames.count(split), list[Path]()
                # Training has what is left of the sequences; the others as few sequences as are enough.
                while left and (split == "train" or len(taken) < count):
                    taken += left.pop()
                chosen = draw.permutation(len(taken))[:count]
                dealt[split] += [(taken[index], label) for index in sorted(chosen)]
        parts = {split: self._examples(frames) for split, frames in dealt.items()}
        return SiteData(folder.name, parts["train"], parts["val"], parts["test"], None)

    def _examples(self, frames: list[tuple[Path, int]]) -> Images:
        images = []
        for path, _ in frames:
            with Image.open(path) as image:
                scan = Scan(np.asarray(image.convert("RGB")), None, "png")
            images.append(prepare(scan, self.task).slices)
        return Images(
            np.concatenate(images),
            np.array([label for _, label in frames], np.int64),
            tuple(path.name.split("_")[0] for path, _ in frames),
            tuple(path.stem for path, _ in frames),
            (0,) * len(frames),
        )
