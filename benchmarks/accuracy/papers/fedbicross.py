"""FedBiCross's tables: Xia et al., personalized one-shot federation (arXiv 2601.01901), 1 and 2, N = 5.

All arms begin with the same uploads, trained once at every client. Of Table 1 there are FedAvg-1, DAFL,
DENSE, FedISCA, Co-Boosting and FedBiCross, with the number of clusters that the silhouette chooses and with
2, 3 and 4; and what the paper leaves out: the uploads themselves, their output ensemble, and FedAvg-1 trained
further at home. Table 2 takes parts away: `w/o PKD` is the cluster's model of the whole method's run.

A cell is one arm of one seed, on one set divided by one alpha.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.papers.arms import cost
from benchmarks.accuracy.papers.classification import (
    METRICS,
    MOST_FREQUENT,
    NO_COST,
    Classify,
    Clients,
    PaperOnImages,
    Runs,
    most_frequent,
)
from benchmarks.accuracy.papers.own_data import readable_errors
from benchmarks.accuracy.papers.report import published
from benchmarks.harness.cells import Cell
from benchmarks.harness.experiment import Options, Table
from personalization.state import State, StreamingMean
from training.algorithm import Memory, ModelDraft, Publication, StepContext
from training.config import MethodConfig
from training.engine.history import RoundEntry
from training.local.classifier import logits_of, train_classifier
from training.local.images import Images
from training.local.networks import network_of, state_of
from training.local.scores import predict
from training.local.site import SiteData
from training.methods.fedbicross.config import LITERAL_READING, PAPER_SIZES, FedBiCrossConfig
from training.methods.one_shot import OneShot
from training.methods.registry import method

SETS = ("pneumoniamnist", "wbc5_28_shift")
PUBLISHED = ("blood", "derma", "OCT", "tissue")
# The number of clients and the alpha of the figures that are quoted.
PUBLISHED_OF = (5, 0.3)
# The fields that decide an upload.
LOCAL = (
    *("width", "precision", "local_epochs", "learning_rate", "milestones"),
    *("batch_size", "momentum", "weight_decay", "augment", "common_start"),
)


def _published(blood: float, derma: float, oct_: float, tissue: float) -> dict[str, float]:
    return dict(zip(PUBLISHED, (blood, derma, oct_, tissue), strict=True))


@dataclass(frozen=True)
class Arm:
    """One line: what a client is served, the fields of FedBiCross in which it differs, and the paper's mean.

    `published` is of `PUBLISHED_OF`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)


class Uploads(OneShot):
    """The first phase only: every hospital trains and uploads once."""

    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:  # noqa: ARG002
        """The uploads, by site."""
        models = self.upload.slot.read(server).models.items()
        return Publication(
            "uploads", tuple(ModelDraft("local", self.network, model, site) for site, model in models)
        )


@dataclass(frozen=True)
class Given:
    """Given uploads in place of training, so that arms differ only in what they make of them."""

    uploads: Mapping[str, State]

    def __call__(
        self,
        context: StepContext,
        seed: int,  # noqa: ARG002
        data: SiteData[Images],  # noqa: ARG002
    ) -> tuple[State, Mapping[str, float]]:
        """The site's upload."""
        assert context.site is not None
        return self.uploads[context.site], {}


