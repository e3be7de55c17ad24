"""IOP-FL's tables: Jiang et al., IOP-FL: Inside-Outside Personalization for Federated Medical Image
Segmentation, IEEE TMI 2023: I (inside), II (outside) and III (one coefficient per model, or per layer).

Inside, every arm trains on the same splits with the paper's recipe (a constant rate, no augmentation by drawn
scanners) for the same rounds; `Locum's recipe` is IOP-FL as `training.federate` runs it by default. Some arms
take more steps in a round: `_METHOD_NOTE` says which. Outside, each site is left out in turn. IOP-FL trains
on the others, and the arms start from the models of that one run: FedAvg is its global model. FedDG and TTT
have runs of their own. All scans of the site are reported, as in the paper, and no label of it chooses
anything, but in the arm that says so.

A cell is one arm of one seed, outside at one site.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.accuracy.papers.arms import Arm, Tests, Trainer, cost, fold_of, networks
from benchmarks.accuracy.papers.official import by_official_protocol
from benchmarks.accuracy.papers.own_data import PaperOnData, readable_errors
from benchmarks.harness.cells import Cell
from benchmarks.harness.evaluation import SURFACES
from benchmarks.harness.experiment import Options, Table
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.iop_fl.routers import DirectCoefficients
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.options.presets import PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import LossWeights, WeightedSum
from personalization.test_time.recipe import Routing, adapt, recipe_of
from training.config import MethodConfig
from training.data.cases import Federation
from training.data.federation import load_federation
from training.local.networks import network_of
from training.methods.registry import method
from training.tasks import template

# A set and its sites, which the paper's tables have beside them: prostate MRI and fundus photographs.
SITES: Mapping[str, tuple[str, ...]] = {
    "brain_lgg_flair": ("CS", "DU", "FG", "HT"),
    "retina_vessels": ("CHASE_DB1", "DRIVE", "STARE", "VEVIO_frames"),
}
PUBLISHED = ("prostate", "disc", "cup")


def _published(prostate: float, disc: float, cup: float) -> dict[str, float]:
    return dict(zip(PUBLISHED, (prostate, disc, cup), strict=True))


INSIDE = (
    Arm("Single-site", "local-only", {}, _published(87.84, 89.38, 78.21)),
    Arm("FedAvg", "fedavg", {}, _published(89.25, 91.48, 80.85)),
    Arm("FedAvg, twice the rounds", "fedavg", times=2),
    Arm("FedAvg + fine-tuning", "fedavg", tuned=5),
    Arm("FedProx", "fedprox"),
    Arm("FedBN", "fedbn", {}, _published(90.21, 92.46, 81.44)),
    Arm("FedPer", "fedper"),
    Arm("pFedMe", "pfedme", {}, _published(90.07, 92.15, 81.19)),
    Arm("Ditto", "ditto"),
    Arm("FedSoup", "fedsoup"),
    Arm("FedRep", "fedrep", {}, _published(90.41, 92.54, 81.57)),
    Arm("Centralised", "centralised"),
    Arm("IOP-FL", "iop-fl", {}, _published(91.88, 94.27, 82.94)),
    Arm("IOP-FL, Locum's recipe", "iop-fl", {"recipe": "locum"}),
    # As many steps as FedAvg, to the nearest round: pFedMe takes six on each batch, the next two take two.
    Arm("pFedMe, as many steps", "pfedme", times=1 / 6),
    Arm("Ditto, as many steps", "ditto", times=1 / 2),
    Arm("FedRep, as many steps", "fedrep", times=1 / 2),
    # The rest of the rounds are the passes of the personal models at the end.
    Arm("IOP-FL, Locum's recipe, as many steps", "iop-fl", {"recipe": "locum", "least_steps": 0}, times=0.8),
)
# Name -> the preset that adapts, and what the paper prints for it.
AVERAGE, ENSEMBLE = "Average", "Ensemble"
LABELLED, AS_PUBLISHED = "IOP-FL as published, epoch by label", "IOP-FL as published, epoch by loss"
PER_LAYER, PER_MODEL = "Locum's loss, a coefficient per layer", "Locum's loss, a coefficient per model"
OUTSIDE: Mapping[str, tuple[str | None, Mapping[str, float]]] = {
    "FedAvg": (None, _published(85.81, 91.37, 78.26)),
    AVERAGE: (None, _published(82.39, 90.75, 75.79)),
    ENSEMBLE: (None, _published(84.02, 91.28, 78.16)),
    "FedDG": (None, _published(87.54, 92.60, 81.29)),
    "TTT": ("ttt", _published(86.72, 92.32, 80.33)),
    "Tent": ("tent", _published(87.32, 92.76, 81.50)),
    LABELLED: (None, _published(89.28, 94.59, 82.09)),
    AS_PUBLISHED: ("as-published", {}),
    PER_LAYER: ("paper", {"prostate": 89.28}),
    PER_MODEL: (None, {"prostate": 85.86}),
    "statistics": ("statistics", {}),
    "ladder": ("ladder", {}),
}
# What trains the models that an arm starts from, and the fields in which it differs; else IOP-FL.
FEDERATED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "FedDG": ("feddg", {}),
    "TTT": ("fedavg", {"rotation_head": True}),
}


@dataclass(frozen=True)
class Studied:
    """One line of a study outside: the loss that adapts, without which the global model answers as it is.

    `members` trained together, all others of the set without one. `epochs` in place of the profile's.
    """

    loss: LossWeights | None = None
    members: int | None = None
    epochs: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What decides its result beside the profile, for a cell."""
        loss = {} if self.loss is None else {"loss": asdict(self.loss)}
        own = {"members": self.members, "epochs": self.epochs}
        return {**loss, **{name: value for name, value in own.items() if value is not None}}


