"""A cell of `cross_organ`: train, test inside, and let outside hospitals join."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.cross_organ.data import Hospitals, Inside
from benchmarks.accuracy.cross_organ.judging import as_json
from benchmarks.accuracy.cross_organ.methods import FedBn, FedPer, FedRep, FirstStage, Sparing, TrainedIn
from benchmarks.harness.cells import Cell
from benchmarks.harness.federate import federate, in_memory
from model_store.manifest import NetworkSpec
from personalization.fedoap.joining import JoiningConfig, JoiningExamples, join
from personalization.state import State
from training.data.segmentation.dataset import SliceSet
from training.engine.client import RunEnvironment
from training.engine.engine import RunOutcome
from training.methods.common.local_training import network_of, new_network, state_of
from training.methods.fedoap.client import JOINED
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap

LOCAL, FEDAVG, FEDPER, FEDREP, FEDBN = "local-only", "FedAvg", "FedPer", "FedRep", "FedBN"
TUNED, WHOLE, SCRATCH = "FedAvg + fine-tuning", "FedOAP", "from scratch"
NO_ADAPTER, NO_PBL, NO_BANK = "without adapter", "without PBL", "without bank"
# The query stage serves the attention: neither is used without the other.
NO_QUERY = "without query stage, attention and bank"
ARMS = (LOCAL, FEDAVG, FEDPER, FEDREP, FEDBN, TUNED, NO_QUERY, NO_BANK, NO_ADAPTER, NO_PBL, WHOLE)
# What a cell may train. A cell of FedOAP includes the arm without the perturbed loss: same first stage.
TRAINED = (WHOLE, TUNED, SCRATCH, FEDAVG, LOCAL, NO_QUERY, NO_BANK, NO_ADAPTER, FEDPER, FEDREP, FEDBN)
# Twice the rounds, to check for a plateau: the end of a cosine schedule flattens any curve.
LONG_WHOLE, LONG_FEDAVG = "FedOAP, twice the rounds", "FedAvg, twice the rounds"
CONTROLS: Mapping[str, str] = {LONG_WHOLE: WHOLE, LONG_FEDAVG: FEDAVG}
# What an outside hospital starts from; trained with the plain loss unless the name says otherwise.
WHOLE_PBL = "FedOAP, perturbed loss"
STARTS = (WHOLE, WHOLE_PBL, FEDAVG, SCRATCH)
ZERO_SHOT = "0"
_RIVALS: Mapping[str, type[FedOap]] = {FEDAVG: Sparing, FEDPER: FedPer, FEDREP: FedRep, FEDBN: FedBn}
_WITHOUT: Mapping[str, Mapping[str, Any]] = {
    NO_QUERY: {"attention": False},
    NO_BANK: {"kv": "averaged"},
    NO_ADAPTER: {"adapter": False},
}
_PLAIN = {"attention": False, "adapter": False}


def compute(hospitals: Hospitals, device: str, cell: Cell, work: Path) -> dict[str, Any]:
    """The result of a cell: per arm the test results inside and outside, and the validation curves."""
    return _Study(hospitals, device, cell, work).result()


class _Study:
    def __init__(self, hospitals: Hospitals, device: str, cell: Cell, work: Path) -> None:
        self._hospitals, self._cell, self._work = hospitals, cell, work
        self._task = hospitals.task(cell["size"])
        self._around = RunEnvironment(cell["seed"], device)
        self._device = torch.device(device)
        self._config = FedOapConfig(**cell["method"])
        self._found: dict[str, dict[str, Any]] = {"inside": {}, "curves": {}, "outside": {}}

    def result(self) -> dict[str, Any]:
        trained, config = self._cell["trained"], self._config
        if trained == WHOLE:
            starts = {WHOLE: "plain", WHOLE_PBL: "perturbed"}
            self._in_two_stages(config, {WHOLE: "perturbed", NO_PBL: "plain"}, starts)
        elif trained == TUNED:
            self._in_two_stages(_changed(config, **_PLAIN), {TUNED: "plain"}, {FEDAVG: "plain"})
        elif trained == SCRATCH:
            spec = FedOap(_changed(config, **_PLAIN), self._task).network
            draw = self._around.context("scratch", 0, 1).generator("weights")
            self._join_outside({SCRATCH: "plain"}, spec, state_of(new_network(spec, draw)))
        elif trained == LOCAL:
            for site in self._inside.data:
                self._train(LOCAL, Sparing(one_stage(config), self._task), f"{LOCAL}-{site}", site)
        elif trained in CONTROLS:
            longer = _changed(config, rounds=2 * config.rounds)
            longer = one_stage(longer) if trained == LONG_FEDAVG else longer
            self._train(trained, Sparing(longer, self._task), "longer")
        elif trained in _WITHOUT:
            self._train(trained, Sparing(_changed(config, **_WITHOUT[trained]), self._task), "without")
        else:
            self._train(trained, _RIVALS[trained](one_stage(config), self._task), "rival")
        return self._found

    @property
    def _inside(self) -> Inside:
        cell = self._cell
        return self._hospitals.inside(cell["seed"], cell["size"], tuple(cell["most"]))

    def _train(self, arm: str, method: FedOap, name: str, site: str | None = None) -> None:
        """Run a method, at one site only if `site` is given, and test the result."""
        self._take(arm, method, self._run(method, name, site))

    def _in_two_stages(
        self, config: FedOapConfig, arms: Mapping[str, str], starts: Mapping[str, str]
    ) -> None:
        """Run one first stage, and a second stage per arm by its loss.

        Outside, the first stage's global model joins once per entry of `starts`.
        """
        method = FirstStage(config, self._task)
        first = self._run(method, "first")
        for arm, loss in arms.items():
            _fork(self._work / "first", self._work / loss)
            self._train(arm, Sparing(_changed(config, fine_tune_loss=loss), self._task), loss)
        shared = method.publication(first.server).models[0]
        self._join_outside(starts, shared.network, shared.weights)

    def _run(self, method: FedOap, name: str, site: str | None = None) -> RunOutcome:
        data = self._inside.data
        data = {site: data[site]} if site else data
        identity = {"cell": dict(self._cell), "data": self._hospitals.federation.digest}
        return federate(method, in_memory(data), self._around, self._work / name, identity)

    def _take(self, arm: str, method: FedOap, outcome: RunOutcome) -> None:
        """Test every site's model on its own test images, and record its Dice in validation by round."""
        tests = self._inside.tests
        for draft in method.publication(outcome.server).models:
            if draft.site is not None:
                network = network_of(draft.network, draft.weights, self._device)
                self._found["inside"].setdefault(arm, {})[draft.site] = as_json(tests[draft.site].of(network))
        curves = self._found["curves"].setdefault(arm, {})
        for entry in outcome.history:
            # Stage 1 is validated before a round, and its end in a phase of its own; stage 2 after a round.
            number = {"train": entry.round, "validate": method.config.rounds, "finetune": entry.round + 1}
            stage, name = ("2", "personal_val_dice") if entry.phase == "finetune" else ("1", JOINED)
            for site, note in entry.sites.items():
                if entry.phase in number and name in note.metrics:
                    point = [number[entry.phase], round(note.metrics[name], 4)]
                    curves.setdefault(site, {}).setdefault(stage, []).append(point)

    def _join_outside(self, starts: Mapping[str, str], spec: NetworkSpec, state: State) -> None:
        """Test every outside site zero-shot, and after training on a few labelled images by each loss."""
        cell = self._cell
        outside = self._hospitals.outside(cell["seed"], cell["size"], tuple(cell["budgets"]))
        for number, (start, loss) in enumerate(starts.items()):
            by_site = self._found["outside"].setdefault(start, {})
            for name, tests in outside.tests.items():
                found = by_site.setdefault(name, {})
                if start != SCRATCH and number == 0:
                    found[ZERO_SHOT] = as_json(tests.of(network_of(spec, state, self._device)))
                for budget, data in outside.labelled.get(name, {}).items():
                    network = TrainedIn.of(spec, state, self._device, self._config.precision)
                    settings = joining(len(data.train), cell["joining"], loss, cell["seed"])
                    join(network, _examples(data.train), _examples(data.val), settings)
                    found[str(budget)] = as_json(tests.of(network))


