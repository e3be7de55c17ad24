"""A cell of `benchmarks.cross_organ`: train, test inside, and let hospitals from outside make use of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cross_organ_data import OUTSIDE, TestSet, as_json, few_labels, load_inside
from benchmarks.cross_organ_methods import FedBn, FedPer, FedRep, SecondStage
from benchmarks.federating import federate
from benchmarks.harness import Cell
from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.joining import Examples, JoiningConfig, join
from personalization.networks import FedOapUNet
from personalization.state import State
from training.data.cases import Federation
from training.data.dataset import SiteData, SliceSet
from training.engine.client import Surroundings
from training.engine.history import RoundEntry
from training.engine.in_process import Outcome
from training.methods.fedoap import FedOap
from training.methods.fedoap_config import FedOapConfig
from training.methods.local import network_of, new_network, state_of

LOCAL, FEDAVG, FEDPER, FEDREP, FEDBN = "local-only", "FedAvg", "FedPer", "FedRep", "FedBN"
TUNED, WHOLE, SCRATCH = "FedAvg + fine-tuning", "FedOAP", "from scratch"
NO_DCA, NO_ADAPTER, NO_PBL = "without DCA", "without adapter", "without PBL"
ARMS = (LOCAL, FEDAVG, FEDPER, FEDREP, FEDBN, TUNED, NO_DCA, NO_ADAPTER, NO_PBL, WHOLE)
# What a cell may train: a run of FedOAP has the arm without the perturbed loss too, by the same first stage.
TRAINED = (WHOLE, TUNED, SCRATCH, FEDAVG, LOCAL, NO_DCA, NO_ADAPTER, FEDPER, FEDREP, FEDBN)
ZERO_SHOT = "0"
_RIVALS: Mapping[str, type[FedOap]] = {FEDAVG: FedOap, FEDPER: FedPer, FEDREP: FedRep, FEDBN: FedBn}
_PLAIN = {"attention": False, "adapter": False}


def compute(federation: Federation, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    """The result of a cell: per arm what is found inside and outside, and the validation curves."""
    side = cell["size"]
    task = federation.task.model_copy(update={"size": (side, side)})
    return _Study(federation, task, device, cell, work).result()


class _Study:
    def __init__(self, federation: Federation, task: Task, device: str, cell: Cell, work: Path) -> None:
        self._federation, self._task, self._cell, self._work = federation, task, cell, work
        self._around = Surroundings(cell["seed"], device)
        self._device = torch.device(device)
        self._config = FedOapConfig(**cell["method"])
        self._data: dict[str, SiteData] = {}
        self._tests: dict[str, TestSet] = {}
        self._inside: dict[str, Any] = {}
        self._outside: dict[str, Any] = {}
        self._curves: dict[str, dict[str, list[float]]] = {}

    def result(self) -> dict[str, Any]:
        trained = self._cell["trained"]
        if trained == SCRATCH:
            spec = FedOap(self._changed(**_PLAIN), self._task).network
            draw = self._around.context("scratch", 0, 1).generator("weights")
            self._join_outside(SCRATCH, spec, state_of(new_network(spec, draw)), "plain", zero_shot=False)
        else:
            self._load()
            self._train(trained)
        return {"inside": self._inside, "curves": self._curves, "outside": self._outside}

    def _load(self) -> None:
        for site in self._federation.sites:
            if site.name not in OUTSIDE:
                loaded = load_inside(site, self._task, self._cell["seed"], self._cell["most"])
                self._data[site.name], self._tests[site.name] = loaded

    def _train(self, trained: str) -> None:
        if trained == WHOLE:
            self._in_two_stages(self._config, {WHOLE: "perturbed", NO_PBL: "plain"}, WHOLE, "perturbed")
        elif trained == TUNED:
            self._in_two_stages(self._changed(**_PLAIN), {TUNED: "plain"}, FEDAVG, "plain")
        elif trained in (NO_DCA, NO_ADAPTER):
            left_out = "attention" if trained == NO_DCA else "adapter"
            method = FedOap(self._changed(**{left_out: False}), self._task)
            self._take(trained, method, self._run(method, trained))
        elif trained == LOCAL:
            method = FedOap(self._one_stage(), self._task)
            for site, data in self._data.items():
                self._take(LOCAL, method, self._run(method, f"{LOCAL}-{site}", {site: data}))
        else:
            rival = _RIVALS[trained](self._one_stage(), self._task)
            self._take(trained, rival, self._run(rival, trained))

    def _in_two_stages(self, config: FedOapConfig, arms: Mapping[str, str], outside: str, loss: str) -> None:
        """One first stage, one second stage per arm; `outside` begins with the first's global model."""
        method = FedOap(config.model_copy(update={"fine_tune_rounds": 0}), self._task)
        first = self._run(method, "first")
        for arm, own in arms.items():
            second = SecondStage(config.model_copy(update={"fine_tune_loss": own}), self._task, first.server)
            outcome = self._run(second, f"second-{own}")
            self._take(arm, second, outcome, first.history)
        shared = method.publication(first.server).models[0]
        self._join_outside(outside, shared.network, shared.weights, loss)

    def _changed(self, **changes: Any) -> FedOapConfig:
        return self._config.model_copy(update=changes)

    def _one_stage(self) -> FedOapConfig:
        """The plain network, with the steps of the second stage spent in the first."""
        config = self._config
        steps = config.fine_tune_steps or config.local_steps
        rounds = config.rounds + math.ceil(config.fine_tune_rounds * steps / config.local_steps)
        return self._changed(**_PLAIN, rounds=rounds, fine_tune_rounds=0)

    def _run(self, method: FedOap, name: str, data: Mapping[str, SiteData] | None = None) -> Outcome:
        identity = {"cell": dict(self._cell), "run": name, "data": self._federation.digest}
        return federate(method, data or self._data, self._around, self._work / name, identity)

    def _take(self, arm: str, method: FedOap, outcome: Outcome, before: Sequence[RoundEntry] = ()) -> None:
        """Test every site's model on its own test images."""
        for draft in method.publication(outcome.server).models:
            if draft.site is not None:
                network = network_of(draft.network, draft.weights, self._device)
                found = as_json(self._tests[draft.site].of(network))
                self._inside.setdefault(arm, {})[draft.site] = found
        curves = self._curves.setdefault(arm, {})
        for entry in (*before, *outcome.history):
            for site, note in entry.sites.items():
                for name in ("val_dice", "personal_val_dice"):
                    if name in note.metrics and entry.phase != "export":
                        curves.setdefault(site, []).append(round(note.metrics[name], 4))

    def _join_outside(
        self, arm: str, spec: NetworkSpec, state: State, loss: str, *, zero_shot: bool = True
    ) -> None:
        """Every site from outside as it comes, and after training on few labelled images."""
        cell, found = self._cell, self._outside.setdefault(arm, {})
        for name in OUTSIDE:
            cases, versions = few_labels(self._federation.site(name), cell["seed"], cell["budgets"])
            tests = TestSet.load(cases, self._task)
            by_budget = found.setdefault(name, {})
            if zero_shot:
                by_budget[ZERO_SHOT] = as_json(tests.of(network_of(spec, state, self._device)))
            for budget, site in versions.items():
                network = network_of(spec, state, self._device)
                assert isinstance(network, FedOapUNet)
                data = SiteData.load(site, self._task)
                settings = joining(len(data.train), cell["joining_steps"], loss, cell["seed"])
                join(network, _examples(data.train), _examples(data.val), settings)
                by_budget[str(budget)] = as_json(tests.of(network))


def joining(images: int, steps: int, loss: str, seed: int) -> JoiningConfig:
    """As many epochs as come to at least so many steps: the same, whatever the training begins with."""
    batch = min(JoiningConfig().batch_size, images)
    epochs = math.ceil(steps / math.ceil(images / batch))
    plain = JoiningConfig(epochs=epochs, batch_size=batch, seed=seed, loss="plain")
    return plain if loss == "plain" else JoiningConfig(epochs=epochs, batch_size=batch, seed=seed)


def _examples(slices: SliceSet) -> Examples:
    return Examples(torch.from_numpy(slices.images), torch.from_numpy(slices.targets), slices.patients)