_WHOLE_LOSS = LossWeights(consistency=1.0, shape=0.01, entropy=0.01)
_UNCHANGED = "FedAvg"
# Studies inside, of methods, and outside, of adaptations; the first line of each is its baseline.
TAUS = (0.9, 0.1, 0.3, 0.5, 0.7)
STUDIES_INSIDE: Mapping[str, tuple[Arm, ...]] = {
    "tau": tuple(Arm(f"IOP-FL, tau {tau:g}", "iop-fl", {"tau": tau}) for tau in TAUS),
}
STUDIES_OUTSIDE: Mapping[str, Mapping[str, Studied]] = {
    "members": {
        f"{_UNCHANGED}, 3 members": Studied(members=3),
        f"{_UNCHANGED}, 2 members": Studied(members=2),
        "Locum's loss, 3 members": Studied(_WHOLE_LOSS, members=3),
        "Locum's loss, 2 members": Studied(_WHOLE_LOSS, members=2),
    },
    "terms": {
        _UNCHANGED: Studied(),
        "consistency": Studied(LossWeights(1.0, 0.0, 0.0)),
        "consistency and shape": Studied(LossWeights(1.0, 0.01, 0.0)),
        "consistency and entropy": Studied(LossWeights(1.0, 0.0, 0.01)),
        "shape and entropy": Studied(LossWeights(0.0, 0.01, 0.01)),
        "all three": Studied(_WHOLE_LOSS),
    },
    "epochs": {
        _UNCHANGED: Studied(),
        **{f"{n} epoch{'s' if n > 1 else ''}": Studied(_WHOLE_LOSS, epochs=n) for n in (1, 3, 10, 30)},
    },
}
PUBLISHED_BY_PART: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "inside": {arm.name: arm.published for arm in INSIDE},
    "outside": {name: published for name, (_, published) in OUTSIDE.items()},
    **{part: {arm.name: arm.published for arm in arms} for part, arms in STUDIES_INSIDE.items()},
    **{part: {name: {} for name in arms} for part, arms in STUDIES_OUTSIDE.items()},
}
BASELINES: Mapping[str, str] = {
    **{part: next(iter(arms)) for part, arms in PUBLISHED_BY_PART.items()},
    **dict.fromkeys(("inside", "outside"), _UNCHANGED),
}


