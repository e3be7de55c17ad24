"""Does a federation over organs help, which parts of FedOAP help, and what can hospitals outside it use?

Sites: bladder MRI, dermoscopy, breast ultrasound, brain FLAIR; every seed tests other patients. Arms, all
with the steps of FedOAP's two stages at every site: local-only, FedAvg, FedPer, FedRep, FedBN, FedAvg +
fine-tuning, FedOAP without its query stage (and so attention and bank), bank, adapter or perturbed loss, and
FedOAP. Two sites are outside the federation: breast DCE-MRI, tested zero-shot only, and contrast-enhanced
brain MRI, tested zero-shot and after training on a few labelled images from FedOAP's weights, FedAvg's or
random ones. Test labels, and all labels of an outside site except those of its few images, are for reporting
only.

A cell is (seed, what is trained). A seed of profile `cpu` (eleven cells) takes 29,040 steps inside. Two more
cells, of one seed, train for twice the rounds: they check whether validation had reached a plateau, and it
had not. Hence profile `longer`: twice the rounds, and a second stage of two passes over a large site, as in
the paper, because validation fell over the short one (test Dice was known by then as well). The controls of
its first seed showed no plateau either, and another result in test, so it has controls of every seed.
`short` is a quarter of `cpu`; `full` is for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cross_organ.arms import CONTROLS, TRAINED, compute
from benchmarks.accuracy.cross_organ.data import SITES, Hospitals, assemble
from benchmarks.accuracy.cross_organ.patients import digest, read, regrouped
from benchmarks.accuracy.cross_organ.report import sections
from benchmarks.harness.cells import Cell, Row, in_order
from benchmarks.harness.experiment import Experiment, Table
from training.data.federation import load_federation
from training.methods.fedoap.config import FedOapConfig
from training.tasks import template


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `method` has fields of FedOapConfig.

    `most` bounds a site's images for training and for validation. `joining_steps` steps in batches of
    `joining_batch` are taken with each of the `budgets` of labels. The first `control_seeds` seeds have cells
    of twice the rounds.
    """

    size: int
    seeds: int
    joining_steps: int
    most: tuple[int, int]
    method: Mapping[str, Any]
    budgets: tuple[int, ...] = (5, 10, 20)
    joining_batch: int = 4
    device: str = "cpu"
    control_seeds: int = 1


# The rival methods choose no best round, so all arms keep their last.
_LAST = {"selection": "last"}
_CPU = {"width": 16, "batch_size": 4, "precision": "bfloat16", "rounds": 22, "local_steps": 30, **_LAST}
_SMOKE = {"width": 4, "batch_size": 4, "rounds": 2, "local_steps": 2, **_LAST}
PROFILES = {
    "smoke": Profile(32, 1, 60, (12, 6), _SMOKE),
    "short": Profile(96, 3, 60, (200, 24), {**_CPU, "rounds": 4}),
    "cpu": Profile(96, 3, 60, (500, 48), _CPU),
    "longer": Profile(96, 3, 60, (500, 48), {**_CPU, "rounds": 44, "fine_tune_steps": 120}, control_seeds=3),
    "full": Profile(
        128, 3, 240, (1000, 200), {"width": 64, "rounds": 50, "local_steps": 40, **_LAST}, device="cuda"
    ),
}


class CrossOrgan(Experiment[Profile]):
    """FedOAP on sites of different organs, and its rivals."""

    name = "cross_organ"
    title = "Across organs"
    question = "Does a federation over organs help, and which parts of FedOAP help?"
    profiles = PROFILES
    tables = (
        Table("cross_organ.cpu", data="../shared/data"),
        Table("cross_organ.longer", "longer", "../shared/data"),
    )
    data_help = f"the folder with {', '.join(SITES.values())}"

    @cached_property
    def _hospitals(self) -> Hospitals:
        side = self.profile.size
        task = template("tumour_any_organ").model_copy(update={"size": (side, side)})
        root = assemble(self.data, self.options.state_dir / "cross_organ_sites")
        return Hospitals(regrouped(load_federation(root, task), read()))

    def cells(self) -> list[Cell]:
        """Every (seed, what is trained), for the patients that the data have."""
        return cells_of(self.options.profile, self.profile, digest(self._hospitals.federation))

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train, test inside, and join outside."""
        return compute(self._hospitals, self.profile.device, cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Sites inside, the plateau in validation, sites outside."""
        return sections(rows, self._cells_like(rows))

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the newest row's patients: rows of other lists of patients are not comparable."""
        return in_order(rows, self._cells_like(rows)) if rows else []

    def _cells_like(self, rows: Sequence[Row]) -> list[Cell]:
        return cells_of(self.options.profile, self.profile, rows[-1]["cell"]["patients"])


def cells_of(profile: str, settings: Profile, patients: str) -> list[Cell]:
    """Every (seed, what is trained), FedOAP first, since it answers the question, and the controls last.

    `patients` is the digest of which patient every image belongs to.
    """
    common = setting_of(profile, settings, patients)
    wanted = [(trained, seed) for seed in range(settings.seeds) for trained in TRAINED]
    wanted += [(control, seed) for seed in range(settings.control_seeds) for control in CONTROLS]
    return [{"trained": trained, "seed": seed, **common} for trained, seed in wanted]


def setting_of(profile: str, settings: Profile, patients: str) -> dict[str, Any]:
    """What all cells share, with every field of the method: a changed default makes other cells."""
    return {
        "profile": profile,
        "size": settings.size,
        "most": list(settings.most),
        "budgets": list(settings.budgets),
        "joining": {"steps": settings.joining_steps, "batch": settings.joining_batch},
        "patients": patients,
        "method": FedOapConfig(**settings.method).model_dump(mode="json"),
    }