ALONE, AVERAGE, TUNED, ENSEMBLE = "Local-only", "FedAvg-1", "FedAvg-1 + fine-tuning", "Output ensemble"
DENSE, WHOLE, NO_STAGE_3 = "DENSE", "FedBiCross", "w/o PKD"
DAFL, ISCA, BOOSTED = "DAFL", "FedISCA", "Co-Boosting"
# Arms with one student, and their methods.
ONE_STUDENT = {DAFL: "dafl", DENSE: "dense", ISCA: "fedisca", BOOSTED: "co-boosting"}
ARMS: dict[str, tuple[Arm, ...]] = {
    "comparison": (
        Arm(MOST_FREQUENT),
        Arm(ALONE),
        Arm(AVERAGE, {}, _published(17.35, 17.24, 31.10, 33.76)),
        Arm(TUNED),
        Arm(ENSEMBLE),
        Arm(DAFL, {}, _published(15.74, 17.71, 31.58, 35.01)),
        Arm(DENSE, {}, _published(50.45, 18.45, 54.32, 33.88)),
        Arm(ISCA, {}, _published(53.28, 21.84, 60.47, 49.86)),
        Arm(BOOSTED, {}, _published(58.41, 46.08, 57.63, 53.26)),
        Arm(WHOLE),
        Arm("FedBiCross, K = 2", {"clusters": 2}, _published(87.15, 68.12, 66.62, 63.71)),
        Arm("FedBiCross, K = 3", {"clusters": 3}, _published(87.67, 71.45, 68.01, 64.81)),
        Arm("FedBiCross, K = 4", {"clusters": 4}, _published(85.63, 67.22, 67.23, 64.60)),
        Arm("FedBiCross, read literally", dict(LITERAL_READING)),
    ),
    "ablation": (
        Arm("Intra-cluster", {"bilevel": False, "mixing": "intra"}, _published(83.07, 66.12, 65.56, 63.90)),
        Arm("Uniform cross", {"bilevel": False}, _published(84.44, 67.30, 65.98, 64.17)),
        Arm(
            "Sim-weighted", {"bilevel": False, "mixing": "similarity"}, _published(85.13, 67.44, 66.41, 64.39)
        ),
        Arm(NO_STAGE_3, {}, _published(81.15, 65.31, 63.12, 63.52)),
        Arm("w/o Clus", {"clusters": 1}, _published(78.40, 59.35, 62.19, 59.74)),
        Arm(WHOLE),
    ),
    "samples": (
        Arm(WHOLE),
        *(Arm(f"FedBiCross, S = {count}", {"outer_steps": count}) for count in (1, 3, 12, 25)),
    ),
}
# The other divisions of Table 1, as parts with fewer arms: what a part changes of the profile.
DIVISIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"alpha {alpha:g}": {"alpha": alpha} for alpha in (0.1, 0.2, 0.5)},
    **{f"{count} clients": {"clients": count} for count in (10, 20)},
}
ARMS |= dict.fromkeys(
    DIVISIONS,
    (
        *(Arm(ALONE), Arm(AVERAGE), Arm(ENSEMBLE), Arm(DENSE), Arm(WHOLE)),
        *(Arm(f"FedBiCross, K = {count}", {"clusters": count}) for count in (2, 3)),
    ),
)
BASELINES = {"comparison": AVERAGE, "ablation": WHOLE, "samples": WHOLE, **dict.fromkeys(DIVISIONS, AVERAGE)}
NOTES = {
    "comparison": "Table 1.",
    "ablation": "Table 2. The number of clusters is the silhouette's, but for `w/o Clus`.",
    "samples": "In how many steps S of a trajectory w is learned, six in the other parts.",
    **dict.fromkeys(
        DIVISIONS, "Table 1, another division; the number of clusters is the silhouette's, or K."
    ),
}
_DATA_NOTE = """\
**What differs from the paper.** Four sets of MedMNIST there; here chest X-rays (pneumoniamnist) and white
blood cells (wbc5_28_shift, tested on another camera). Read the order of the arms, not the level."""
_METHOD_NOTE = f"""\
500 steps of synthesis at width 64 and 100 local epochs there (and in `gpu`); here 50 steps at width 16 and 12
epochs (pneumoniamnist) or 40. DAFL, DENSE and Co-Boosting have 20 epochs of 5 steps, FedISCA two trajectories
of 50. Students start from the average of the uploads, or of their cluster; `read literally` starts at random
and learns in six steps, as printed. No arm is tuned. The similarity of `Sim-weighted` is ours.
`{MOST_FREQUENT}`, of a client's training, is no arm of the paper.

{METRICS} Seconds are a client's training and the server's synthesis."""


