"""What the tables share: an arm, the run that trains it, what it cost, and both metrics of its answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.papers.official import TargetSlices, score_of
from benchmarks.harness.cells import Cell
from benchmarks.harness.evaluation import Scans, predict
from benchmarks.harness.experiment import Options
from benchmarks.harness.federate import federate
from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.state import State
from training.algorithm import Publication
from training.choices.fedavg import FedAvgConfig
from training.config import MethodConfig, RunConfig
from training.data.cases import Case, Federation, Site
from training.data.splits import folds
from training.engine.client import RunEnvironment
from training.engine.history import TEST, RoundEntry
from training.local.networks import network_of
from training.methods.fedavg import FedAvg
from training.methods.local_only import LocalOnly
from training.methods.registry import method
from training.parts.export import EXPORT
from training.run import Result, Run, execute


@dataclass(frozen=True)
class Arm:
    """One line of a table: a registered method, and the fields in which it differs from the other lines.

    `published` is the mean that the paper prints for it, by the name of the column; arms that the paper has
    not are shown without. `times` multiplies the rounds of the others, to the nearest. After them every site
    trains the global model further by itself for `tuned` rounds, and is served that.
    """

    name: str
    method: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    times: float = 1
    tuned: int = 0

    def config(self, common: Mapping[str, Any]) -> MethodConfig:
        """The method's configuration; of the `common` fields it takes those that it has."""
        config = method(self.method).config
        shared = {name: value for name, value in common.items() if name in config.model_fields}
        return config(**{**shared, **self.fields})

    def rounds(self, others: int) -> int:
        """Its rounds, where the others have so many."""
        return max(1, round(self.times * others))

    def cell(self, common: Mapping[str, Any]) -> Cell:
        """What decides the arm's result, for a cell."""
        tuned = {"tuned": self.tuned} if self.tuned else {}
        return {"arm": self.name, "method": self.config(common).identity(), **tuned}


@dataclass(frozen=True)
class Tests:
    """A site's test scans, decoded once for many networks."""

    __test__ = False  # not a test case for pytest

    scans: Scans
    slices: TargetSlices
    background: bool

    @classmethod
    def load(cls, cases: Sequence[Case], task: Task, *, background: bool) -> Tests:
        """Decode the cases' scans; `background` says whether the paper's metric counts it as a class."""
        scans = Scans.load(cases, task)
        return cls(scans, TargetSlices.of(cases, scans, task), background)

    def judge(self, network: nn.Module) -> dict[str, Any]:
        """A network's scores, in the form of the rows.

        `ours`: foreground Dice per patient on the scan's grid, None where undefined. `paper`: Dice at the
        network's resolution, mean over slices with a target and over classes. `hd95` and `nsd` per patient
        as `Scans.surfaces` has them, None where undefined.
        """
        network.eval()
        answered = predict(network, self.scans.images)
        score = score_of(network, self.slices)
        return {
            "ours": _by_patient(self.scans.dice(answered), 6),
            "paper": round(score.with_background if self.background else score.foreground, 5),
            **{metric: _by_patient(own, 4) for metric, own in self.scans.surfaces(answered).items()},
        }


def _by_patient(values: Mapping[str, float], digits: int) -> dict[str, float | None]:
    return {patient: None if math.isnan(v) else round(v, digits) for patient, v in values.items()}


@dataclass(frozen=True)
class Start:
    """A network and the weights that a method starts from."""

    network: NetworkSpec
    weights: State = field(repr=False)


def starting_at(build: Any, config: Any, task: Task, start: Start) -> Any:
    """FedAvg or a method that extends it, of a given network from given weights. It can be pickled."""
    if not issubclass(build, FedAvg):
        raise TypeError(f"expected a method that extends FedAvg, found {build.__name__}")
    return _started(build)(config, task, start)


@cache
def _started(build: Any) -> Any:
    class Started(build):  # type: ignore[misc]
        def __init__(self, config: FedAvgConfig, task: Task, start: Start) -> None:
            self._start = start
            super().__init__(config, task)

        def __reduce__(self) -> Any:
            """Be built again in a worker process: pickle knows no class of a function."""
            return starting_at, (build, self.config, self.task, self._start)

        def architecture(self, task: Task) -> NetworkSpec:  # noqa: ARG002
            return self._start.network

        def first_weights(self, generator: torch.Generator) -> State:  # noqa: ARG002
            return {name: tensor.clone() for name, tensor in self._start.weights.items()}

    return Started


@dataclass(frozen=True)
class Trained:
    """What a run publishes, and its history."""

    publication: Publication
    history: tuple[RoundEntry, ...]


class Trainer:
    """Trains each run once, in a folder named by its identity; every cell that needs it reads it there."""

    def __init__(self, options: Options, device: str) -> None:
        self.device = torch.device(device)
        self._folder, self._workers = options.state_dir / "papers", options.workers

    def train(
        self,
        federation: Federation[Any],
        name: str,
        config: MethodConfig,
        seed: int,
        leave_out: Sequence[str] = (),
    ) -> Result:
        """Run a method, or read the finished run."""
        settings = RunConfig.model_validate(
            {"seed": seed, "leave_out": tuple(leave_out), "consent": "all", "device": self.device.type}
        )
        run = Run(federation, name, config, settings)
        return execute(run, self._folder / run.id, workers=self._workers, resume=True)

    def served(self, federation: Federation[Any], arm: Arm, config: MethodConfig, seed: int) -> Trained:
        """What an arm serves the sites, after its training at home if it has any."""
        result = self.train(federation, arm.method, config, seed)
        if not arm.tuned:
            return Trained(result.publication, result.history)
        assert isinstance(config, FedAvgConfig)
        [draft] = result.publication.models
        alone = config.model_copy(update={"rounds": arm.tuned})
        method = starting_at(LocalOnly, alone, federation.task, Start(draft.network, draft.weights))
        around = RunEnvironment(seed, self.device.type)
        name, identity = f"{result.run.id}-tuned-{arm.tuned}", {"run": result.run.id, "tuned": arm.tuned}
        tuned = federate(method, result.run.specs(), around, self._folder / name, identity, self._workers)
        return Trained(method.publication(tuned.server), (*result.history, *tuned.history))


def fold_of(federation: Federation, seed: int, seeds: int) -> Federation:
    """The federation with a fold of every site's patients for testing: the seeds together test all."""
    count = max(seeds, 2)
    return replace(federation, sites=tuple(folds(site, count, 0)[seed % count] for site in federation.sites))


def networks(
    publication: Publication, sites: Sequence[Site], device: torch.device
) -> Iterator[tuple[str, nn.Module]]:
    """What each site is served: its own model where it has one, else the global one."""
    drafts = {draft.site: draft for draft in publication.models}
    for site in sites:
        draft = drafts.get(site.name) or drafts[None]
        yield site.name, network_of(draft.network, draft.weights, device)


def cost(history: Sequence[RoundEntry]) -> dict[str, float]:
    """What a run cost a site in the mean: bytes sent and received, and seconds of its own computing.

    Test and export are not counted: no method needs the scores of test patients, nor the export of personal
    models, which is for serving.
    """
    sites = {name for entry in history for name in entry.sites}
    counted = [round_ for round_ in history if round_.phase not in (TEST, EXPORT)]
    entries = [entry for round_ in counted for entry in round_.sites.values()]
    return {
        "sent": round(sum(sum(entry.sent.values()) for entry in entries) / len(sites)),
        "received": round(sum(sum(entry.received.values()) for entry in entries) / len(sites)),
        "seconds": round(sum(entry.seconds for entry in entries) / len(sites), 1),
    }
