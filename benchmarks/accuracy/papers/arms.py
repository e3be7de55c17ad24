"""What the tables share: an arm, the run that trains it, what it cost, and both metrics of its answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.unseen.official import TargetSlices, score_of
from benchmarks.harness.evaluation import Scans, predict
from training.config import MethodConfig, RunConfig
from training.data.cases import Case, Federation, Site
from training.data.federation import load_federation
from training.data.splits import folds
from training.engine.history import RoundEntry
from training.methods.common.export import EXPORT
from training.methods.common.local_training import network_of
from training.methods.registry import method
from training.run import Result, Run, execute
from training.tasks import template


@dataclass(frozen=True)
class Arm:
    """One line of a table: a registered method, and the fields in which it differs from the other lines.

    `published` is the mean that the paper prints for it, by the name of the column; arms that the paper has
    not are shown without.
    """

    name: str
    method: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    def config(self, common: Mapping[str, Any]) -> MethodConfig:
        """The method's configuration; of the `common` fields it takes those that it has."""
        config = method(self.method).config
        shared = {name: value for name, value in common.items() if name in config.model_fields}
        return config(**{**shared, **self.fields})


@dataclass(frozen=True)
class Tests:
    """A site's test scans, decoded once for many networks."""

    __test__ = False  # not a test case for pytest

    scans: Scans
    slices: TargetSlices

    @classmethod
    def load(cls, cases: Sequence[Case], federation: Federation) -> Tests:
        """Decode the cases' scans."""
        scans = Scans.load(cases, federation.task)
        return cls(scans, TargetSlices.of(cases, scans, federation.task))

    def judge(self, network: nn.Module) -> dict[str, Any]:
        """A network's scores, in the form of the rows.

        `dice`: foreground Dice per patient on the scan's grid, None where undefined. `paper`: Dice as
        IOP-FL's code has it, mean over slices with a target and over all classes, the background included.
        """
        network.eval()
        dice = self.scans.dice(predict(network, self.scans.images))
        return {
            "dice": {patient: None if math.isnan(d) else round(d, 6) for patient, d in dice.items()},
            "paper": round(score_of(network, self.slices).with_background, 5),
        }


class Segmented:
    """The segmentation sets in a folder. A seed's test patients are one fold: together they are all patients.

    A run is trained once, in a folder named by its identity, and every cell and table that needs it uses it.
    """

    def __init__(self, data: Path, folder: Path, device: str, seeds: int, workers: int) -> None:
        self.device = torch.device(device)
        self._data, self._folder, self._seeds, self._workers = data, folder, seeds, workers
        self.federation = lru_cache(maxsize=2)(self._federation)
        self.tests = lru_cache(maxsize=8)(self._tests)

    def _federation(self, name: str, size: int, seed: int) -> Federation:
        task = template(name).model_copy(update={"size": (size, size)})
        found = load_federation(self._data / name, task)
        count = max(self._seeds, 2)
        return replace(found, sites=tuple(folds(site, count, 0)[seed % count] for site in found.sites))

    def _tests(self, name: str, size: int, seed: int, site: str, everyone: bool) -> Tests:
        federation = self.federation(name, size, seed)
        cases = federation.site(site).cases if everyone else federation.site(site).of_split("test")
        return Tests.load(cases, federation)

    def train(
        self, federation: Federation, arm: str, config: MethodConfig, seed: int, leave_out: Sequence[str] = ()
    ) -> Result:
        """Run a method, or read the finished run."""
        settings = RunConfig.model_validate(
            {"seed": seed, "leave_out": tuple(leave_out), "consent": "all", "device": self.device.type}
        )
        run = Run(federation, arm, config, settings)
        return execute(run, self._folder / run.id, workers=self._workers, resume=True)


def networks(result: Result, sites: Sequence[Site], device: torch.device) -> Iterator[tuple[str, nn.Module]]:
    """What each site is served: its own model where it has one, else the global one."""
    drafts = {draft.site: draft for draft in result.publication.models}
    for site in sites:
        draft = drafts.get(site.name) or drafts[None]
        yield site.name, network_of(draft.network, draft.weights, device)


def cost(history: Sequence[RoundEntry]) -> dict[str, float]:
    """What a run cost a site in the mean: bytes sent and received, and seconds of its own computing.

    The export of personal models is not counted: serving needs it, the method does not.
    """
    sites = {name for entry in history for name in entry.sites}
    entries = [entry for round_ in history if round_.phase != EXPORT.name for entry in round_.sites.values()]
    return {
        "sent": round(sum(sum(entry.sent.values()) for entry in entries) / len(sites)),
        "received": round(sum(sum(entry.received.values()) for entry in entries) / len(sites)),
        "seconds": round(sum(entry.seconds for entry in entries) / len(sites), 1),
    }
