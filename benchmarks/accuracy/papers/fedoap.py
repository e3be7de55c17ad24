"""FedOAP's tables: Organ-Agnostic Personalized Federated Learning for Tumor Segmentation, Tables 1 and 3.

Three sites of three organs. The arms of Table 1 train Locum's U-Net by their own method; FedOAP, FedDP and
the rows of Table 3 train FedOAP's network, of which the first row is FedAvg on that network. All arms see the
same number of batches at every site (FedRep sees them twice, for head and body): the rounds of FedOAP's
second stage are rounds of training elsewhere. As the ablation
that the paper leaves out, `plain second stage` is FedOAP with the loss of stage 1 in stage 2.

Of Table 2, an organ that takes no part: `unseen`.

A cell is one arm of one seed, unseen at one site.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.accuracy.papers.arms import Arm, Tests, Trainer, cost, fold_of, networks
from benchmarks.accuracy.papers.organs import PLACES, assemble, read, regrouped
from benchmarks.accuracy.papers.own_data import PaperOnData, readable_errors
from benchmarks.accuracy.papers.report import published
from benchmarks.harness.cells import Cell
from benchmarks.harness.experiment import OptionError, Options, Table
from personalization.fedoap.joining.config import JoiningConfig
from personalization.fedoap.joining.join import join
from personalization.labelled_slices import LabelledSlices
from personalization.networks import FedOapUNet
from training.config import MethodConfig
from training.data.cases import SPLITS, Federation, Site
from training.data.federation import load_federation
from training.local.data import slices_of
from training.local.networks import network_of
from training.local.scores import dice_per_patient
from training.local.site import SiteData
from training.methods.fedoap.models import check_task
from training.tasks import template

SITES = tuple(PLACES)
PUBLISHED = ("breast", "brain", "liver")
SECOND_STAGE = 2


def _published(breast: float, brain: float, liver: float) -> dict[str, float]:
    return dict(zip(PUBLISHED, (breast, brain, liver), strict=True))


BASELINES = {
    "comparison": "FedAvg",
    "ablation": "none: FedAvg on its network",
    "unseen": "FedAvg on FedOAP's network, zero-shot",
}
_FEDOAPS_LOSS: Mapping[str, Any] = {"first_loss": "fedoap"}
_BARE: Mapping[str, Any] = {"attention": False, "adapter": False, "fine_tune_loss": "plain"}

# Table 2: what trains without a site, and the loss of the site's own two epochs.
_GLOBAL: Mapping[str, tuple[str, Mapping[str, Any], Literal["plain", "perturbed"]]] = {
    "FedAvg on FedOAP's network": ("fedoap", _BARE, "plain"),
    "FedDP": ("feddp", {}, "plain"),
    "FedDP, FedOAP's loss": ("feddp", _FEDOAPS_LOSS, "plain"),
    "FedOAP": ("fedoap", {}, "perturbed"),
}
ZERO_SHOT, TWO_EPOCHS = "zero-shot", "two epochs"
ARMS: Mapping[str, tuple[Arm, ...]] = {
    "comparison": (
        Arm("Single-site", "local-only"),
        Arm("FedAvg", "fedavg", {}, _published(50.91, 1.28, 9.71)),
        Arm("FedAvg, twice the rounds", "fedavg", times=2),
        Arm("FedAvg + fine-tuning", "fedavg", tuned=SECOND_STAGE),
        Arm("FedAvgM", "fedavgm", {}, _published(43.29, 0.96, 10.66)),
        Arm("FedAdagrad", "fedadagrad", {}, _published(4.51, 35.16, 3.63)),
        Arm("FedPer", "fedper", {}, _published(59.91, 19.15, 42.06)),
        Arm("FedRep", "fedrep", {}, _published(85.92, 75.56, 49.75)),
        Arm("FedDP", "feddp", {}, _published(91.47, 94.04, 83.88)),
        Arm("FedDP, FedOAP's loss", "feddp", _FEDOAPS_LOSS),
        Arm("FedOAP", "fedoap", {}, _published(94.39, 95.31, 87.22)),
        Arm("FedOAP, twice the rounds", "fedoap", times=2),
    ),
    "ablation": (
        Arm("none: FedAvg on its network", "fedoap", _BARE, _published(85.1, 25.9, 5.3)),
        Arm("attention", "fedoap", {**_BARE, "attention": True}, _published(88.9, 52.7, 8.3)),
        Arm(
            "attention and adapter, plain second stage",
            "fedoap",
            {"fine_tune_loss": "plain"},
            _published(89.99, 65.8, 86.1),
        ),
        Arm("attention, adapter and perturbed loss", "fedoap", {}, _published(94.4, 95.3, 87.3)),
        Arm("averaged keys and values, no bank", "fedoap", {"kv": "averaged"}),
    ),
    "unseen": tuple(
        Arm(f"{name}, {after}", build, fields)
        for after in (ZERO_SHOT, TWO_EPOCHS)
        for name, (build, fields, _) in _GLOBAL.items()
    ),
}
NOTES = {
    "comparison": "Table 1. FedOAP has a network of its own; FedAvg on that is the ablation's first row.",
    "ablation": "Table 3, and two arms that it leaves out.",
    "unseen": "After Table 2: each organ is left out in turn. The others' global model answers on its test "
    "patients as it is, or after two epochs on the site's training images, of which its validation patients "
    "may refuse the last or both. All arms have FedOAP's network; FedDP and FedOAP begin with the shared key "
    "and value stage for a query. Members' personal models and their second stage take no part.",
}
_DATA_NOTE = """\
**What differs from the paper.** Breast MRI, brain MRI and liver CT there, thousands of slices each; here
bladder MRI, brain FLAIR and breast ultrasound, at most a few hundred images each. Read the order of the arms,
not the level."""
_METHOD_NOTE = """\
5 rounds at width 64 there; here 8 at width 16, `gpu` 50 at width 64. Two rounds more are FedOAP's second
stage, or training of its rivals. All arms see as many batches; FedRep takes two steps for each. FedDP has
FedOAP's network without adapter and bank, and calibrates in the second stage. Its first stage has Dice alone,
as its authors' code has: so few steps may not leave the plateau where nearly all pixels are marked, and the
row then says more of that loss than of local queries.

