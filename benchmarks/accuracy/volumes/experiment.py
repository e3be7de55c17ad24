"""Is a volume segmented better whole, by windows, than slice by slice, and what does it cost?

48 volumes of the hippocampus at three sites; 12 patients are held out, four of each site, and no recipe was
chosen by them. Every arm is trained by federated averaging on the same patients and scored on the scans' own
grid, by the preprocessing, the windows and the way back of the service. A planned arm chooses spacing, patch
and network as `training.federate --plan` does. The README has the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.accuracy.outside.scanner import SEVERITIES, ShiftedScanner
from benchmarks.accuracy.volumes.clock import Clock
from benchmarks.accuracy.volumes.outside import of_outside
from benchmarks.accuracy.volumes.report import SET, sections
from benchmarks.accuracy.volumes.scoring import of_members
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from model_store.store import Store
from model_store.task import Normalisation, Task, VolumeGeometry
from training.config import RunConfig
from training.data.cases import Federation
from training.data.federation import load_federation
from training.methods.registry import method
from training.phantom import VOLUMES, write_federation
from training.phantom.federation import TASK as PHANTOM_SLICES
from training.planning.proposal import Proposal, budget_of
from training.planning_round import plan_federation, replanned
from training.run import Run, execute
from training.tasks import template

SITES = ("north", "south", "west")
PHANTOM_SITES = ("aster", "birch")
# Volumes of a site: training, validation, test.
SHARES = {"train": 10, "val": 2, "test": 4}
# Draws patients to sites and splits; of no training.
_DRAW = 1234


# With which the norms of a plan note what the federation's patches are like; answers stay as they are.
_TRACKED = {"norm_name": ["instance", {"track": True}]}


@dataclass(frozen=True)
class Arm:
    """How a federation is trained, by a method with `fields` of its configuration.

    `form` says whether on slices, on volumes by the profile's geometry, or on volumes by the federation's own
    plan. `set` is another set than the hippocampus, of slices. With `outside` every site is left out in turn,
    and scored.
    """

    form: Literal["slices", "volumes", "planned"]
    method: str
    fields: Mapping[str, Any]
    set: str = SET
    outside: bool = False


@dataclass(frozen=True)
class Profile:
    """Arms, seeds, the windows of the volumes, and the budget of plans; `phantom` writes its own data.

    `size` is that of slices of another set.
    """

    arms: Mapping[str, Arm]
    seeds: tuple[int, ...] = (0, 1, 2)
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)
    patch: tuple[int, int, int] = (32, 48, 32)
    budget: str = "laptop"
    size: int = 144
    phantom: bool = False


_TINY = {"rounds": 1, "least_steps": 2}
_NARROW = {**_TINY, "width": 4}
_RETINA: Mapping[str, Any] = {"rounds": 25, "batch_size": 4}
PROFILES = {
    "smoke": Profile(
        {
            "2-D": Arm("slices", "fedavg", _NARROW),
            "3-D": Arm("volumes", "iop-fl", {**_NARROW, "personal_epochs": 1}),
            "planned": Arm("planned", "iop-fl", {**_TINY, "personal_epochs": 1}),
            "planned, outside": Arm("planned", "iop-fl", _TINY, outside=True),
        },
        (0,),
        (3.0, 3.0, 4.0),
        (24, 24, 10),
        phantom=True,
    ),
    "cpu": Profile(
        {
            "planned": Arm("planned", "iop-fl", {}),
            "2-D": Arm("slices", "fedavg", {"rounds": 25}),
            "2-D, dice_ce": Arm("slices", "fedavg", {"rounds": 25, "loss": "dice_ce"}),
            "vessels": Arm("slices", "fedavg", _RETINA, "retina_vessels"),
            "vessels, dice_ce": Arm("slices", "fedavg", {**_RETINA, "loss": "dice_ce"}, "retina_vessels"),
            "planned, outside": Arm("planned", "iop-fl", {}, outside=True),
            "planned, outside, no drawn scanners": Arm("planned", "iop-fl", {"intensity": 0.0}, outside=True),
            "planned, FedBN": Arm("planned", "fedbn", {}),
            "planned, 40 rounds": Arm("planned", "iop-fl", {"rounds": 40}),
            "3-D": Arm("volumes", "iop-fl", {"rounds": 30}),
            "3-D, width 8": Arm("volumes", "iop-fl", {"rounds": 30, "width": 8}),
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
        """Seed by seed, arm by arm, and site by site where one is left out."""
        profile = self.profile
        sites = SITES if not profile.phantom else PHANTOM_SITES
        return [
            {
                "set": "phantom" if profile.phantom else arm.set,
                "arm": name,
                "seed": seed,
                "method": arm.method,
                "config": self._config(arm, self._task(arm)).identity(),
                **self._form(arm),
                **({"outside": site} if site else {}),
            }
            for seed in profile.seeds
            for name, arm in profile.arms.items()
            for site in (sites if arm.outside else ("",))
        ]

    def _form(self, arm: Arm) -> Cell:
        profile = self.profile
        if arm.form == "planned":
            return {"budget": profile.budget}
        if arm.form == "volumes":
            return {"spacing": [*profile.spacing], "patch": [*profile.patch]}
        return {} if arm.set == SET else {"size": profile.size}

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train, and score every model on the held-out patients of the site that it is for.

        A site that is left out is scored with all of its patients, as they are and through a drawn scanner.
        """
        arm, outside = self.profile.arms[cell["arm"]], cell.get("outside")
        leave_out = () if outside is None else (outside,)
        settings = RunConfig(seed=cell["seed"], consent="all", leave_out=leave_out)
        federation = load_federation(self._folder_of(arm), self._task(arm))
        clock, resumed = Clock(work), (work / "run").exists()
        proposal = None
        if arm.form == "planned":
            budget = budget_of(self.profile.budget)
            proposal = plan_federation(federation, settings, budget, work / "plan", resume=resumed)
            federation = replanned(federation, proposal)
        run = Run(
            federation, arm.method, self._config(arm, federation.task, proposal), settings, scores_tests=False
        )
        # In this process, so that its CPU time is that of the training.
        done = execute(run, work / "run", workers=0, resume=resumed, observer=clock)
        seconds = round(clock.seconds, 1)
        if outside is None:
            models, failed = of_members(done), None
        else:
            scanner = ShiftedScanner.of(outside, cell["seed"]).at(SEVERITIES[-1])
            models, failed = of_outside(done, federation.site(outside), scanner)
        drafts = done.publication.models
        return {
            "models": models,
            "labels": [c.labels[-1] for c in federation.task.classes[1:]],
            "parameters": sum(tensor.numel() for tensor in drafts[0].weights.values()),
            "rounds": max(entry.round + 1 for entry in done.history if entry.phase == "train"),
            "cpu_seconds": seconds,
            "validation": drafts[0].metrics.get("val_dice"),
            **({} if proposal is None else {"plan": _planned(proposal)}),
            **({} if outside is None else {"held_out": self._held_out(federation, outside)}),
            **({} if failed is None else {"failed": failed}),
        }

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The arms side by side, then patient by patient."""
        return sections(rows)

    def _task(self, arm: Arm) -> Task:
        """The task that an arm is given; a plan replaces its geometry."""
        if arm.set != SET:
            sides = (self.profile.size, self.profile.size)
            return template(arm.set).model_copy(update={"size": sides})
        slices = PHANTOM_SLICES if self.profile.phantom else template(SET)
        if arm.form == "slices":
            return slices
        if self.profile.phantom:
            return VOLUMES
        if arm.form == "planned":
            return slices
        return Task(
            name="hippocampus",
            labels=slices.labels,
            normalisation=Normalisation(scope="volume", method="zscore", percentiles=(1, 99)),
            geometry=VolumeGeometry(spacing=self.profile.spacing, patch=self.profile.patch),
        )

    def _config(self, arm: Arm, task: Task, proposal: Proposal | None = None) -> Any:
        """The configuration, of which a plan fills what the arm does not say."""
        chosen, fields = method(arm.method), dict(arm.fields)
        if proposal is not None:
            fields = {**proposal.options, **fields}
            if arm.outside:
                fields["network_arguments"] = {**fields["network_arguments"], **_TRACKED}
        # No method of an arm looks into the store.
        return chosen.config(**fields).prepared(Store(self.options.state_dir / "none"), task, self.name)

    def _held_out(self, federation: Federation, site: str) -> list[str]:
        """The test patients of a site, which the other arms are scored with."""
        return [f"{site}/{case.patient}" for case in federation.site(site).of_split("test")]

    def _folder_of(self, arm: Arm) -> Path:
        return self._folder if arm.set == SET else self.data / arm.set

    @cached_property
    def _folder(self) -> Path:
        """The federation, written once: links to the set's files, with splits that are the same each time."""
        folder = self.options.state_dir / f"{self.name}.{self.options.profile}" / "federation"
        if folder.exists():
            return folder  # another run may train on it
        if self.profile.phantom:
            return write_federation(folder, PHANTOM_SITES, 5, task=VOLUMES)
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


def _planned(proposal: Proposal) -> dict[str, Any]:
    """What of a plan is shown: geometry and options."""
    geometry = proposal.task.geometry
    assert geometry is not None
    return {
        "spacing": geometry.spacing and [*geometry.spacing],
        "patch": [*geometry.patch],
        "options": dict(proposal.options),
    }