@dataclass(frozen=True)
class Profile:
    """How large and how often.

    `method` has fields of FedBiCrossConfig, of which methods with one student take those of the upload. The
    others are in `student`, of which each takes those that it has; `by_arm` and `by_set` have what differs
    for one of these methods and for a set.
    """

    seeds: int
    method: Mapping[str, Any]
    student: Mapping[str, Any]
    by_arm: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_set: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sets: tuple[str, ...] = SETS
    alphas: tuple[float, ...] = (0.3,)
    clients: int = 5
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(
        1,
        {
            **{"width": 1, "local_epochs": 1, "personal_epochs": 1, "probes": 8},
            **{"epochs": 1, "steps": 2, "synthesis_batch": 5, "outer_steps": 1},
        },
        {
            **{"epochs": 1, "generator_steps": 1, "synthesis_batch": 5, "noise_size": 8},
            **{"generator_width": 4, "steps": 2},
        },
        sets=("wbc5_28_shift",),
    ),
    "cpu": Profile(
        3,
        {
            **{"width": 16, "local_epochs": 40, "personal_epochs": 10},
            **{"epochs": 1, "steps": 50, "synthesis_batch": 64},
        },
        {"epochs": 20, "generator_steps": 5},
        by_arm={ISCA: {"epochs": 2}},
        # It has fifteen times the images of the other set.
        by_set={"pneumoniamnist": {"local_epochs": 12, "personal_epochs": 4}},
    ),
    "gpu": Profile(
        3,
        {**PAPER_SIZES, "epochs": 20, "checkpoint_every": 100},
        {},
        by_arm={
            arm: {key: value for key, value in method(name).config.PAPER.items() if key not in LOCAL}
            for arm, name in ONE_STUDENT.items()
        },
        alphas=(0.1, 0.2, 0.3, 0.5),
        device="cuda",
    ),
}


