"""Is a personal model better than the global one at its own site? IOP-FL's inside half, on real institutions.

    python -m benchmarks.accuracy.inside.experiment --profile cpu --data ../shared/data/brain_lgg_flair \
        --rows docs/results/inside.cpu.jsonl

Arms: local-only, global (FedAvg), personal (IOP-FL), global + local fine-tuning. Every patient is tested once
per seed, in folds; rounds are chosen on validation patients, who are among those not tested. All arms start
from the same weights and take the same steps at every site; fine-tuning takes some more, as its name says.

A cell is (seed, fold, what is trained). Global and personal come from one federation, and fine-tuning starts
from its global model: one cell, three arms. Everything goes through `training`'s own engine and methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.accuracy.inside.report import page
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from benchmarks.harness.evaluation import patient_dice
from model_store.task import Task
from training.algorithm import Algorithm, Memory, Publication, State, StepContext
from training.data.cases import Federation, Site
from training.data.federation import TASK_FILE, load_federation
from training.data.segmentation.dataset import SiteData
from training.data.splits import folds
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry
from training.engine.in_process import InProcessEngine
from training.methods.common.local_training import network_of
from training.methods.common.state_tree import join
from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.iop_fl import IopFl, IopFlConfig
from training.tasks import template


@dataclass(frozen=True)
class Profile:
    """How large, how long, how often. `method` are fields of IopFlConfig."""

    size: int
    folds: int
    seeds: int
    tuning_rounds: int
    device: str = "cpu"
    method: Mapping[str, Any] = field(default_factory=dict)


PROFILES = {
    "smoke": Profile(32, 2, 1, 1, method={"width": 4, "rounds": 2}),
    "cpu": Profile(96, 2, 2, 5, method={"width": 16, "rounds": 25}),
    "full": Profile(256, 5, 3, 10, "cuda", method={"width": 32, "rounds": 100}),
}


class FineTuning(FedAvg):
    """Training at one site from given weights instead of fresh ones."""

    def __init__(self, config: FedAvgConfig, task: Task, start: State) -> None:
        super().__init__(config, task)
        self._start = start

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """The given weights."""
        return Memory(join({"global": self._start}))


def cells_of(profile: str, settings: Profile, method: Mapping[str, Any]) -> list[Cell]:
    """Every (seed, fold): the federation first, since it answers the question."""
    common = setting_of(profile, settings, method)
    return [
        {"trained": trained, "seed": seed, "fold": fold, **common}
        for seed in range(settings.seeds)
        for trained in ("federation", "local-only")
        for fold in range(settings.folds)
    ]


def setting_of(profile: str, settings: Profile, method: Mapping[str, Any]) -> dict[str, Any]:
    """What all cells of a table share; all of the method, so that a changed default makes other cells."""
    return {
        "profile": profile,
        "size": settings.size,
        "folds": settings.folds,
        "tuning_rounds": settings.tuning_rounds,
        "method": IopFlConfig(**method).model_dump(mode="json"),
    }


class Experiment:
    """Trains and tests one cell; what it needs beside the cell does not change a result."""

    def __init__(self, federation: Federation, device: str, workers: int) -> None:
        self._federation = federation
        self._device = device
        self._workers = workers

    def __call__(self, cell: Cell, work: Path) -> dict[str, Any]:
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
        """Run, or resume, one federation in a folder of its own."""
        folder = RunFolder(work)
        folder.claim({"cell": cell, "data": self._federation.digest}, resume=True)
        specs = [
            SiteSpec(site.name, partial(SiteData.load, site, task), consents=True, size=len(site.cases))
            for site in sites
        ]
        surroundings = RunEnvironment(cell["seed"], self._device, threads=1)
        outcome = InProcessEngine(algorithm, specs, surroundings, folder, workers=self._workers).run()
        for entry in outcome.history:
            if entry.dropped:
                raise RuntimeError(f"{work}: a site dropped out, arms would not compare: {entry.dropped}")
        return algorithm.publication(outcome.server), outcome.history

    def _test(self, algorithm: FedAvg, state: State, site: Site, task: Task) -> dict[str, float | None]:
        network = network_of(algorithm.network, state, torch.device(self._device))
        found = patient_dice(network, site.of_split("test"), task)
        return {patient: None if math.isnan(v) else round(v, 6) for patient, v in found.items()}


def _plain(config: IopFlConfig) -> FedAvgConfig:
    """The same, without what is IOP-FL's own."""
    return FedAvgConfig(**config.model_dump(include=set(FedAvgConfig.model_fields)))


def _curve(history: Sequence[RoundEntry], metric: str) -> dict[str, list[float]]:
    """A metric over the rounds, by site."""

    def values(site: str) -> Iterator[float]:
        for entry in history:
            if site in entry.sites and metric in entry.sites[site].metrics and entry.phase != "export":
                yield round(entry.sites[site].metrics[metric], 4)

    names = {site for entry in history for site in entry.sites}
    return {site: list(values(site)) for site in sorted(names)}


def main(
    data: Annotated[Path, typer.Option(help="A federation folder, or a set with a template of its name.")],
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "cpu",
    tau: Annotated[float | None, typer.Option(help="A try: another share of the newest local model.")] = None,
    learning_rate_decay: Annotated[float | None, typer.Option(help="A try: factor per round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="A try: another number of rounds.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="A try: more passes per round.")] = None,
    selection: Annotated[str | None, typer.Option(help="A try: 'best' or 'last' round.")] = None,
    personal_statistics: Annotated[
        str | None, typer.Option(help="A try: batch norm of personal models 'averaged' or their 'own'.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Fewer seeds than the profile's, for a try.")] = None,
    workers: Annotated[int, typer.Option(help="Worker processes; does not change a result.")] = 1,
    state_dir: Annotated[
        Path, typer.Option(help="Where unfinished cells keep their checkpoints.")
    ] = STATE_DIR,
) -> None:
    """Compute the cells that have no row yet; the page of results is written after each."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile '{profile}'; there are {', '.join(PROFILES)}")
    torch.set_num_threads(1)
    settings = PROFILES[profile]
    settings = replace(settings, seeds=seeds or settings.seeds)
    tries = {
        "tau": tau,
        "learning_rate_decay": learning_rate_decay,
        "rounds": rounds,
        "local_epochs": local_epochs,
        "selection": selection,
        "personal_statistics": personal_statistics,
    }
    method = {**settings.method, **{name: value for name, value in tries.items() if value is not None}}
    task = None if (data / TASK_FILE).is_file() else template(data.resolve().name)
    experiment = Experiment(load_federation(data, task), settings.device, workers)
    command = (
        f"python -m benchmarks.accuracy.inside.experiment --profile {profile} --data {data} --rows {rows}"
    )
    baseline = setting_of(profile, PROFILES[profile], PROFILES[profile].method)
    write = partial(page, rows, baseline, command)
    run(f"inside.{profile}", cells_of(profile, settings, method), Rows(rows), experiment, state_dir, write)
    write()


if __name__ == "__main__":
    typer.run(main)