@dataclass(frozen=True)
class Setting:
    """How a set is trained: `method` has fields that every arm's configuration takes if it has them.

    `size` is one side of a square, or height and width.
    """

    size: int | tuple[int, int]
    method: Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. At most `images` slices of an outside site are learned from.

    `own` has the fields of the method for one's own data, of which the size is the task's.
    """

    sets: Mapping[str, Setting]
    own: Mapping[str, Any]
    seeds: int = 3
    epochs: int = 10
    images: int = 96
    device: str = "cpu"


_PAPER: Mapping[str, Any] = {"recipe": "paper"}
PROFILES = {
    "smoke": Profile(
        {"retina_vessels": Setting(32, {**_PAPER, "width": 2, "rounds": 1, "local_steps": 1})},
        {**_PAPER, "width": 2, "rounds": 1, "local_steps": 1},
        *(1, 1, 8),
    ),
    "cpu": Profile(
        {
            "brain_lgg_flair": Setting(96, {**_PAPER, "width": 8, "rounds": 20, "local_steps": 12}),
            # Few photographs make few batches of 16: forty rounds would be sixty steps.
            "retina_vessels": Setting(
                128, {**_PAPER, "width": 8, "rounds": 40, "local_epochs": 1, "batch_size": 4}
            ),
        },
        {**_PAPER, "width": 8, "rounds": 20, "local_steps": 12},
    ),
    "gpu": Profile(
        {name: Setting(256, {**_PAPER, "width": 32, "rounds": 100}) for name in SITES},
        {**_PAPER, "width": 32, "rounds": 100},
        images=400,
        device="cuda",
    ),
}


NOTES = {
    "inside": "Table I. Each seed tests another third of every site's patients, by the model that the site "
    "is served. Centralised has no seconds of training, since the server trains.",
    "outside": f"Table II; of Table III `{PER_LAYER}` (its `Layer`) and `{PER_MODEL}` (its `Global`). Each "
    "site is left out in turn and all its patients are reported. Seconds have the arm's own adaptation, and "
    "the scoring where HD95 is not shown. `Average` is the mean of the members' scores, `Ensemble` of their "
    "logits; the others are presets ([all of them](../explanation/routing.md#recipes)), Locum's loss "
    "`paper`.",
    "tau": "After Fig. 6: the share of the newest local model in the moving average, with the recipe of the "
    "paper.",
    "members": "After Fig. 7: of the other three sites all train together, or the two that follow the "
    "outside one by name.",
    "terms": "After Fig. 8: which terms of Locum's loss adapt, each with its weight in the whole (1 of "
    "consistency, 0.01 of shape and of entropy).",
    "epochs": "After Fig. 7: passes over the hospital's slices, and their seconds beside the gain.",
}
_DATA_NOTE = """\
**What differs from the paper.** Prostate MRI and fundus photographs there; here glioma slices of four
institutions and vessels of four cameras. Read the order of the arms, not the level. The shape term of the
loss suits compact organs ([routing](../explanation/routing.md)); it is used on vessels too."""
_METHOD_NOTE = """\
100 rounds at width 32 there, 20 or 40 at width 8 here (`gpu`: as there). **Steps** on each batch: pFedMe six,
Ditto and FedRep two, the others one; Locum's recipe takes at least 10 batches a round (`retina_vessels`) and
five passes more for a personal model. `as many steps` cuts the rounds to about FedAvg's steps. **No arm is
tuned.** FedDG and TTT are trained for themselves. **Epoch by label** learns from the slices that it scores,
in train mode, at the epoch that the labels choose, as the authors' code does; the other outside arms learn
from at most 96 slices (`gpu`: 400).