**Recipes differ.** FedOAP, FedDP and the ablation have AdamW with one cosine, a uniform mean of the sites,
and binary cross-entropy with Dice. Their rivals have Adam, weights by the number of images, and soft Dice. No
arm is tuned.

*Dice*: of the foreground, per patient, over all images of the patient, on their own grids; a false alarm on
a patient without a tumour counts 0. *Dice of slices with a tumour*: the paper's formula, mean over slices, at
most 200 of a site, at the network's resolution. Both in percent, means of sites; ± is the standard deviation
over seeds, each of which tests another third of the patients. Intervals are 95 %, paired bootstrap over
patients within sites."""


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `most` bounds a site's images by split; `method` as in `Arm.config`."""

    size: int
    seeds: int
    most: Mapping[str, int]
    method: Mapping[str, Any]
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(
        32,
        1,
        {"train": 8, "val": 4, "test": 6},
        {"width": 2, "heads": 1, "groups": 1, "rounds": 1, "local_steps": 1, "batch_size": 2},
    ),
    "cpu": Profile(
        96,
        3,
        {"train": 300, "val": 40, "test": 200},
        {"width": 16, "rounds": 8, "local_steps": 20, "batch_size": 4},
    ),
    "gpu": Profile(
        128,
        3,
        {"train": 1000, "val": 200, "test": 1000},
        {"width": 64, "rounds": 50, "local_steps": 40},
        "cuda",
    ),
}