def one_stage(config: FedOapConfig) -> FedOapConfig:
    """The configuration of the plain network, with the second stage's steps moved to the first.

    Raises ValueError when these are not whole rounds: arms would differ in steps.
    """
    steps = config.fine_tune_rounds * (config.fine_tune_steps or config.local_steps)
    if steps % config.local_steps:
        raise ValueError(
            f"the {steps} steps of stage 2 are no whole rounds of {config.local_steps} steps: change "
            "fine_tune_rounds or fine_tune_steps"
        )
    rounds = config.rounds + steps // config.local_steps
    return _changed(config, **_PLAIN, rounds=rounds, fine_tune_rounds=0)


def joining(images: int, planned: Mapping[str, int], loss: str, seed: int) -> JoiningConfig:
    """The configuration of joining: the same steps and batches for every number of images and every start.

    Raises ValueError when the steps are not whole epochs.
    """
    steps, batch = planned["steps"], planned["batch"]
    if steps % (per_epoch := math.ceil(images / batch)):
        raise ValueError(
            f"joining: {steps} steps are no whole epochs of {per_epoch} batches ({images} images)"
        )
    config = JoiningConfig(batch_size=batch, seed=seed, loss="plain" if loss == "plain" else "perturbed")
    # Of few images there may be more epochs than a client may ask for.
    return config.model_copy(update={"epochs": steps // per_epoch})


def _changed(config: FedOapConfig, **changes: Any) -> FedOapConfig:
    return config.model_copy(update=changes)


def _fork(folder: Path, to: Path) -> None:
    """Copy a finished run's folder for another run to continue; an existing copy is kept."""
    if not to.exists():
        aside = to.with_name(f".{to.name}")
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside)
        aside.replace(to)


def _examples(slices: SliceSet) -> JoiningExamples:
    return JoiningExamples(torch.from_numpy(slices.images), torch.from_numpy(slices.targets), slices.patients)