*Dice*: of the foreground, per patient, on the scan's own grid. *Dice as the paper's code has it*: mean over
slices with a target, at most 200 of a site, and over all classes, the background among them, at the
network's resolution. Both in percent, means of sites; ± is the standard deviation over seeds. Intervals are
95 %, paired bootstrap over patients within sites."""


class PaperIopFl(PaperOnData[Profile]):
    """IOP-FL and what it is compared with."""

    name = "paper-iop-fl"
    title = "IOP-FL's tables"
    question = "What do the arms of IOP-FL's tables reach on other sets, inside and outside?"
    profiles = PROFILES
    tables = (Table("paper-iop-fl.cpu", data="../shared/data"),)
    kind, surfaces = "segmentation", True
    published, notes, columns = PUBLISHED_BY_PART, NOTES, PUBLISHED
    baselines = BASELINES
    metric, papers_metric = "Dice", "Dice as the paper's code has it"
    data_note, method_note = _DATA_NOTE, _METHOD_NOTE
    differs = f"{_DATA_NOTE}\n\n{_METHOD_NOTE}"
    data_help = f"the folder with {' and '.join(SITES)}"

    def cells(self) -> list[Cell]:
        """Seed by seed, inside before outside."""
        name, settings = self.options.profile, self.profile
        own = {"data": self.own_digest} if self.own else {}
        cells: list[Cell] = []
        for seed in range(settings.seeds):
            for set_, setting in self.sets.items():
                common = {"set": set_, "seed": seed, "profile": name, "size": setting.size, **own}
                cells += [
                    {
                        "part": part,
                        **common,
                        **arm.cell({**setting.method, "rounds": arm.rounds(setting.method["rounds"])}),
                    }
                    for part, arms in {"inside": INSIDE, **STUDIES_INSIDE}.items()
                    for arm in arms
                ]
                adapting = {"epochs": settings.epochs, "images": settings.images}
                cells += [
                    {
                        **{"part": "outside", "arm": arm, "site": site, **common},
                        **{"method": _federated(arm, setting.method)[1].identity(), **adapting},
                    }
                    for site in self._outside_sites(set_)
                    for arm in OUTSIDE
                ]
                cells += [
                    {
                        **{"part": part, "arm": name, "site": site, **common},
                        **{"method": _federated(name, setting.method)[1].identity(), **adapting},
                        **studied.facts,
                    }
                    for part, arms in STUDIES_OUTSIDE.items()
                    for site in self._outside_sites(set_)
                    for name, studied in arms.items()
                    if (studied.members or 0) < len(self._outside_sites(set_))
                ]
        return cells

    @property
    def sets(self) -> Mapping[str, Setting]:
        """The profile's sets, or one's own."""
        if not self.own:
            return self.profile.sets
        return {self.own_name: Setting(self.own_task.size, self.profile.own)}

    def _outside_sites(self, set_: str) -> Sequence[str]:
        """The sites that are left out in turn: of two, no routing space would be left."""
        sites = self.own_federation.names if self.own else SITES[set_]
        return sites if len(sites) > 2 else ()

    @cached_property
    def _sets(self) -> Sets:
        return Sets(self._load, self.options, self.profile)

    def _load(self, name: str, size: int) -> Federation:
        if self.own:
            return self.own_federation
        task = template(name).model_copy(update={"size": (size, size)})
        return load_federation(self.shared(name), task)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train and test one arm, inside at all sites or outside at one."""
        with readable_errors(self.data):
            return _outside(self._sets, cell) if "site" in cell else _inside(self._sets, cell)


class Sets(Trainer):
    """The sets, with the last federations and test scans cached: cells come set by set."""

    def __init__(self, load: Callable[[str, int], Federation], options: Options, profile: Profile) -> None:
        super().__init__(options, profile.device)
        self._load, self._seeds = load, profile.seeds
        self.federation = lru_cache(maxsize=2)(self._federation)
        self.tests = lru_cache(maxsize=8)(self._tests)

    def _federation(self, name: str, size: int, seed: int) -> Federation:
        return fold_of(self._load(name, size), seed, self._seeds)

    def _tests(self, name: str, size: int, seed: int, site: str, everyone: bool) -> Tests:
        federation = self.federation(name, size, seed)
        cases = federation.site(site).cases if everyone else federation.site(site).of_split("test")
        return Tests.load(cases, federation.task, background=True)


def _inside(sets: Sets, cell: Cell) -> dict[str, Any]:
    arms = {"inside": INSIDE, **STUDIES_INSIDE}[cell["part"]]
    arm = next(arm for arm in arms if arm.name == cell["arm"])
    place = (cell["set"], cell["size"], cell["seed"])
    federation = sets.federation(*place)
    trained = sets.served(federation, arm, arm.config(cell["method"]), cell["seed"])
    found = {
        site: sets.tests(*place, site, everyone=False).judge(network)
        for site, network in networks(trained.publication, federation.sites, sets.device)
    }
    return {"sites": found, "cost": cost(trained.history)}


