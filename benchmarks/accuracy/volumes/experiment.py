"""Is a volume segmented better whole, by windows, than slice by slice, and what does it cost?

48 volumes of the hippocampus at three sites; 12 patients are held out, four of each site, and no recipe was
chosen by them. Every arm is trained by federated averaging on the same patients and scored on the scans' own
grid, by the preprocessing, the windows and the way back of the service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.accuracy.volumes.report import sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.evaluation import predict
from benchmarks.harness.experiment import Experiment, Table
from model_store.preprocessing import (
    VolumeRestorer,
    align,
    class_map,
    prepare,
    prepare_volume,
    restore,
)
from model_store.preprocessing.windows import slab_axis
from model_store.store import Store
from model_store.task import Normalisation, Task, VolumeGeometry
from personalization.metrics import dice
from personalization.surfaces import surface_distances
from training.config import RunConfig
from training.data.cases import Case, Federation
from training.data.federation import load_federation
from training.data.scan_files import read_case, read_mask
from training.methods.common.local_training import network_of
from training.methods.common.sliding_window import windowed
from training.methods.registry import method
from training.phantom import VOLUMES, write_federation
from training.phantom.federation import TASK as PHANTOM_SLICES
from training.run import Run, execute
from training.tasks import template

SET = "hippocampus_nifti"
SITES = ("north", "south", "west")
# Volumes of a site: training, validation, test.
SHARES = {"train": 10, "val": 2, "test": 4}
# Draws patients to sites and splits; of no training.
_DRAW = 1234


@dataclass(frozen=True)
class Arm:
    """How a federation is trained: on slices or volumes, by a method with `fields` of its configuration."""

    volumes: bool
    method: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """Arms, seeds, and the windows of the volumes; `phantom` writes its own data."""

    arms: Mapping[str, Arm]
    seeds: tuple[int, ...] = (0, 1, 2)
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)
    patch: tuple[int, int, int] = (32, 48, 32)
    phantom: bool = False


_TINY = {"rounds": 1, "width": 4, "least_steps": 2}
PROFILES = {
    "smoke": Profile(
        {
            "2-D": Arm(False, "fedavg", _TINY),
            "3-D": Arm(True, "iop-fl", {**_TINY, "personal_epochs": 1}),
        },
        (0,),
        (3.0, 3.0, 4.0),
        (24, 24, 10),
        True,
    ),
    "cpu": Profile(
        {
            "3-D": Arm(True, "iop-fl", {"rounds": 30}),
            "3-D, width 8": Arm(True, "iop-fl", {"rounds": 30, "width": 8}),
            "2-D": Arm(False, "fedavg", {"rounds": 25}),
            "2-D, dice_ce": Arm(False, "fedavg", {"rounds": 25, "loss": "dice_ce"}),
        }
    ),
}


class Volumes(Experiment[Profile]):
    """Dice, HD95 and surface Dice of federations on slices and on volumes."""

    name = "volumes"
    title = "Slices or volumes"
    question = "Is a volume segmented better whole, by windows, than slice by slice, and at which cost?"
    profiles = PROFILES
    tables = (Table("volumes.cpu", data="../shared/data"),)
    data_help = f"the folder that has {SET}; the profile smoke writes a phantom and reads nothing there"

    def cells(self) -> list[Cell]:
        """Seed by seed, arm by arm."""
        profile = self.profile
        return [
            {
                "set": "phantom" if profile.phantom else SET,
                "arm": name,
                "seed": seed,
                "method": arm.method,
                "config": self._config(arm).identity(),
                **({"spacing": [*profile.spacing], "patch": [*profile.patch]} if arm.volumes else {}),
            }
            for seed in profile.seeds
            for name, arm in profile.arms.items()
        ]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train, and score every model on the held-out patients of the site that it is for."""
        arm = self.profile.arms[cell["arm"]]
        federation = load_federation(self._folder, self._task(arm))
        settings = RunConfig(seed=cell["seed"], consent="all")
        run = Run(federation, arm.method, self._config(arm), settings, scores_tests=False)
        before, resumed = time.process_time(), (work / "run").exists()
        # In this process, so that its CPU time is that of the training.
        done = execute(run, work / "run", workers=0, resume=resumed)
        seconds = None if resumed else round(time.process_time() - before, 1)
        models: dict[str, Any] = {}
        for draft in done.publication.models:
            network = network_of(draft.network, draft.weights, torch.device("cpu")).eval()
            for site in run.sites():
                if draft.site in (None, site.name):
                    own = models.setdefault("global" if draft.site is None else "personal", {})
                    for case in site.of_split("test"):
                        own[f"{site.name}/{case.patient}"] = _scores(network, case, federation)
        parameters = sum(tensor.numel() for tensor in done.publication.models[0].weights.values())
        rounds = max(entry.round + 1 for entry in done.history if entry.phase == "train")
        return {
            "models": models,
            "labels": [c.labels[-1] for c in federation.task.classes[1:]],
            "parameters": parameters,
            "rounds": rounds,
            "cpu_seconds": seconds,
            "validation": done.publication.models[0].metrics.get("val_dice"),
        }

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The arms side by side, then patient by patient."""
        return sections(rows)

    def _task(self, arm: Arm) -> Task:
        slices = PHANTOM_SLICES if self.profile.phantom else template(SET)
        if not arm.volumes:
            return slices
        if self.profile.phantom:
            return VOLUMES
        return Task(
            name="hippocampus",
            labels=slices.labels,
            normalisation=Normalisation(scope="volume", method="zscore", percentiles=(1, 99)),
            geometry=VolumeGeometry(spacing=self.profile.spacing, patch=self.profile.patch),
        )

    def _config(self, arm: Arm) -> Any:
        config = method(arm.method).config(**arm.fields)
        # No method of an arm looks into the store.
        return config.prepared(Store(self.options.state_dir / "none"), self._task(arm), self.name)

    @cached_property
    def _folder(self) -> Path:
        """The federation, written once: links to the set's files, with splits that are the same each time."""
        folder = self.options.state_dir / f"{self.name}.{self.options.profile}" / "federation"
        if folder.exists():
            return folder  # another run may train on it
        if self.profile.phantom:
            return write_federation(folder, ("aster", "birch"), 4, task=VOLUMES)
        source = (self.data / SET).resolve()
        names = sorted(path.name for path in (source / "images").glob("*.nii.gz"))
        order = np.random.default_rng(_DRAW).permutation(sum(SHARES.values()) * len(SITES))
        # The held-out patients come first in the order, then each site's others.
        held, rest = np.split(order, [SHARES["test"] * len(SITES)])
        for index, site in enumerate(SITES):
            own = np.split(rest, len(SITES))[index]
            split = {
                "train": own[: SHARES["train"]],
                "val": own[SHARES["train"] :],
                "test": np.split(held, len(SITES))[index],
            }
            rows = ["file,patient,split"]
            for part in ("images", "masks"):
                (folder / site / part).mkdir(parents=True)
            for which, numbers in split.items():
                for number in numbers:
                    name = names[number]
                    (folder / site / "images" / name).symlink_to(source / "images" / name)
                    (folder / site / "masks" / name).symlink_to(source / "labels" / name)
                    rows.append(f"{name},{name.removesuffix('.nii.gz')},{which}")
            (folder / site / "cases.csv").write_text("\n".join(rows) + "\n")
        return folder


