"""A cell of `outside`: the federation of the other sites, and the arms at the site left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.outside.arms import HeldOutHospital, Models, plain_arms
from benchmarks.accuracy.outside.baked import baked_arms
from benchmarks.accuracy.outside.gate import Judge
from benchmarks.accuracy.outside.planted import Cohorts, inverted, planted, some
from benchmarks.accuracy.outside.routing import routing_arms
from benchmarks.harness.cells import Cell
from benchmarks.harness.evaluation import Scans
from model_store.store import Store
from model_store.task import Task
from personalization.iop_fl.space import GLOBAL
from personalization.test_time.config import AdaptationConfig
from training.config import RunConfig
from training.data.cases import Case, Federation
from training.data.federation import load_federation
from training.engine.folder import RunFolder
from training.errors import TrainingError
from training.methods.iop_fl import IopFlConfig
from training.run import Result, Run, execute
from training.tasks import template

# A set of another modality, for cohorts of scans that a hospital sent by mistake.
FOREIGN = "breast_ultrasound"

LEARN_NO_ROUTING: Mapping[str, Callable[[Models, HeldOutHospital, int, int], dict[str, Any]]] = {
    "plain": plain_arms,
    "baked": baked_arms,
}


class Federations:
    """The federations of all sites but one. Each is trained once and kept for other cells and tries."""

    def __init__(self, federation: Federation, folder: Path, device: str, workers: int, train: bool) -> None:
        self._federation = federation
        self._folder = folder
        self._device = device
        self._workers = workers
        self._train = train

    def run_of(self, cell: Cell) -> Run:
        """The training run that a cell needs."""
        federation = self._federation
        if cell["size"] is not None:
            size = (cell["size"], cell["size"])
            federation = replace(federation, task=federation.task.model_copy(update={"size": size}))
        settings = RunConfig(seed=cell["seed"], leave_out=(cell["site"],), consent="all", device=self._device)
        return Run(federation, "iop-fl", IopFlConfig(**cell["method"]), settings)

    def ready(self, cell: Cell) -> bool:
        """Whether the cell's federation is trained, or may be trained by this process now."""
        folder = RunFolder(self._of(cell) / "run")
        try:
            with folder.held():
                checkpoint = folder.checkpoint()
                done = checkpoint is not None and checkpoint.step >= len(self.run_of(cell).algorithm().plan())
                return done or self._train
        except TrainingError:
            return False  # another process is training it

    def get(self, cell: Cell) -> Result:
        """The trained federation of a cell; trains the rounds that are missing."""
        return execute(
            self.run_of(cell),
            self._of(cell) / "run",
            resume=True,
            store=Store(self._of(cell) / "store"),
            name="outside",
            workers=self._workers,
        )

    def _of(self, cell: Cell) -> Path:
        set_: str = cell["set"]
        return self._folder / set_ / f"{cell['site']}-{cell['seed']}"


class Study:
    """Computes cells, each on the federation that belongs to it."""

    def __init__(self, federation: Federation, federations: Federations, device: str) -> None:
        self._federation = federation
        self._federations = federations
        self._device = torch.device(device)

    def compute(self, cell: Cell) -> dict[str, Any]:
        """Dice per arm and patient of the site left out, and the gate's verdicts."""
        result = self._federations.get(cell)
        task, seed = result.run.federation.task, cell["seed"]
        states = {draft.site or GLOBAL: draft.weights for draft in result.publication.models}
        # The sites in order, the global model last, as a routing space has them
        ordered = {name: states[name] for name in sorted(states, key=lambda name: (name == GLOBAL, name))}
        models = Models(result.publication.models[0].network, ordered, self._device)
        judge = Judge(models, result.publication.statistics, task)
        cases = self._federation.site(cell["site"]).cases
        scans = Scans.load(cases, task)
        hospital = HeldOutHospital.of(scans, seed, cell["images"])
        facts = cell["adaptation"]
        if cell["arms"] in LEARN_NO_ROUTING:
            return LEARN_NO_ROUTING[cell["arms"]](models, hospital, facts["epochs"], seed)
        fields = {name: value for name, value in facts.items() if name not in ("loss", "planted")}
        config = AdaptationConfig(**fields, seed=seed)
        if cell["arms"] == "planted":
            cohorts = self._cohorts(cases, scans, task, facts["planted"])
            return planted(models, judge, scans, cohorts, config)
        return routing_arms(models, judge, hospital, config)

    def _cohorts(self, cases: Sequence[Case], scans: Scans, task: Task, count: int) -> Cohorts:
        few = some(scans, count)
        foreign = None
        folder = self._federation.root.parent / FOREIGN
        if folder.is_dir() and folder.name != self._federation.root.name:
            site = load_federation(folder, template(FOREIGN)).sites[0]
            foreign = Scans.load(site.cases[:count], task)
        return Cohorts(
            scans.of(few), Scans.load([c for c in cases if c.patient in few], task, inverted), foreign
        )