def _federated(arm: str, fields: Mapping[str, Any]) -> tuple[str, MethodConfig]:
    """The method that trains what an outside arm starts from, with these fields."""
    name, own = FEDERATED.get(arm, ("iop-fl", {}))
    return name, method(name).config(**{**fields, **own})


def _outside(sets: Sets, cell: Cell) -> dict[str, Any]:
    place = (cell["set"], cell["size"], cell["seed"])
    federation, site, arm, seed = sets.federation(*place), cell["site"], cell["arm"], cell["seed"]
    others = [name for name in federation.names if name != site]
    if "members" in cell:
        # Those that follow the outside site by name, so that each site is a member as often.
        after = [*federation.names, *federation.names][federation.names.index(site) + 1 :]
        others = after[: cell["members"]]
    left_out = [name for name in federation.names if name not in others]
    trained = sets.train(federation, *_federated(arm, cell["method"]), seed, left_out)
    models = trained.publication.models
    spec = models[0].network
    states = {draft.site or GLOBAL: draft.weights for draft in models}
    members = {name: state for name, state in states.items() if name != GLOBAL}
    space = RoutingSpace.of(spec.name, spec.arguments, members, states[GLOBAL])
    tests = sets.tests(*place, site, everyone=True)
    images = tests.scans.thinned(cell["images"]).images
    preset = (OUTSIDE[arm][0] if cell["part"] == "outside" else None) or "paper"
    # A preset with a number of its own is that recipe with it alone.
    epochs = {} if PRESETS[preset].epochs else {"epochs": cell["epochs"]}
    config = AdaptationConfig(preset=preset, seed=seed, **epochs)
    started = time.perf_counter()
    answering: Sequence[nn.Module] = ()
    if arm == LABELLED:
        official = by_official_protocol(space, tests.slices, seed, "as-published", sets.device)
        found = {"ours": {}, "paper": max(score[0] for score in official.row["epochs"])}
    elif arm in (AVERAGE, ENSEMBLE):
        answering = [network_of(spec, state, sets.device) for state in members.values()]
        answering = [_Mean(answering)] if arm == ENSEMBLE else answering
    elif "loss" in cell:
        recipe = Routing(WeightedSum(LossWeights(**cell["loss"])))
        answering = [recipe.adapt(space, images, config, sets.device).merged]
    elif arm == "FedDG" or arm.startswith(_UNCHANGED):
        answering = [space.plain().to(sets.device)]
    elif arm == PER_MODEL:
        network, images = route(space, "direct").to(sets.device), images.to(sets.device)
        _share_coefficients(network)
        adapt(network, images, config)
        answering = [merge(space, network, images)]
    else:
        answering = [recipe_of(config.preset).adapt(space, images, config, sets.device).merged]
    seconds = round(time.perf_counter() - started, 1)
    if answering:
        found = _average([*map(tests.judge, answering)])
    return {"sites": {site: found}, "cost": cost(trained.history), "seconds": seconds}


def _average(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of networks' scores: of several, it is no answer that a hospital could be given."""
    if len(found) == 1:
        return dict(found[0])
    by_patient = {
        metric: {
            patient: float(np.mean(values))
            for patient in found[0][metric]
            if None not in (values := [each[metric][patient] for each in found])
        }
        for metric in ("ours", *SURFACES)
    }
    return {**by_patient, "paper": round(float(np.mean([each["paper"] for each in found])), 5)}


def _share_coefficients(network: nn.Module) -> None:
    """Give all layers one set of logits (Table III, "Global")."""
    routers = [module for module in network.modules() if isinstance(module, DirectCoefficients)]
    for router in routers[1:]:
        # An attribute, no parameter: the optimiser would step on a parameter once per layer.
        del router.logits
        router.__dict__["logits"] = routers[0].logits


class _Mean(nn.Module):
    """The mean of several networks' logits, as the paper's Ensemble."""

    def __init__(self, networks_: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks_)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """[B, K, H, W]."""
        return torch.stack([network(images_BCHW) for network in self.networks]).mean(0)