@torch.no_grad()
def answered(network: nn.Module, case: Case, task: Task) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """Answer and truth of a case: class indices [I, J, K] on the scan's own grid, and its spacing in mm."""
    scan = read_case(case, task)
    assert scan.affine is not None
    mask = read_mask(case.mask)
    truth = class_map(align(mask, scan.grid, scan.affine, scan.other_affine), task)
    spacing = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
    if task.geometry is None:
        prepared = prepare(scan, task)
        found = restore(predict(network, torch.tensor(prepared.slices)).numpy(), prepared.geometry)
    else:
        volume, geometry = prepare_volume(scan, task), task.geometry
        axis = slab_axis(volume.volume.shape[1:], geometry.patch)
        restorer = VolumeRestorer(volume.grid, task, axis, geometry.average)
        for plane in windowed(network, volume.volume, task, torch.device("cpu"), axis):
            restorer.add(plane)
        found = restorer.finish()
    predicted, true = (torch.from_numpy(np.ascontiguousarray(each)) for each in (found, truth))
    return predicted, true, tuple(map(float, spacing))


def _scores(network: Any, case: Case, federation: Federation) -> dict[str, list[float | None]]:
    """Dice and surface metrics of each class of one case, on the scan's own grid."""
    predicted, truth, spacing = answered(network, case, federation.task)
    classes = len(federation.task.classes)
    found: dict[str, Tensor] = {"dice": dice(predicted[None], truth[None], classes)[0, 1:]}
    found |= surface_distances(predicted, truth, [(index,) for index in range(1, classes)], spacing)
    return {
        name: [None if math.isnan(value) else round(value, 5) for value in values.tolist()]
        for name, values in found.items()
    }
