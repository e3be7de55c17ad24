"""A cell of `instance_adaptive`: every arm on one federation, from one pre-trained network.

Classification: a share of the training images, which no client holds, pre-trains a small ViT. Within every
client, images have one of several *styles*, drawn image by image, so that a client's mean suits none of them.
Segmentation: the frozen network is the sites' own federated U-Net.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.accuracy.instance_adaptive.full_tuning import FullTuning, norms_at
from benchmarks.harness.cells import Cell
from benchmarks.harness.federate import federate, in_memory
from model_store.manifest import NetworkSpec
from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive, key_entropy, unused, usage_of
from personalization.metrics import foreground_dice
from personalization.state import State
from training.algorithm import Algorithm
from training.backbones import FrozenBackbone, publish_backbone
from training.data.classification import ImageSet, LabelledData, Partition, load_npz
from training.data.federation import load_federation
from training.data.segmentation.dataset import SiteData, SliceSet
from training.data.splits import split_by_patient
from training.engine.client import RunEnvironment
from training.engine.seeds import generator
from training.methods.common.local_training import (
    Schedule,
    network_of,
    new_network,
    predict,
    state_of,
    train_locally,
)
from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.fedins.client import PoolPicking, queries_of, routed
from training.methods.fedins.config import FedInsConfig
from training.methods.fedins.method import FedIns
from training.tasks import template

LOCAL, FEDAVG, FEDPROX, FEDBN = "local-only", "FedAvg", "FedProx", "FedBN"
FROZEN, HEAD = "frozen", "fine-tuned head"
SINGLE, BATCH, RANDOM, POOL = "single SSF", "pool, batch mean", "pool, random entries", "pool, per instance"
CLASSIFYING = (LOCAL, FEDAVG, FEDPROX, FEDBN, SINGLE, BATCH, RANDOM, POOL)
SEGMENTING = (FROZEN, HEAD, SINGLE, RANDOM, POOL)
# arm -> its changes of FedInsConfig
POOLS: Mapping[str, Mapping[str, Any]] = {
    SINGLE: {"entries": 1, "top": 1, "key_weight": 0.0},
    BATCH: {"routing": "batch"},
    RANDOM: {"routing": "random"},
    POOL: {},
}
# Images per mean when the batch arm is tested: the batch size of the public code's loader.
TEST_BATCH = 32

Data = SiteData | LabelledData
Answers = dict[str, dict[str, float | None]]  # site -> patient or image -> Dice, or 1 for a right answer


def packed(answers: Mapping[str, Answers]) -> dict[str, Any]:
    """The form of the rows: the names of patients and images once, since they are the same for every arm."""
    named = next(iter(answers.values()))
    return {
        "named": {site: list(found) for site, found in named.items()},
        "answers": {
            arm: {site: [found[name] for name in named[site]] for site, found in sites.items()}
            for arm, sites in answers.items()
        },
    }


def unpacked(result: Mapping[str, Any]) -> dict[str, Answers]:
    """The inverse of `packed`."""
    return {
        arm: {site: dict(zip(result["named"][site], found, strict=True)) for site, found in sites.items()}
        for arm, sites in result["answers"].items()
    }


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


def styled(images: ImageSet, count: int, draw: torch.Generator) -> tuple[ImageSet, NDArray[np.int64]]:
    """Every image in one of the first `count` styles, drawn at random; and the style of each."""
    chosen = torch.randint(count, (len(images),), generator=draw)
    pixels = torch.from_numpy(images.images.copy())
    for number in range(count):
        mine = chosen == number
        if mine.any():
            pixels[mine] = STYLES[number](pixels[mine])
    return replace(images, images=pixels.numpy()), chosen.numpy()


def compute(folder: Path, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    """The result of a cell; `folder` is where all sets are."""
    if cell["part"] == "classification":
        return _classification(folder / "medmnist_npz" / f"{cell['set']}.npz", device, cell, work)
    return _segmentation(folder / cell["set"], device, cell, work)


def _classification(path: Path, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    task, seed = template(cell["set"]), cell["seed"]
    partition = Partition(cell["clients"] + 1, cell["alpha"], seed)
    *clients, aside = load_npz(path, task, partition).sites
    data: dict[str, LabelledData] = {}
    styles: dict[str, NDArray[np.int64]] = {}
    for site in clients:
        own = LabelledData.load(site, task)
        train, val, test = (
            styled(images, cell["styles"], generator(seed, "styles", 0, site.name, name))
            for name, images in (("train", own.train), ("val", own.val), ("test", own.test))
        )
        data[site.name] = replace(own, train=train[0], val=val[0], test=test[0])
        styles[site.name] = test[1]
    spec = NetworkSpec(
        name="vit",
        arguments={"in_channels": task.in_channels, "classes": len(task.classes), "size": list(task.size)}
        | cell["vit"],
    )
    held_out = LabelledData.load(aside, task)
    start = pretrained(spec, held_out.train, cell, device)
    study = Study(cell, task, dict(data), spec, start, device, work)
    answers = {LOCAL: study.alone(), **study.full_tuning()}
    return {
        "clients": {site: len(own.train) for site, own in data.items()},
        "pre_trained_on": len(held_out.train),
        **study.pools(answers, CLASSIFYING, styles),
    }


def pretrained(spec: NetworkSpec, images: ImageSet, cell: Cell, device: str) -> State:
    """A network pre-trained in all styles on the images that no client holds."""
    draw = generator(cell["seed"], "pretraining", 0, "", "weights")
    network = new_network(spec, draw).to(device)
    mixed, _ = styled(images, len(STYLES), draw)
    schedule = Schedule(steps=cell["pretraining_steps"], batch_size=32, learning_rate=1e-3)
    train_locally(network, mixed, schedule, draw)
    return state_of(network)


def _segmentation(folder: Path, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    task = template(cell["set"]).model_copy(update={"size": (cell["size"], cell["size"])})
    sites = [split_by_patient(site, cell["seed"]) for site in load_federation(folder, task).sites]
    data = {site.name: SiteData.load(site, task) for site in sites}
    algorithm = FedAvg(FedAvgConfig(**cell["global"]), task)
    around, identity = RunEnvironment(cell["seed"], device), {"cell": dict(cell), "run": "global"}
    start = _trained(algorithm, data, around, work / "global", identity)
    study = Study(cell, task, dict(data), algorithm.network, start, device, work)
    frozen = network_of(algorithm.network, start, torch.device(device))
    answers = {FROZEN: study.test(lambda own: predict(frozen, own)), HEAD: study.head()}
    return study.pools(answers, SEGMENTING, {})


@dataclass(frozen=True)
class Study:
    """All arms of a cell, from the network `start`."""

    cell: Cell
    task: Task
    data: Mapping[str, Data]
    spec: NetworkSpec
    start: State
    device: str
    work: Path

    def test(self, answer: Callable[[Any], Tensor]) -> Answers:
        """The results of `answer` on every site's test images."""
        return {site: self._right(own.test, answer(own.test)) for site, own in self.data.items()}

    def alone(self) -> Answers:
        """Tune all weights at each client alone."""
        found: Answers = {}
        for site, own in self.data.items():
            state, _ = self._tuned(f"alone-{site}", {site: own})
            found[site] = self._right(own.test, predict(self._network(state), own.test))
        return found

    def full_tuning(self) -> dict[str, Answers]:
        """Tune all weights, federated."""
        average, _ = self._tuned("fedavg", self.data)
        prox, _ = self._tuned("fedprox", self.data, prox=self.cell["prox"])
        shared, work = self._tuned("fedbn", self.data, local_norms=True)
        own_norms = {site: {**shared, **norms_at(work, site)} for site in self.data}
        return {
            FEDAVG: self.test(lambda own: predict(self._network(average), own)),
            FEDPROX: self.test(lambda own: predict(self._network(prox), own)),
            FEDBN: {
                site: self._right(own.test, predict(self._network(own_norms[site]), own.test))
                for site, own in self.data.items()
            },
        }

    def head(self) -> Answers:
        """Tune the last layer only, federated."""
        state, _ = self._tuned("head", self.data, only_head=True)
        return self.test(lambda own: predict(self._network(state), own))

    def pools(
        self, answers: dict[str, Answers], arms: tuple[str, ...], styles: Mapping[str, NDArray[np.int64]]
    ) -> dict[str, Any]:
        """Add every pool's arm to `answers`, with diagnostics of its keys."""
        keys: dict[str, Any] = {}
        for arm, changes in POOLS.items():
            if arm in arms:
                answers[arm], keys[arm] = self._pool(arm, changes, styles)
        return packed({arm: answers[arm] for arm in arms}) | {"keys": keys}

    def _tuned(self, name: str, data: Mapping[str, Data], **options: Any) -> tuple[State, Path]:
        config = FedAvgConfig(**self.cell["tuning"], rounds=self.cell["rounds"])
        algorithm = FullTuning(config, self.task, self.spec, self.start, **options)
        state = _trained(algorithm, data, self._around, self.work / name, self._identity(name))
        return state, self.work / name

    @cached_property
    def _backbone(self) -> FrozenBackbone:
        """`start` published as an artefact, for all pools."""
        store = Store((self.work / "store").resolve())
        artefact = publish_backbone(store, "bench", self.task, self.spec, self.start)
        return FrozenBackbone(store.root, f"{artefact.name}@{artefact.digest}")

    def _pool(
        self, arm: str, changes: Mapping[str, Any], styles: Mapping[str, NDArray[np.int64]]
    ) -> tuple[Answers, dict[str, Any]]:
        config = FedInsConfig(
            **{**self.cell["pool"], **changes},
            rounds=self.cell["rounds"],
            backbone=self._backbone.reference,
            store=self._backbone.root,
        )
        algorithm = FedIns(config, self.task)
        name = arm.replace(",", "").replace(" ", "-")
        state = _trained(algorithm, self.data, self._around, self.work / name, self._identity(arm))
        network = config.network(config.frozen.load(torch.device(self.device)), len(self.task.classes))
        network.pool.load_state_dict(state)
        answers: Answers = {}
        picks: dict[str, Tensor] = {}
        for site, own in self.data.items():
            draw = generator(self.cell["seed"], "test", 0, site, "entries")
            predicted, picks[site] = answered(network, own.test, config.routing, draw)
            answers[site] = self._right(own.test, predicted)
        usage = usage_of(torch.cat(list(picks.values())), config.entries)
        sites = {site: np.full(len(found), number) for number, (site, found) in enumerate(picks.items())}
        diagnostics = {
            "entropy": round(key_entropy(usage), 4),
            "dead": unused(usage),
            "by_site": round(_information(picks, sites), 4),
        }
        if styles:
            diagnostics["by_style"] = round(_information(picks, styles), 4)
        return answers, diagnostics

    def _right(self, images: SliceSet | ImageSet, predicted: Tensor) -> dict[str, float | None]:
        """Dice by patient, or 1 and 0 for right and wrong by image."""
        if isinstance(images, SliceSet):
            truth = torch.from_numpy(images.targets)
            found = foreground_dice(predicted, truth, images.patients, len(self.task.classes))
            return {patient: None if math.isnan(v) else round(v, 6) for patient, v in found.items()}
        right = (predicted == torch.from_numpy(images.labels)).double()
        return dict(zip(images.cases, right.tolist(), strict=True))

    def _network(self, state: State) -> nn.Module:
        return network_of(self.spec, state, torch.device(self.device))

    @property
    def _around(self) -> RunEnvironment:
        return RunEnvironment(self.cell["seed"], self.device)

    def _identity(self, run: str) -> dict[str, Any]:
        return {"cell": dict(self.cell), "run": run}