class PaperFedBiCross(PaperOnImages[Profile]):
    """FedBiCross, what it is compared with, and its parts."""

    name = "paper-fedbicross"
    title = "FedBiCross's tables"
    question = "What do the arms of FedBiCross's tables reach on other sets?"
    profiles = PROFILES
    tables = (Table("paper-fedbicross.cpu", data="../shared/data"),)
    published = published(ARMS)
    notes, baselines, columns, by = NOTES, BASELINES, PUBLISHED, ("set", "alpha")
    data_note, method_note = _DATA_NOTE, _METHOD_NOTE
    differs = f"{_DATA_NOTE}\n\n{_METHOD_NOTE}"
    data_help = f"the folder with medmnist_npz, and {' and '.join(f'{name}.npz' for name in SETS)} in it"

    def cells(self) -> list[Cell]:
        """Seed by seed, set by set."""
        name, settings = self.options.profile, self.profile
        return [
            {
                **{"part": part, "arm": arm.name, "set": set_, "alpha": alpha, "seed": seed},
                **{"profile": name, "clients": settings.clients, **self.own_cell},
                **DIVISIONS.get(part, {}),
                **self._method(arm, set_),
            }
            for seed in range(settings.seeds)
            for set_ in self.sets
            for alpha in settings.alphas
            for part, arms in ARMS.items()
            if self._divides(part, alpha)
            for arm in arms
            if arm.fields.get("outer_steps", 1) <= self.profile.method["steps"]
        ]

    def _divides(self, part: str, alpha: float) -> bool:
        """Whether a part has cells beside this alpha of the profile: a part with an alpha of its own is once,
        and nowhere if the profile has that alpha."""
        own = DIVISIONS.get(part, {}).get("alpha")
        return own is None or (alpha == self.profile.alphas[0] and own not in self.profile.alphas)

    def prints(self, *place: Any) -> bool:
        """The paper's figures are of one alpha and number of clients."""
        return (self.profile.clients, place[-1]) == PUBLISHED_OF

    def _method(self, arm: Arm, set_: str) -> dict[str, Any]:
        """The configuration; none of the arm without training."""
        if arm.name == MOST_FREQUENT:
            return {}
        return {"method": self._config(arm, set_).identity()}

    def _config(self, arm: Arm, set_: str) -> MethodConfig:
        fields = {**self.profile.method, **self.profile.by_set.get(set_, {})}
        if arm.name in ONE_STUDENT:
            config = method(ONE_STUDENT[arm.name]).config
            local = {name: value for name, value in fields.items() if name in LOCAL}
            own = {n: value for n, value in self.profile.student.items() if n in config.model_fields}
            return config(**{**local, **own, **self.profile.by_arm.get(arm.name, {})})
        return FedBiCrossConfig(**{**fields, **arm.fields})

    @cached_property
    def _federations(self) -> OneShots:
        return OneShots(self.folder_of, self.options, self.profile.device)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train and test one arm."""
        with readable_errors(self.data):
            return self._federations.compute(cell)


class OneShots(Runs):
    """The federations of one upload, with the last division and its uploads cached."""

    def __init__(self, folder_of: Callable[[str], Path], options: Options, device: str) -> None:
        super().__init__(options, device)
        self._folder_of = folder_of
        self.clients = lru_cache(maxsize=1)(self._clients)

    def _clients(self, set_: str, count: int, alpha: float, seed: int, digest: str | None) -> Clients:
        return Clients(self._folder_of(set_), set_, count, alpha, seed, digest)

    def compute(self, cell: Cell) -> dict[str, Any]:
        """The result of a cell."""
        clients = self.clients(*(cell.get(name) for name in ("set", "clients", "alpha", "seed", "data")))
        if cell["arm"] == MOST_FREQUENT:
            return {"sites": clients.judge(most_frequent(clients)), "cost": dict(NO_COST), "seconds": 0.0}
        arm, local = cell["arm"], {name: cell["method"][name] for name in LOCAL}
        config = FedBiCrossConfig(**(local if arm in ONE_STUDENT else cell["method"]))
        uploading = Uploads(config, clients.task)
        published, first = self.run(uploading, clients, {"run": "uploads", "method": local})
        uploads = {draft.site: dict(draft.weights) for draft in published.models if draft.site}
        spent, server = cost(first), 0.0
        size = _bytes(next(iter(uploads.values())))

        def of(state: State) -> Classify:
            network = network_of(uploading.network, state, self.device)
            return lambda images: predict(network, images, 64)

        if arm == ALONE:
            models = {site: of(state) for site, state in uploads.items()}
            spent = {**spent, "sent": 0, "received": 0}
        elif arm == ENSEMBLE:
            networks = [network_of(uploading.network, state, self.device) for state in uploads.values()]
            models = dict.fromkeys(uploads, lambda images: _together(networks, images))
            spent["received"] += size * len(uploads)
        elif arm in (AVERAGE, TUNED):
            images = {site: len(own.train) for site, own in clients.data.items()}
            average = averaged(uploads, images)
            models = dict.fromkeys(uploads, of(average))
            spent["received"] += size
            if arm == TUNED:
                started = time.perf_counter()
                models = {site: of(self._tuned(clients, config, average, site)) for site in uploads}
                spent["seconds"] += round((time.perf_counter() - started) / len(uploads), 1)
        else:
            name = ONE_STUDENT.get(arm, "fedbicross")
            chosen = method(name)
            algorithm = chosen.build(chosen.config(**cell["method"]), clients.task)
            assert isinstance(algorithm, OneShot)
            algorithm.upload.train = Given(uploads)
            identity = {"run": name, "method": cell["method"]}
            publication, history = self.run(algorithm, clients, identity)
            own = cost(history)
            spent, server = {**own, "seconds": own["seconds"] + spent["seconds"]}, _server_seconds(history)
            if arm in ONE_STUDENT:
                models = dict.fromkeys(uploads, of(dict(publication.models[0].weights)))
            elif arm == NO_STAGE_3:
                of_cluster = {name: of(state) for name, state in cluster_models(publication).items()}
                models = {site: of_cluster[k] for site, k in publication.composite["assignment"].items()}
            else:
                models = {site: of(state) for site, state in personal_models(publication).items()}
        return {"sites": clients.judge(models), "cost": spent, "seconds": round(server, 1)}

    def _tuned(self, clients: Clients, config: FedBiCrossConfig, start: State, site: str) -> State:
        """Trained further at a site, for as long as Stage 3 takes."""
        network = network_of(config.network_for(clients.task), start, self.device)
        draw = torch.Generator().manual_seed(clients.seed)
        train_classifier(network, clients.data[site].train, config.personal(), draw)
        return state_of(network)


def averaged(models: Mapping[str, State], images: Mapping[str, int]) -> State:
    """One round of FedAvg: w <- sum_k (n_k / n) w_k, including batch norm's running statistics."""
    mean = StreamingMean()
    for site, state in models.items():
        mean.add(state, float(images[site]), f"site {site}")
    return mean.result()


def cluster_models(publication: Publication) -> dict[str, State]:
    """G_k by the cluster's name."""
    return {draft.cluster: dict(draft.weights) for draft in publication.models if draft.cluster is not None}


def personal_models(publication: Publication) -> dict[str, State]:
    """Stage 3's models by site."""
    return {draft.site: dict(draft.weights) for draft in publication.models if draft.site is not None}


def _together(networks: Sequence[torch.nn.Module], images: Images) -> Tensor:
    """The class of the mean logits, of every image."""
    logits = [logits_of(network, torch.from_numpy(images.images)) for network in networks]
    return torch.stack(logits).mean(dim=0).argmax(dim=1).cpu()


def _bytes(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _server_seconds(history: Sequence[RoundEntry]) -> float:
    return sum(entry.seconds for entry in history if not entry.sites)
