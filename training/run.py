"""Run a federated method on a federation and publish the result, for the CLI and the benchmarks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from model_store.artefact import Artefact
from model_store.manifest import Lineage
from model_store.store import Store
from training.algorithm import Algorithm, Publication
from training.bounds import NO_BOUNDS
from training.config import Defence, MethodConfig, RunConfig
from training.data.cases import Federation, RemoteSite, Site, data_warnings
from training.data.splits import check_trains, split_by_patient
from training.engine.client import RunEnvironment
from training.engine.device import default_workers, problem_of
from training.engine.egress import ALL_KINDS, SiteSpec, check_privacy
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.engine.history import Observer, RoundEntry, missing
from training.engine.pool import Pool
from training.errors import ConfigurationError
from training.local.registry import kind_of
from training.local.site import SiteData
from training.methods.installed import origin_of
from training.methods.registry import fitting, method
from training.parts.test import Untested
from training.publish import Origin, check_names, parts_of, publish


@dataclass(frozen=True)
class Run:
    """A run to execute. `method` is a registered name, `config` an instance of the method's config class.

    A site's splits are kept if every case has one (a benchmark's folds), and otherwise drawn by patient from
    the seed. `scores_tests` says whether the published model is scored on test patients, on which nothing
    depends.
    """

    federation: Federation[Any]
    method: str
    config: MethodConfig
    settings: RunConfig = field(default_factory=RunConfig)
    scores_tests: bool = True

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the result, as JSON; of a method of another package, its version.

        Consent is not included: it determines which models are exported, and may be given later. Empty
        feature bounds, no privacy and a default defence are left out, so that ids of runs from before these
        fields existed stay the same; `MethodConfig.identity` leaves out fields of the method likewise.
        """
        optional = ("feature_bounds", "privacy", "privacy_demands")
        left_out = {"consent", "secure_aggregation"}
        left_out |= {name for name in optional if not getattr(self.settings, name)}
        left_out |= set() if self.settings.defence != Defence() else {"defence"}
        splits = {site.name: site.splits_digest for site in self.federation.sites}
        origin = origin_of(self.method)
        return {
            "method": self.method,
            "data": self.federation.digest,
            "splits": _digest(splits),
            "config": self.config.identity(),
            "run": self.settings.model_dump(mode="json", exclude=left_out),
            **({"package": origin} if origin else {}),
        }

    @property
    def id(self) -> str:
        """A short name that is equal for runs with equal identity."""
        return _digest(self.identity())[:16]

    def sites(self) -> tuple[Site[Any], ...]:
        """Return the participating sites, with a split for every case.

        Raises ConfigurationError, and FederationError if a site has no patient to train on.
        """
        known = [site.name for site in self.federation.sites]
        named = {
            "leave_out": self.settings.leave_out,
            "egress": tuple(self.settings.egress),
            "feature_bounds": tuple(self.settings.feature_bounds),
            "privacy_demands": tuple(self.settings.privacy_demands),
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

    def warnings(self) -> list[str]:
        """Say what of the data probably is a mistake, though it can be trained on. Raises as `sites`."""
        sites, federation = self.sites(), self.federation
        found = data_warnings(sites)
        found += [
            f"label '{label}': no mask of any site has it, so that it will not be learned; correct the "
            "masks, or the label's values in task.yaml"
            for label in federation.unlabelled
        ]
        if self.method == "centralised" and any(isinstance(site, Site) and site.undrawn for site in sites):
            found.append(
                "centralised pools images without their sites: what a site does not draw is background "
                "there, in the loss too; `absent: background` in task.yaml says so for every method"
            )
        if repeated := federation.repeated:
            found.append(
                f"{sum(map(len, repeated))} images are the same file as another patient's, first "
                f"{' and '.join(repeated[0][:2])}: training may see what validation or a test judges by; "
                "leave copies out, or give them one patient in cases.csv"
            )
        if len(sites) == 1:
            found.append(
                f"'{sites[0].name}' is the only site: nothing is federated, and what is published has "
                "learned from this hospital alone"
            )
        return found

    def specs(self) -> tuple[SiteSpec, ...]:
        """Return the participating sites as engine specs. Raises as `sites`."""
        settings = self.settings
        return tuple(
            SiteSpec(
                site.name,
                loader(self, site),
                frozenset(settings.egress.get(site.name, ALL_KINDS)),
                settings.consent == "all" or site.name in settings.consent,
                site.size,
                settings.feature_bounds.get(site.name, NO_BOUNDS),
                settings.privacy,
                settings.privacy_demands.get(site.name),
            )
            for site in self.sites()
        )

    def _split(self, site: Site[Any]) -> Site[Any]:
        if isinstance(site, RemoteSite):
            return site  # split at the hospital
        if not all(case.split for case in site.cases):
            return split_by_patient(site, self.settings.seed, test=self.settings.test, val=self.settings.val)
        # A site without training patients would be dropped from every round: fail before the first one.
        check_trains(site)
        return site

    def algorithm(self) -> Algorithm:
        """Build the method for this federation's task.

        Raises ConfigurationError for an unknown method, one for another kind of task, or privacy of a group
        that cannot have it.
        """
        chosen, task = method(self.method), self.federation.task
        if task.kind not in chosen.kinds:
            others = fitting(lambda each: task.kind in each.kinds)
            raise ConfigurationError(
                f"method '{self.method}' does not fit the task",
                [f"it is for {' and '.join(chosen.kinds)}, '{task.name}' is a {task.kind}: use {others}"],
            )
        kind = kind_of(task).name
        if why := chosen.refused.get(kind):
            others = fitting(lambda each: task.kind in each.kinds and kind not in each.refused)
            raise ConfigurationError(
                f"method '{self.method}' cannot be trained on {kind}",
                [f"{why}: use {others}, or a task of slices (plane and size)"],
            )
        built = chosen.build(self.config, task)
        check_privacy(built.plan(), self.settings.privacy)
        return built if self.scores_tests else Untested(built)


@dataclass(frozen=True)
class Result:
    """A finished run: its publication, its history, and the published artefacts (the composite last)."""

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
    resume_before: tuple[str, int] | None = None,
    kept: int = 1,
    observer: Observer | None = None,
    store: Store | None = None,
    name: str | None = None,
    extend: Callable[[Publication], Publication] | None = None,
    pool: Pool | None = None,
    quorum: int | None = None,
) -> Result:
    """Execute a run to its end, and publish the result if a store is given.

    Args:
        folder: the run's folder; with `resume`, a killed run continues from it.
        resume_before: phase and round (from 1) to take back, with all that was committed after it.
        kept: how many rounds can be taken back later; each costs the disk a memory.
        workers: worker processes, at most one per site; by default as many as cores and memory allow, 0 for
            none. The result does not depend on it.
        name: name of the published artefact; the task's by default.
        extend: changes the publication before it is published.
        pool: runs the sites' steps instead of worker processes, such as hospitals on a network.
        quorum: how many sites of a round must deliver; by default all, and of a `pool` as many as it says.

    Raises:
        TrainingError: see `training.errors`; RunMismatch when the folder holds another run.
    """
    specs = run.specs()
    algorithm = run.algorithm()
    if problem := problem_of(run.settings.device):
        raise ConfigurationError("the run cannot start", [f"{problem}; use cpu"])
    if quorum is not None and not 1 <= quorum <= len(specs):
        raise ConfigurationError(
            "the run cannot start", [f"quorum: expected 1 to {len(specs)} hospitals, found {quorum}"]
        )
    name = name or run.federation.task.name
    if store is not None:
        check_names(name, parts_of(algorithm, specs))
    run_folder = RunFolder(folder, kept)
    with run_folder.held():
        run_folder.claim(run.identity(), resume=resume or resume_before is not None)
        if resume_before is not None:
            run_folder.take_back_to(*resume_before)
        engine = FederationEngine(
            algorithm,
            specs,
            RunEnvironment(run.settings.seed, run.settings.device, run.settings.threads),
            run_folder,
            workers=default_workers(run.settings.device) if workers is None else workers,
            participation=run.settings.participation,
            defence=run.settings.defence,
            observer=observer,
            pool=pool,
            quorum=quorum,
        )
        outcome = engine.run()
        publication = algorithm.publication(outcome.server)
        if extend is not None:
            publication = extend(publication)
        artefacts: tuple[Artefact, ...] = ()
        if store is not None:
            artefacts = publish(store, _origin(run, specs, name, outcome.history), publication)
    return Result(run, publication, outcome.history, artefacts)


def loader(run: Run, site: Site[Any]) -> Callable[[], Any]:
    """Return the function that loads a site's data, as the kind of task needs it."""
    task = run.federation.task
    if own := method(run.method).load:
        return partial(own, site, task)
    return partial(SiteData.load, site, task, keep_empty=run.settings.keep_empty)


def _origin(run: Run, sites: Sequence[SiteSpec], name: str, history: Sequence[RoundEntry]) -> Origin:
    descent = run.config.descent()
    return Origin(
        name,
        run.federation.task,
        Lineage(
            method=run.method,
            run=run.id,
            sites=tuple(site.name for site in sites),
            rounds=run.config.rounds,
            seed=run.settings.seed,
            parents=descent.parents,
            weights=descent.weights,
            # So that all who read of the version know which hospitals it lacks.
            details={**run.identity(), **({"missing": gone} if (gone := missing(history)) else {})},
        ),
    )


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