def _trained(
    algorithm: Algorithm[Any],
    data: Mapping[str, Data],
    around: RunEnvironment,
    work: Path,
    identity: Mapping[str, Any],
) -> State:
    """The published weights of a federation."""
    outcome = federate(algorithm, in_memory(data), around, work, identity)
    return dict(algorithm.publication(outcome.server).models[0].weights)


@torch.no_grad()
def answered(
    network: InstanceAdaptive, images: SliceSet | ImageSet, routing: PoolPicking, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Classes of all images, uint8, and the entries that their queries pick, [N, C]."""
    device = network.pool.keys.device
    queries = queries_of(network, images, TEST_BATCH)
    found, picked = [], []
    for part, query in zip(
        torch.split(torch.from_numpy(images.images), TEST_BATCH),
        torch.split(queries, TEST_BATCH),
        strict=True,
    ):
        answer = routed(network, part.clone().to(device), query.to(device), routing, draw)
        found.append(answer.logits.argmax(dim=1).to(torch.uint8).cpu())
        picked.append(answer.picked.entries.cpu())
    return torch.cat(found), torch.cat(picked)


def _information(picks: Mapping[str, Tensor], labels: Mapping[str, NDArray[Any]]) -> float:
    """Mutual information of an image's first entry and its label, over the label's entropy: 0..1."""
    first = torch.cat([found[:, 0] for found in picks.values()]).numpy()
    known = np.concatenate([labels[site] for site in picks])
    joint = np.zeros((first.max() + 1, known.max() + 1))
    np.add.at(joint, (first, known), 1)
    joint /= joint.sum()
    rows, columns = joint.sum(1, keepdims=True), joint.sum(0, keepdims=True)
    there = joint > 0
    shared = (joint[there] * np.log(joint[there] / (rows * columns)[there])).sum()
    entropy = -(columns[columns > 0] * np.log(columns[columns > 0])).sum()
    # With a single label the entropy is zero up to rounding.
    return float(shared / entropy) if known.max() else 0.0
