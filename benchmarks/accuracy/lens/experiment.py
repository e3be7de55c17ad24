"""Does a lens before the network help a hospital from outside, whatever the network?

`docs/results/protocol-lens.md` says what was fixed before it was run. Each hospital of a set is left out in
turn, the others train, and the hospital's scans come as they are, behind drawn scanners, after kinds of shift
that no training draws, and inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from benchmarks.accuracy.dose.experiment import FOREIGN, POLYPS, png_frames
from benchmarks.accuracy.lens.hospital import Cohort, Hospitals
from benchmarks.accuracy.lens.report import figure_of, sections
from benchmarks.accuracy.lens.rungs import rungs_of
from benchmarks.accuracy.outside.federation import PHANTOM, federation_of
from benchmarks.accuracy.outside.hospital import MOST_SLICES
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from model_store.store import Store
from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Federation
from training.data.federation import load_federation
from training.methods.registry import method
from training.planning.proposal import budget_of
from training.planning_round import plan_federation, replanned
from training.run import Run
from training.tasks import template

VOLUMES = "hippocampus_nifti"
GROUPED = {VOLUMES: ("images", "labels"), FOREIGN: ("BUSI_tumour/images", "BUSI_tumour/masks")}
_GROUPS = ("north", "south", "west", "east")
INSTANCE = "phantom, instance norm"


@dataclass(frozen=True)
class SetOf:
    """A set's size of images, 0 of planned volumes, and fields of FedAvgConfig. `of` is the data's name."""

    size: int
    method: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""
    colour: bool = False


@dataclass(frozen=True)
class Profile:
    """Sets and seeds; `phantoms` patients for each of so many drawn scanners.

    `ablation` are the seeds with each step alone and left out.
    """

    sets: Mapping[str, SetOf]
    seeds: tuple[int, ...] = (31, 32, 33)
    ablation: tuple[int, ...] = (31,)
    scanners: int = 8
    phantoms: int = 8
    rungs: tuple[str, ...] = ()


_BASIC: Mapping[str, Any] = {
    "network": "monai.basicunet",
    "network_arguments": {"features": [8, 8, 16, 32, 64, 8], "norm": ["instance", {"affine": True}]},
}
_PHANTOM: Mapping[str, Any] = {"rounds": 12, "batch_size": 8, "learning_rate": 0.004}
_TINY: Mapping[str, Any] = {"rounds": 2, "width": 4, "batch_size": 8}
PROFILES = {
    "smoke": Profile(
        {PHANTOM: SetOf(32, _TINY), INSTANCE: SetOf(32, {"rounds": 1, "batch_size": 8, **_BASIC}, PHANTOM)},
        (31,),
        (31,),
        3,
        8,
        ("0", "inverted"),
    ),
    "cpu": Profile(
        {
            PHANTOM: SetOf(48, {**_PHANTOM, "width": 8}),
            INSTANCE: SetOf(48, {**_PHANTOM, **_BASIC}, PHANTOM),
            "retina_vessels": SetOf(144, {"rounds": 25, "batch_size": 4}, colour=True),
            "lungs_cxr": SetOf(96, {"rounds": 15}),
            FOREIGN: SetOf(96, {"rounds": 15}),
            "brain_lgg_flair": SetOf(96, {"rounds": 25}),
            VOLUMES: SetOf(0, {"rounds": 12}),
            POLYPS: SetOf(64, {"rounds": 15}, colour=True),
        }
    ),
}


def cells_of(profile: Profile, sites: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Seed by seed, every hospital of `sites` left out."""
    return [
        {
            "set": name,
            "site": site,
            "seed": seed,
            "size": profile.sets[name].size,
            "rungs": [*(profile.rungs or rungs_of(colour=profile.sets[name].colour))],
            "ablation": seed in profile.ablation,
            "method": FedAvgConfig(**profile.sets[name].method).identity(),
        }
        for seed in profile.seeds
        for name, there in sites.items()
        for site in there
    ]


