"""What the tables of a classification share: clients of an .npz, their runs, and both accuracies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.accuracy.papers.own_data import PaperOnData
from benchmarks.harness.experiment import OptionError, Options, P
from benchmarks.harness.federate import federate, in_memory
from model_store.task import Task
from training.algorithm import Algorithm, Publication
from training.data.classification import Partition, load_npz
from training.data.federation import TASK_FILE
from training.engine.client import RunEnvironment
from training.engine.history import RoundEntry
from training.local.images import Images
from training.local.site import SiteData
from training.tasks import template

METRIC, PAPERS_METRIC = "Accuracy at home", "Accuracy on all test images"
METRICS = """\
*Accuracy at home*: of the model that a client is served, on the client's own test images, which have its
classes. *Accuracy on all test images*: of the same model, on the test images of all clients together. Both in
percent, means of clients; ± is the standard deviation over seeds, each of which deals the images again.
Intervals are 95 %, paired bootstrap over images within clients."""

# Images -> a class for each, [N].
Classify = Callable[[Images], Tensor]


@dataclass(frozen=True)
class Clients:
    """An .npz divided among clients, and one part more, which no client holds.

    `place` is what decides the division: set, number of clients, alpha and seed, and the digest of own data.
    Images are resized to `side` pixels, where it is given.
    """

    folder: Path
    set: str
    count: int
    alpha: float
    seed: int
    digest: str | None = None
    side: int | None = None

    @cached_property
    def task(self) -> Task:
        """The set's task: task.yaml of own data, else the template of the set's name."""
        own = self.folder / TASK_FILE
        task = Task.load(own) if own.is_file() else template(self.set)
        return task if self.side is None else task.model_copy(update={"size": (self.side, self.side)})

    @cached_property
    def _parts(self) -> list[SiteData[Images]]:
        partition = Partition(self.count + 1, self.alpha, self.seed)
        sites = load_npz(self.folder / f"{self.set}.npz", self.task, partition).sites
        return [SiteData.load(site, self.task) for site in sites]

    @property
    def data(self) -> dict[str, SiteData[Images]]:
        """The clients' data by name."""
        return {part.site: part for part in self._parts[:-1]}

    @property
    def aside(self) -> SiteData[Images]:
        """The part that no client holds."""
        return self._parts[-1]

    @property
    def place(self) -> dict[str, Any]:
        """What a run's identity says about its data."""
        own = {"data": self.digest, "side": self.side}
        return {
            **{"set": self.set, "clients": self.count, "alpha": self.alpha, "seed": self.seed},
            **{name: value for name, value in own.items() if value is not None},
        }

    def judge(self, models: Mapping[str, Classify]) -> dict[str, dict[str, Any]]:
        """Scores of what each client is served, in the form of the rows.

        `ours` has 1 for every own test image that is answered rightly, else 0; `paper` the accuracy on all.
        """
        right = {
            id(answer): {
                site: (answer(own.test).numpy() == own.test.targets).astype(int)
                for site, own in self.data.items()
            }
            for answer in models.values()
        }
        return {
            site: {
                "ours": dict(zip(self.data[site].test.cases, right[id(answer)][site].tolist(), strict=True)),
                "paper": round(float(np.concatenate([*right[id(answer)].values()]).mean()), 5),
            }
            for site, answer in models.items()
        }


# The arm that answers without a network, and what it costs.
MOST_FREQUENT = "Most frequent class"
NO_COST: Mapping[str, float] = {"sent": 0, "received": 0, "seconds": 0.0}


def most_frequent(clients: Clients) -> dict[str, Classify]:
    """Always a client's most frequent class in training, the lower one of two."""

    def of(own: SiteData[Images]) -> Classify:
        label = int(np.bincount(own.train.targets).argmax())
        return lambda images: torch.full((len(images),), label)

    return {site: of(own) for site, own in clients.data.items()}


class PaperOnImages(PaperOnData[P]):
    """Tables of the shared .npz files, or of one's own."""

    kind = "classification"
    metric, papers_metric = METRIC, PAPERS_METRIC

    @property
    def sets(self) -> Sequence[str]:
        """The profile's sets, or one's own."""
        shared: Sequence[str] = self.profile.sets  # type: ignore[attr-defined]
        return (self.own_name,) if self.own else shared

    @cached_property
    def own_npz(self) -> Path:
        """One's own images."""
        found = sorted(self.data.glob("*.npz"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise OptionError(
                f"--data: expected one .npz in MedMNIST's layout beside '{self.data / TASK_FILE}', found "
                f"{names}; put every set into a folder of its own"
            )
        return found[0]

    @property
    @override
    def own_name(self) -> str:
        """The name of the .npz."""
        return self.own_npz.stem

    @cached_property
    @override
    def own_digest(self) -> str:
        """A digest of the task and the .npz."""
        task = self.own_task.model_dump_json().encode()
        return hashlib.sha256(task + self.own_npz.read_bytes()).hexdigest()[:16]

    @property
    def own_cell(self) -> dict[str, str]:
        """What a cell of own data says of them."""
        return {"data": self.own_digest} if self.own else {}

    def folder_of(self, set_: str) -> Path:
        """The folder with the set's .npz."""
        return self.data if self.own else self.shared(f"medmnist_npz/{set_}.npz").parent


class Runs:
    """Runs each algorithm once on given clients, in a folder named by its identity."""

    def __init__(self, options: Options, device: str) -> None:
        self.device = torch.device(device)
        self.folder = options.state_dir / "papers"

    def run(
        self, algorithm: Algorithm, clients: Clients, identity: Mapping[str, Any]
    ) -> tuple[Publication, tuple[RoundEntry, ...]]:
        """What it publishes, and its history; `identity` says what `clients` does not."""
        whole = {**clients.place, **identity}
        name = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
        around = RunEnvironment(clients.seed, self.device.type)
        outcome = federate(algorithm, in_memory(clients.data), around, self.folder / name, whole)
        return algorithm.publication(outcome.server), outcome.history
