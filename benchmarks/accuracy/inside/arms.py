"""A cell of `inside`: train one federation, or each site alone, and test every arm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cells import Cell
from benchmarks.harness.evaluation import patient_dice
from benchmarks.harness.federate import federate
from model_store.task import Task
from training.algorithm import Algorithm, Memory, Publication, State, StepContext
from training.data.cases import Federation, Site
from training.data.segmentation.dataset import SiteData
from training.data.splits import folds
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.history import RoundEntry
from training.methods.common.local_training import network_of
from training.methods.common.state_tree import join
from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.iop_fl import IopFl, IopFlConfig


class FineTuning(FedAvg):
    """FedAvg at one site that starts from given weights instead of random ones."""

    def __init__(self, config: FedAvgConfig, task: Task, start: State) -> None:
        super().__init__(config, task)
        self._start = start

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """The given weights."""
        return Memory(join({"global": self._start}))


class Study:
    """Trains and tests cells on one federation; device and worker processes change no result."""

    def __init__(self, federation: Federation, device: str, workers: int) -> None:
        self._federation = federation
        self._device = device
        self._workers = workers

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """The result of a cell: Dice per arm, site and patient, and the validation curves."""
        task = self._federation.task.model_copy(update={"size": (cell["size"], cell["size"])})
        sites = [folds(site, cell["folds"], cell["seed"])[cell["fold"]] for site in self._federation.sites]
        config = IopFlConfig(**cell["method"])
        if cell["trained"] == "federation":
            return self._federated(cell, task, sites, config, work)
        alone = FedAvg(_plain(config), task)
        dice: dict[str, dict[str, float | None]] = {}
        curves: dict[str, list[float]] = {}
        for site in sites:
            publication, history = self._train(alone, cell, task, [site], work / f"local-{site.name}")
            dice[site.name] = self._test(alone, publication.models[0].weights, site, task)
            curves |= _curve(history, "val_dice")
        return {"dice": {"local-only": dice}, "curves": {"local-only": curves}}

    def _federated(
        self, cell: Cell, task: Task, sites: Sequence[Site], config: IopFlConfig, work: Path
    ) -> dict[str, Any]:
        algorithm = IopFl(config, task)
        publication, history = self._train(algorithm, cell, task, sites, work / "federation")
        weights = {model.site: model.weights for model in publication.models}
        tuning = FineTuning(
            _plain(config).model_copy(update={"rounds": cell["tuning_rounds"]}), task, weights[None]
        )
        dice: dict[str, dict[str, Any]] = {"global": {}, "personal": {}, "fine-tuned": {}}
        curves = {
            "global": _curve(history, "val_dice"),
            "personal": _curve(history, "personal_val_dice"),
            "fine-tuned": {},
        }
        for site in sites:
            tuned, tuning_history = self._train(tuning, cell, task, [site], work / f"tuned-{site.name}")
            curves["fine-tuned"] |= _curve(tuning_history, "val_dice")
            for arm, state in (
                ("global", weights[None]),
                ("personal", weights[site.name]),
                ("fine-tuned", tuned.models[0].weights),
            ):
                dice[arm][site.name] = self._test(algorithm, state, site, task)
        return {"dice": dice, "curves": curves, "global_round": publication.details["selected_round"]}

    def _train(
        self, algorithm: Algorithm[Any], cell: Cell, task: Task, sites: Sequence[Site], work: Path
    ) -> tuple[Publication, tuple[RoundEntry, ...]]:
        """Run one federation in a folder of its own, or resume it."""
        specs = [
            SiteSpec(site.name, partial(SiteData.load, site, task), consents=True, cases=len(site.cases))
            for site in sites
        ]
        environment = RunEnvironment(cell["seed"], self._device, threads=1)
        identity = {"cell": cell, "data": self._federation.digest}
        outcome = federate(algorithm, specs, environment, work, identity, self._workers)
        return algorithm.publication(outcome.server), outcome.history

    def _test(self, algorithm: FedAvg, state: State, site: Site, task: Task) -> dict[str, float | None]:
        network = network_of(algorithm.network, state, torch.device(self._device))
        found = patient_dice(network, site.of_split("test"), task)
        return {patient: None if math.isnan(v) else round(v, 6) for patient, v in found.items()}


def _plain(config: IopFlConfig) -> FedAvgConfig:
    """FedAvg's part of the configuration."""
    return FedAvgConfig(**config.model_dump(include=set(FedAvgConfig.model_fields)))


def _curve(history: Sequence[RoundEntry], metric: str) -> dict[str, list[float]]:
    """A metric over the rounds, by site."""

    def values(site: str) -> Iterator[float]:
        for entry in history:
            if (
                site in entry.sites
                and metric in entry.sites[site].metrics
                and entry.phase not in ("personalise", "export")
            ):
                yield round(entry.sites[site].metrics[metric], 4)

    names = {site for entry in history for site in entry.sites}
    return {site: list(values(site)) for site in sorted(names)}
