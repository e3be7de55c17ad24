"""What does a hospital get that Locum has never seen, and is it better than the global model as it is?

`docs/results/protocol-outside.md` says what was fixed before it was run. Each hospital of a set is left out
in turn, and the others federate. The scans come as they are and, for real sets, through a scanner that can be
turned up. What `auto` serves is measured by `dose`; rows of `served` are of the recipes that a federation
practised before the dose by shift, and no more of them are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.accuracy.unseen.hospital import Hospitals
from benchmarks.accuracy.unseen.report import figure_of, sections
from benchmarks.accuracy.unseen.scanner import SEVERITIES
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from training.data.cases import Federation
from training.data.federation import load_federation
from training.methods.iop_fl import IopFlConfig
from training.phantom import SCANNERS, write_federation
from training.tasks import template

PHANTOM = "phantom"
# Presets beside InTEnt, which takes scans one by one.
LEARNED = ("statistics", "tent", "paper")
# Its rows are a record of code that is gone.
RECORDED = "served"
# What is computed first answers the question.
PARTS = (RECORDED, "inside", "paper", "reference")
# For the record, of seed 0.
LAST = ("learned", "official")


@dataclass(frozen=True)
class SetOf:
    """A set's size of images, and fields of IopFlConfig."""

    size: int
    method: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """How often, on what; `phantoms` patients for each of so many drawn scanners.

    Seeds from `float32_from` on train in float32, as the protocol's second amendment says. All seeds
    are from before training with randomised domains.
    """

    seeds: int
    sets: Mapping[str, SetOf]
    scanners: int = 8
    phantoms: int = 8
    float32_from: int = 2

    def method(self, set_: str, seed: int) -> dict[str, Any]:
        """The fields of IopFlConfig for a set and a seed."""
        precision = {"precision": "float32"} if seed >= self.float32_from else {}
        return {"domain_randomisation": "none", **self.sets[set_].method, **precision}


_TINY = {"rounds": 2, "width": 4, "batch_size": 8}
PROFILES = {
    "smoke": Profile(1, {PHANTOM: SetOf(32, _TINY)}, 3, 3),
    "cpu": Profile(
        3,
        {
            PHANTOM: SetOf(48, {"rounds": 12, "width": 8, "batch_size": 8, "learning_rate": 0.004}),
            "lungs_cxr": SetOf(96, {"rounds": 15, "precision": "bfloat16"}),
            "retina_vessels": SetOf(144, {"rounds": 25, "batch_size": 4, "precision": "bfloat16"}),
            "brain_lgg_flair": SetOf(96, {"rounds": 25, "precision": "bfloat16"}),
        },
    ),
}


class Unseen(Experiment[Profile]):
    """What `auto` serves an outside hospital."""

    name = "unseen"
    title = "What an unseen hospital is served"
    question = "Is what Locum serves by default to an unseen hospital better than the global model?"
    profiles = PROFILES
    tables = (Table("unseen.cpu", data="../shared/data"),)
    # Sites are known from the data, so the page shows every row.
    shows_tries = True
    data_help = "the folder that has the sets; the phantom is written to the state folder"

    def cells(self) -> list[Cell]:
        """The cells of the sets that are there."""
        sites = {set_: self._sites(set_) for set_ in self._present()}
        cells = cells_of(self.options.profile, self.profile, sites)
        return [cell for cell in cells if cell["part"] != RECORDED]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """One part at one hospital."""
        set_, site, seed = cell["set"], cell["site"], cell["seed"]
        hospitals = replace(self._hospitals(set_), method=self.profile.method(set_, seed))
        if cell["part"] == "inside":
            return hospitals.inside(seed)
        if cell["part"] == "reference":
            return hospitals.reference(site, seed)
        if cell["part"] == "official":
            return hospitals.official(site, seed)
        severities = cell["severities"]
        if cell["part"] == "paper":
            return hospitals.paper(site, seed, severities)
        return hospitals.learned(site, seed, LEARNED, severities[:: max(len(severities) - 1, 1)])

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The criteria first, then every set."""
        return sections(rows, self._figure)

    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """What each hospital was served."""
        return {self._figure: figure_of(rows)}

    @property
    def _figure(self) -> str:
        return f"{self.rows_path.stem}.svg"

    def _present(self) -> list[str]:
        return [set_ for set_ in self.profile.sets if set_ == PHANTOM or (self.data / set_).is_dir()]

    @cached_property
    def _opened(self) -> dict[str, Hospitals]:
        return {}

    def _hospitals(self, set_: str) -> Hospitals:
        if set_ not in self._opened:
            self._opened[set_] = self._open(set_)
        return self._opened[set_]

    def _open(self, set_: str) -> Hospitals:
        chosen = self.profile.sets[set_]
        folder = self.options.state_dir / f"{self.name}.{self.options.profile}" / set_
        federation = federation_of(set_, self.data, folder, chosen.size, self._phantoms)
        return Hospitals(federation, folder / "runs", chosen.method, self.options.workers)

    @property
    def _phantoms(self) -> tuple[int, int]:
        return self.profile.scanners, self.profile.phantoms

    def _sites(self, set_: str) -> tuple[str, ...]:
        return self._hospitals(set_).federation.names


def federation_of(
    set_: str, data: Path, folder: Path, size: int, phantoms: tuple[int, int]
) -> Federation[Any]:
    """The set at a size, from the folder `data`; the phantom is written to `folder` first.

    `phantoms`: how many drawn scanners, and patients of each.
    """
    root = data / set_
    if set_ == PHANTOM:
        root = folder / "data"
        if not root.exists():
            sites = tuple(SCANNERS)[: phantoms[0]]
            # Another run may need it at the same time: it must be whole when it appears.
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder) as unfinished:
                write_federation(Path(unfinished) / "data", sites, phantoms[1], size)
                with suppress(OSError):
                    (Path(unfinished) / "data").rename(root)
    federation = load_federation(root, None if set_ == PHANTOM else template(set_))
    return replace(federation, task=federation.task.model_copy(update={"size": (size, size)}))


def cells_of(name: str, profile: Profile, sites: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Every cell that has or may have a row, seed by seed. `sites` by set."""
    first = [
        cell_of(name, profile, set_, site, seed, part)
        for seed in range(profile.seeds)
        for part in PARTS
        for set_, there in sites.items()
        for site in (("all",) if part == "inside" else there)
    ]
    last = [
        cell_of(name, profile, set_, site, 0, part)
        for part in LAST
        for set_, there in sites.items()
        for site in there
    ]
    return first + last


def cell_of(name: str, profile: Profile, set_: str, site: str, seed: int, part: str) -> Cell:
    """A cell, with every field of the method: a changed default makes new cells."""
    return {
        "set": set_,
        "site": site,
        "seed": seed,
        "part": part,
        "profile": name,
        "size": profile.sets[set_].size,
        "severities": [0] if set_ == PHANTOM or part == "official" else [*SEVERITIES],
        "method": IopFlConfig(**profile.method(set_, seed)).identity(),
    }
