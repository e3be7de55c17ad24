"""A federation, a method and a configuration to a trained result: the one entry for people and benchmarks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model_store.artefact import Artefact
from model_store.manifest import Lineage
from model_store.store import Store
from training.algorithm import Algorithm, Publication
from training.bounds import NO_BOUNDS
from training.config import MethodConfig, RunConfig
from training.data.cases import Federation, Site
from training.data.classification import LabelledData
from training.data.segmentation.dataset import SiteData
from training.data.splits import check_trains, split_by_patient
from training.engine.client import RunEnvironment
from training.engine.egress import ALL_KINDS, SiteSpec
from training.engine.folder import RunFolder
from training.engine.history import Observer, RoundEntry
from training.engine.in_process import InProcessEngine
from training.errors import ConfigurationError
from training.methods.registry import method, methods
from training.publish import Origin, check_names, parts_of, publish


@dataclass(frozen=True)
class Run:
    """What is to be run. `method` is a registered name, `config` of the class that the method takes.

    The sites' splits are taken as they are where every case has one (a benchmark's folds), and drawn by
    patient from the seed otherwise.
    """

    federation: Federation[Any]
    method: str
    config: MethodConfig
    settings: RunConfig = field(default_factory=RunConfig)

    def identity(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON.

        Consent is not part of it: it decides what is exported of a result, and may come later. Bounds that no
        site has are left out, so that a run without them keeps the id it had before there were any.
        """
        left_out = {"consent"} if self.settings.feature_bounds else {"consent", "feature_bounds"}
        splits = {site.name: {case.name: case.split for case in site.cases} for site in self.federation.sites}
        return {
            "method": self.method,
            "data": self.federation.digest,
            "splits": _digest(splits),
            "config": self.config.model_dump(mode="json"),
            "run": self.settings.model_dump(mode="json", exclude=left_out),
        }

    @property
    def id(self) -> str:
        """A short name that is the same for the same run, wherever and whenever it runs."""
        return _digest(self.identity())[:16]

    def sites(self) -> tuple[Site[Any], ...]:
        """The sites that take part, every case with its split.

        Raises ConfigurationError, and FederationError where a site has no patient to train on.
        """
        known = [site.name for site in self.federation.sites]
        named = {
            "leave_out": self.settings.leave_out,
            "egress": tuple(self.settings.egress),
            "feature_bounds": tuple(self.settings.feature_bounds),
        }
        if self.settings.consent != "all":
            named["consent"] = self.settings.consent
        problems = [
            f"{field}: there is no site '{name}'; sites: {', '.join(known)}"
            for field, names in named.items()
            for name in names
            if name not in known
        ]
        kept = [site for site in self.federation.sites if site.name not in self.settings.leave_out]
        if not kept and not problems:
            problems = ["leave_out: no site is left"]
        if problems:
            raise ConfigurationError("the run does not fit the federation", problems)
        return tuple(self._split(site) for site in kept)

    def specs(self) -> tuple[SiteSpec, ...]:
        """The same sites, as an engine knows them. Raises as `sites`."""
        settings = self.settings
        return tuple(
            SiteSpec(
                site.name,
                loader(self, site),
                frozenset(settings.egress.get(site.name, ALL_KINDS)),
                settings.consent == "all" or site.name in settings.consent,
                len(site.cases),
                settings.feature_bounds.get(site.name, NO_BOUNDS),
            )
            for site in self.sites()
        )

    def _split(self, site: Site[Any]) -> Site[Any]:
        if not all(case.split for case in site.cases):
            return split_by_patient(site, self.settings.seed, test=self.settings.test, val=self.settings.val)
        # A site without training patients would be dropped from every round: fail before the first one.
        check_trains(site)
        return site

    def algorithm(self) -> Algorithm[Any]:
        """The method, made for this federation's task. Raises ConfigurationError for an unknown one, or one
        for another kind of task."""
        chosen, task = method(self.method), self.federation.task
        if task.kind not in chosen.kinds:
            fitting = ", ".join(name for name in methods() if task.kind in method(name).kinds)
            raise ConfigurationError(
                f"method '{self.method}' does not fit the task",
                [f"it is for {' and '.join(chosen.kinds)}, '{task.name}' is a {task.kind}: take {fitting}"],
            )
        return chosen.build(self.config, task)


@dataclass(frozen=True)
class Result:
    """A finished run: what it offers, what happened, and what was published (the composite last)."""

    run: Run
    publication: Publication
    history: tuple[RoundEntry, ...]
    artefacts: tuple[Artefact, ...]


def execute(
    run: Run,
    folder: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    store: Store | None = None,
    name: str | None = None,
) -> Result:
    """Run a federation to its end, and publish it when there is a store.

    Args:
        folder: the run's folder; a killed run goes on from it with `resume`.
        workers: worker processes, at most one per site; the number of cores by default, 0 for none. Decides
            no result.
        name: of the published artefact; the task's by default.

    Raises:
        TrainingError: see `training.errors`; RunMismatch when the folder holds another run.
    """
    specs = run.specs()
    algorithm = run.algorithm()
    if run.settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("the run cannot start", ["device: no CUDA device is available; use cpu"])
    name = name or run.federation.task.name
    if store is not None:
        check_names(name, parts_of(algorithm, specs))
    run_folder = RunFolder(folder)
    with run_folder.held():
        run_folder.claim(run.identity(), resume=resume)
        engine = InProcessEngine(
            algorithm,
            specs,
            RunEnvironment(run.settings.seed, run.settings.device, run.settings.threads),
            run_folder,
            workers=(os.cpu_count() or 1) if workers is None else workers,
            participation=run.settings.participation,
            observer=observer,
        )
        outcome = engine.run()
        publication = algorithm.publication(outcome.server)
        artefacts: tuple[Artefact, ...] = ()
        if store is not None:
            artefacts = publish(store, _origin(run, specs, name), publication)
    return Result(run, publication, outcome.history, artefacts)


def loader(run: Run, site: Site[Any]) -> Callable[[], Any]:
    """What reads a site's data, as its task needs it."""
    task = run.federation.task
    if task.kind == "classification":
        return partial(LabelledData.load, site, task)
    return partial(SiteData.load, site, task, keep_empty=run.settings.keep_empty)


def _origin(run: Run, sites: Sequence[SiteSpec], name: str) -> Origin:
    return Origin(
        name,
        run.federation.task,
        Lineage(
            method=run.method,
            run=run.id,
            sites=tuple(site.name for site in sites),
            rounds=run.config.rounds,
            seed=run.settings.seed,
            details=run.identity(),
        ),
    )


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
