"""The steps of a job that adapts an artefact to a cohort; a kind of artefact has its own work in each.

preparing   load the models, read the cohort
...         the work's own stages: what makes the candidate
judging     observe the candidate for its gate
drawing     show scans before and after, for review
publishing  once, by the worker that holds the lease
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from model_store.artefact import Artefact
from model_store.store import Store
from model_store.unlike import CohortKinds
from personalization.gate import GateVerdict
from personalization.options.cohort import INCLUDE
from service.catalog.adapted import adapted_name
from service.cohorts.files import ScanFile, label_of
from service.errors import AdaptationRejected
from service.inference.pipeline import Stopwatch
from service.jobs.unlike import facts_of, said_of_unlike
from service.kinds import ADAPTABLE, SCAN_BY_JOB, HospitalAdaptation, adaptation_of
from service.worker.attempt import Attempt, AttemptOutcome, PublishedCandidate, as_json
from service.worker.candidate import CandidateDraft, publish
from service.worker.cohort_images import cohort_files
from service.worker.device import device_of, facts
from service.worker.kept import read_once


class Slices(Protocol):
    """Slices of a cohort, of which a job uses a limited number."""

    @property
    def images(self) -> Tensor:
        """float32 [N, C, H, W]."""

    @property
    def left_out(self) -> int:
        """Number of slices that are not used."""

    @property
    def kinds(self) -> CohortKinds:
        """The guard's verdict on every scan of the cohort."""


Cohort = TypeVar("Cohort", bound=Slices)
Made = TypeVar("Made")


@dataclass
class CohortWork(ABC, Generic[Cohort, Made]):
    """What one kind of artefact does in a job. Each method is called once, in this order.

    Attributes:
        attempt: checks for cancellation between batches, and has the job.
        store: holds `parent`, the artefact that is adapted.
        files: scans of the cohort, by name; once they are read, those to which anything is fitted.
        watch: times `adapt`, `judge` and `draw`.
    """

    attempt: Attempt
    store: Store
    parent: Artefact
    files: Sequence[ScanFile]
    watch: Stopwatch = field(default_factory=Stopwatch)

    # Which slices are kept of too many.
    KEPT_FIRST: ClassVar[str] = ""

    @property
    def includes_unlike(self) -> bool:
        """Whether scans that are unlike the others or the task are used, too."""
        return self.attempt.job.options.get("unlike") == INCLUDE

    @abstractmethod
    def read(self) -> Cohort:
        """Load the models and prepare the scans for them."""

    @abstractmethod
    def make(self, cohort: Cohort) -> Made:
        """Compute the candidate."""

    @abstractmethod
    def judge(self, cohort: Cohort, made: Made) -> GateVerdict:
        """Observe the candidate, and judge it by the checks of its gate."""

    def summary(self, cohort: Cohort, made: Made, verdict: GateVerdict) -> list[str]:  # noqa: ARG002
        """Say in sentences what gain the verdict lets a person expect. The failed checks say their own."""
        nothing = "No check found harm. No gain is predicted: there is nothing to predict it from."
        return [nothing] if verdict.passed else []

    @abstractmethod
    def draw(self, cohort: Cohort, made: Made) -> None:
        """Draw a few scans for review."""

    @abstractmethod
    def result(self, cohort: Cohort, made: Made) -> dict[str, Any]:
        """Return the facts that the version's lineage and the job keep, for JSON."""

    @abstractmethod
    def draft(self, cohort: Cohort, made: Made, result: dict[str, Any]) -> CandidateDraft:
        """Return the candidate's content."""

    def cost(self) -> dict[str, Any]:
        """Return further facts for the job alone: the same job made again is the same version."""
        return {}

    def run(self) -> PublishedCandidate:
        """Adapt, judge and publish. The runner reports any error as the job's reason."""
        attempt = self.attempt
        cohort = self.read()
        seen = facts_of([label_of(file.sha256) for file in self.files], cohort.kinds)
        for sentence in said_of_unlike(seen):
            attempt.warn(sentence)
        self.files = [file for file, used in zip(self.files, cohort.kinds.used, strict=True) if used]
        if cohort.left_out:
            attempt.warn(
                f"the cohort has {cohort.left_out} slices more than are used at once: {len(cohort.images)}, "
                f"evenly spaced, are{self.KEPT_FIRST}"
            )
        with self.watch.stage("adapt"):
            made = self.make(cohort)
        with self.watch.stage("judge"):
            verdict = self.judge(cohort, made)
        gate = as_json({**verdict.to_json(), "summary": self.summary(cohort, made, verdict)})
        attempt.emit("gate", gate)
        attempt.set_stage("drawing")
        with self.watch.stage("draw"):
            self.draw(cohort, made)
        attempt.set_stage("publishing")
        result = self.result(cohort, made)
        device = device_of(attempt.settings)
        # The CPU is the reference, and its versions keep their digests; another device rounds differently.
        where = {"computed_on": facts(device)}
        if device.type != "cpu":
            result |= where
        draft = self.draft(cohort, made, result)
        return publish(attempt, self.store, draft, gate=gate, result=result | where | seen | self.cost())


def run_adaptation(attempt: Attempt) -> AttemptOutcome:
    """Run an adaptation job and publish the hospital's version.

    Raises:
        AdaptationRejected: the parent is of a kind that cannot be adapted.
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    store, job = attempt.settings.open_store(), attempt.job
    parent = store.by_digest(job.parent)
    adaptation = _adaptation(parent, job.options)
    assert job.hospital is not None
    earlier = store.versions.made_by(adapted_name(parent.name, job.hospital), job.id)
    if earlier is None:
        work: type[CohortWork[Any, Any]] = resolve_name(adaptation.work)
        published = work(attempt, store, parent, read_once(cohort_files(attempt))).run()
    else:
        # An earlier attempt crashed between publishing and finishing the job.
        published = PublishedCandidate(earlier, job.result or {}, job.gate)
    return published.outcome(adaptation.fallback_reason)


def run_scan(attempt: Attempt) -> AttemptOutcome:
    """Adapt to one scan and store its answer. Raises as `run_adaptation`."""
    attempt.set_stage("preparing")
    store = attempt.settings.open_store()
    parent = store.by_digest(attempt.job.parent)
    scan = _adaptation(parent, attempt.job.options).scan
    if scan is None:
        raise AdaptationRejected(
            f"'{parent}' is of kind {parent.manifest.kind}; only {SCAN_BY_JOB} can be adapted to one scan"
        )
    outcome: AttemptOutcome = resolve_name(scan.run)(attempt, store, parent)
    return outcome


def _adaptation(parent: Artefact, options: Mapping[str, Any]) -> HospitalAdaptation[Any]:
    found = adaptation_of(parent, options)
    if found is None:
        raise AdaptationRejected(
            f"'{parent}' is of kind {parent.manifest.kind}; only these can be adapted to a hospital: "
            f"{', '.join(ADAPTABLE)}"
        )
    return found