class PaperFedOap(PaperOnData[Profile]):
    """FedOAP, what it is compared with, and its parts."""

    name = "paper-fedoap"
    title = "FedOAP's tables"
    question = "What do the arms of FedOAP's tables reach on other organs?"
    profiles = PROFILES
    tables = (Table("paper-fedoap.cpu", data="../shared/data"),)
    kind, surfaces = "segmentation", True
    published = published(ARMS)
    notes, baselines, columns = NOTES, BASELINES, PUBLISHED
    metric, papers_metric, by = "Dice", "Dice of slices with a tumour", ()
    data_note, method_note = _DATA_NOTE, _METHOD_NOTE
    differs = f"{_DATA_NOTE}\n\n{_METHOD_NOTE}"
    data_help = "the folder with tumour_organs, brain_lgg_flair and breast_ultrasound"

    def cells(self) -> list[Cell]:
        """Seed by seed."""
        name, settings = self.options.profile, self.profile
        size: int | tuple[int, int] = settings.size
        own: dict[str, str] = {}
        if self.own:
            size, own = self.own_task.size, {"set": self.own_name, "data": self.own_digest}
        return [
            {
                "part": part,
                **arm.cell(self._fields(part, arm)),
                **own,
                **({} if site is None else {"site": site}),
                "seed": seed,
                "profile": name,
                "size": size,
                "most": dict(settings.most),
            }
            for seed in range(settings.seeds)
            for part, arms in ARMS.items()
            for site in (self._left_out() if part == "unseen" else (None,))
            for arm in arms
        ]

    def _left_out(self) -> Sequence[str]:
        """The sites that are left out in turn: of two, none would be left to train with."""
        sites = self.own_federation.names if self.own else SITES
        return sites if len(sites) > 2 else ()

    def _fields(self, part: str, arm: Arm) -> Mapping[str, Any]:
        """The profile's fields; the rounds of FedOAP's second stage are training or tuning elsewhere.

        An organ that is left out is answered by a global model, on which that stage has no effect.
        """
        fields, rounds = self.profile.method, arm.rounds(self.profile.method["rounds"])
        if part == "unseen":
            return {**fields, "rounds": rounds, "fine_tune_rounds": 0}
        if arm.method in ("fedoap", "feddp"):
            return {**fields, "rounds": rounds, "fine_tune_rounds": SECOND_STAGE}
        rounds += SECOND_STAGE - arm.tuned
        return {**fields, "rounds": rounds, "recipe": "paper", "final_rate": 0.01}

    @cached_property
    def _organs(self) -> Organs:
        return Organs(self._load, self.options, self.profile)

    def _load(self) -> Federation:
        """The sites of three organs as one federation, or one's own."""
        if self.own:
            check_task(self.own_task)
            return self.own_federation
        for place in PLACES.values():
            self.shared(place)
        try:
            root = assemble(self.data, self.options.state_dir / "organ_sites")
            task = template("tumour_any_organ").model_copy(update={"size": (self.profile.size,) * 2})
            return regrouped(load_federation(root, task), read())
        except ValueError as error:
            raise OptionError(f"--data: expected {self.data_help}: {error}") from error

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train and test one arm."""
        with readable_errors(self.data):
            return self._trained_and_tested(cell)

    def _trained_and_tested(self, cell: Cell) -> dict[str, Any]:
        organs, seed = self._organs, cell["seed"]
        arm = next(arm for arm in ARMS[cell["part"]] if arm.name == cell["arm"])
        federation, config = organs.federation(seed), arm.config(self._fields(cell["part"], arm))
        if "site" in cell:
            return _unseen(organs, arm, config, cell)
        trained = organs.served(federation, arm, config, seed)
        found = {
            site: organs.tests(seed, site).judge(network)
            for site, network in networks(trained.publication, federation.sites, organs.device)
        }
        return {"sites": found, "cost": cost(trained.history)}


def _unseen(organs: Organs, arm: Arm, config: MethodConfig, cell: Cell) -> dict[str, Any]:
    """What the others' global model answers at a site, as it is or after two epochs there."""
    site, seed = cell["site"], cell["seed"]
    federation = organs.federation(seed)
    trained = organs.train(federation, arm.method, config, seed, [site])
    [draft] = [draft for draft in trained.publication.models if draft.site is None]
    network = network_of(draft.network, draft.weights, organs.device)
    assert isinstance(network, FedOapUNet)
    name, _, after = arm.name.rpartition(", ")
    started = time.perf_counter()
    if after == TWO_EPOCHS:
        data = SiteData.load(federation.site(site), federation.task)
        tuning = JoiningConfig(
            loss=_GLOBAL[name][2], epochs=2, batch_size=cell["method"]["batch_size"], seed=seed
        )
        join(
            network,
            _labelled(data.train),
            _labelled(data.val),
            tuning,
            lambda tuned, _: dice_per_patient(tuned, data.val, len(federation.task.classes)),
        )
    seconds = round(time.perf_counter() - started, 1)
    found = {site: organs.tests(seed, site).judge(network)}
    return {"sites": found, "cost": cost(trained.history), "seconds": seconds}


def _labelled(data: Any) -> LabelledSlices:
    slices = slices_of(data)
    return LabelledSlices(
        torch.from_numpy(slices.images), torch.from_numpy(slices.targets).to(torch.uint8), slices.patients
    )


class Organs(Trainer):
    """The federation, with the last seed's cached."""

    def __init__(self, load: Callable[[], Federation], options: Options, profile: Profile) -> None:
        super().__init__(options, profile.device)
        self._load, self._profile = load, profile
        self.federation = lru_cache(maxsize=1)(self._federation)
        self.tests = lru_cache(maxsize=len(SITES))(self._tests)

    def _federation(self, seed: int) -> Federation:
        found = fold_of(self._load(), seed, self._profile.seeds)
        return replace(found, sites=tuple(_thinned(site, self._profile.most) for site in found.sites))

    def _tests(self, seed: int, site: str) -> Tests:
        federation = self.federation(seed)
        return Tests.load(federation.site(site).of_split("test"), federation.task, background=False)


def _thinned(site: Site, most: Mapping[str, int]) -> Site:
    """At most so many evenly spaced cases of each split."""
    kept = []
    for split in SPLITS:
        cases = site.of_split(split)
        count = min(len(cases), most[split])
        kept += [cases[index * len(cases) // count] for index in range(count)]
    return replace(site, cases=tuple(sorted(kept, key=lambda case: case.name)))