class LensExperiment(Experiment[Profile]):
    """What a lens gives an outside hospital."""

    name = "lens"
    title = "A lens before the network"
    question = "Does a lens before the network help a hospital from outside, whatever the network?"
    profiles: ClassVar[Mapping[str, Profile]] = PROFILES
    tables = (Table("lens.cpu", data="../shared/data"),)
    shows_tries = True
    data_help = "the folder that has the sets; the phantom is written to the state folder"

    def cells(self) -> list[Cell]:
        """The cells of the sets that are there."""
        there = [name for name in self.profile.sets if self._is_there(name)]
        return cells_of(self.profile, {name: self.federation(name).names for name in there})

    def _is_there(self, name: str) -> bool:
        source = self.profile.sets[name].of or name
        return source == PHANTOM or (self.data / source).is_dir()

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train without the hospital, and serve it."""
        name = cell["set"]
        hospitals = Hospitals(
            self.federation(name),
            self.run_of(name),
            self.folder_of(name) / "runs",
            self.options.workers,
            self._foreign(name),
        )
        return hospitals.served(cell["site"], cell["seed"], cell["rungs"], ablation=cell["ablation"])

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The criteria first, then every set."""
        planned = {name: len(self.profile.seeds) for name in self.profile.sets}
        return sections(rows, planned, self.command, self._figure)

    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """What is served to each hospital, by set and rung."""
        return {self._figure: figure_of(rows)}

    @property
    def _figure(self) -> str:
        return f"{self.rows_path.stem}.svg"

    def run_of(self, name: str) -> Callable[[str, int], Run]:
        """The run that trains a set without a site, by the site and the seed."""
        fields, federation = dict(self.profile.sets[name].method), self.federation(name)

        def run(site: str, seed: int) -> Run:
            settings = RunConfig(seed=seed, leave_out=(site,))
            if name != VOLUMES:
                return Run(federation, "fedavg", FedAvgConfig(**fields), settings, scores_tests=False)
            folder = self.folder_of(name) / "plans" / f"{site}.{seed}"
            proposal = plan_federation(
                federation, settings, budget_of("laptop"), folder, resume=folder.exists()
            )
            planned = replanned(federation, proposal)
            config = method("fedavg").config(**{**proposal.options, **fields})
            prepared = config.prepared(Store(self.options.state_dir / "none"), planned.task, self.name)
            return Run(planned, "fedavg", prepared, settings, scores_tests=False)

        return run

    @cached_property
    def _federations(self) -> dict[str, Federation[Any]]:
        return {}

    def federation(self, name: str) -> Federation[Any]:
        """The hospitals of a set."""
        if name not in self._federations:
            self._federations[name] = self._open(name)
        return self._federations[name]

    def _open(self, name: str) -> Federation[Any]:
        chosen = self.profile.sets[name]
        source, folder = chosen.of or name, self.folder_of(name)
        if source in GROUPED:
            federation = load_federation(self._grouped(source), template(source))
            if chosen.size:
                size = {"size": (chosen.size, chosen.size)}
                federation = replace(federation, task=federation.task.model_copy(update=size))
            return federation
        root = png_frames(self.data / POLYPS, folder) if source == POLYPS else self.data
        return federation_of(
            source, root, folder, chosen.size, (self.profile.scanners, self.profile.phantoms)
        )

    def _grouped(self, source: str) -> Path:
        """Every fourth patient of the one site of a set, by name, as a hospital: links to the set's files."""
        root = self.folder_of(source) / "groups"
        if root.exists():
            return root
        images, masks = (self.data.resolve() / source / part for part in GROUPED[source])
        names = sorted(path.name for path in images.iterdir() if not path.name.startswith("."))
        root.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root.parent) as unfinished:
            for group, site in enumerate(_GROUPS):
                for part, folder in (("images", images), ("masks", masks)):
                    (Path(unfinished) / "groups" / site / part).mkdir(parents=True)
                    for each in names[group :: len(_GROUPS)]:
                        (Path(unfinished) / "groups" / site / part / each).symlink_to(folder / each)
            # Another run may have made it meanwhile.
            with suppress(OSError):
                (Path(unfinished) / "groups").rename(root)
        return root

    def _foreign(self, name: str) -> Callable[[Task], Cohort] | None:
        """Scans of another modality than the set's."""
        if name in (VOLUMES, FOREIGN, POLYPS) or not (self.data / FOREIGN).is_dir():
            return None

        def load(task: Task) -> Cohort:
            colour = "luminance" if task.channels == 1 else "replicate"
            own = template(FOREIGN).model_copy(
                update={
                    "size": task.size,
                    "channels": task.channels,
                    "colour": colour,
                    "neighbours": task.neighbours,
                }
            )
            cases = load_federation(self.data / FOREIGN, own).sites[0].cases
            return Cohort.load(cases[:: -(-len(cases) // MOST_SLICES)], own, None, None)

        return load

    def folder_of(self, name: str) -> Path:
        """Where the runs and the data of a set are."""
        return (
            self.options.state_dir
            / f"{self.name}.{self.options.profile}"
            / name.replace(", ", "-").replace(" ", "-")
        )
