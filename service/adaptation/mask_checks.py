"""Requests for the check of a candidate with a few masks: choose scans, measure, take the verdict back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import TaskError
from model_store.preprocessing import check_values
from model_store.task import Task
from service.audit import trail
from service.cohorts import cohorts, masks
from service.context import ServiceContext
from service.database import Job
from service.database.job_states import TERMINAL
from service.errors import CandidateNotCheckable, JobStillRunning, MasksInvalid, MasksMissing
from service.job_kinds import KINDS, JobKind, mask_check, mask_verdict, names_where
from service.jobs import records, submission
from service.jobs.gates import gate_with_masks
from service.jobs.records import Asked, Work
from service.kinds import adaptation_of, kind_of

_MOST_LISTED = 100


class MaskCheckBody(BaseModel):
    """How many masks are to be drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    masks: int = Field(
        8,
        ge=2,
        le=60,
        description="Masks that a person will draw; a patient who is drawn twice needs one. Six to seventeen "
        "bound the change to about two points.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="The seed of the draws.")


class OfCandidate(BaseModel):
    """What a job on the candidate of another job knows of it."""

    job: str
    candidate: str
    learned_from_masks: bool


class CheckOptions(OfCandidate):
    """The options of a job that chooses scans."""

    masks: int
    seed: int


class VerdictOptions(OfCandidate):
    """The options of a job that bounds the change. `check` is the job that chose the scans."""

    check: str


@dataclass(frozen=True)
class MaskCheck:
    """Requests on the candidate of a job. Each makes one job per idempotency key: (id, whether it is new)."""

    context: ServiceContext
    job: str
    key: str | None
    request_id: str

    def choose(self, body: MaskCheckBody) -> tuple[str, bool]:
        """Start the job that chooses the scans.

        Raises:
            JobUnknown, JobStillRunning, CandidateNotCheckable, CohortDeleted, IdempotencyConflict, QueueFull.
        """

        def create(session: Session) -> Job:
            judged = self._judged(session)
            return self._job(session, mask_check.KIND, judged, parent, asked)

        asked, parent = body.model_dump(), self._parent()
        return self._submit(create, asked)

    def measure(self, check: str) -> tuple[str, bool]:
        """Start the job that bounds the change by the masks of the chosen scans.

        Raises:
            JobUnknown, JobStillRunning, CandidateNotCheckable, CohortDeleted, IdempotencyConflict, QueueFull.
            MasksMissing: some of the chosen scans have no mask, or are gone.
            MasksInvalid: a mask has values outside the task.
        """

        def create(session: Session) -> Job:
            judged = self._judged(session)
            found = self._check(session, check)
            self._check_masks(session, judged, found, parent.manifest.task)
            return self._job(session, mask_verdict.KIND, judged, parent, asked)

        asked, parent = {"check": check}, self._parent()
        return self._submit(create, asked)

    def listed(self) -> list[Job]:
        """The checks of the candidate and their verdicts, newest first. Raises JobUnknown."""
        with self.context.database.read() as session:
            judged = records.get(session, self.job)
            kinds = names_where(lambda kind: kind.of_candidate)
            query = select(Job).where(Job.hospital == judged.hospital, Job.kind.in_(kinds))
            rows = session.scalars(query.order_by(Job.created_at.desc(), Job.id))
            return [row for row in rows if row.options.get("job") == self.job][:_MOST_LISTED]

    def take_back(self) -> None:
        """Let the gate say again what its checks say. Idempotent.

        Raises:
            JobUnknown, CandidateNotCheckable.
        """
        with self.context.database.write() as session:
            judged = records.get(session, self.job, lock=True)
            if judged.candidate_digest is None or judged.gate is None:
                raise CandidateNotCheckable(f"job {self.job} made no candidate, so masks decided nothing")
            if "masks" not in judged.gate:
                return
            judged.gate = gate_with_masks(judged.gate, None)
            records.append_event(session, judged, "gate", judged.gate)
            trail.append(
                session,
                "gate.restored",
                hospital=judged.hospital,
                version=judged.candidate_digest,
                details={"job": judged.id, "passed": judged.gate["passed"]},
            )

    def _parent(self) -> Artefact:
        """What the candidate was made from; read before the write lock is taken."""
        with self.context.database.read() as session:
            judged = self._with_candidate(session)
        parent = self.context.store.by_digest(judged.parent)
        if parent.manifest.task.kind != "segmentation" or kind_of(parent).parts(parent).global_model is None:
            raise CandidateNotCheckable(
                f"'{parent}' has no global model that segments, with which masks could compare the candidate"
            )
        return parent

    def _with_candidate(self, session: Session) -> Job:
        judged = records.get(session, self.job)
        if judged.state not in TERMINAL:
            raise JobStillRunning(f"job {self.job} is {judged.state}: its candidate is checked after its end")
        if judged.candidate_digest is None or judged.hospital is None or judged.cohort is None:
            raise CandidateNotCheckable(
                f"job {self.job} is of kind '{judged.kind}' and {judged.state}, without a candidate: "
                "expected an adaptation that made one"
            )
        return judged

    def _judged(self, session: Session) -> Job:
        """The job that made the candidate, with its cohort locked."""
        judged = self._with_candidate(session)
        assert judged.hospital is not None
        assert judged.cohort is not None
        cohorts.usable(session, judged.hospital, judged.cohort, lock=True)
        return judged

    def _check(self, session: Session, check: str) -> Job:
        found = records.get(session, check)
        if not KINDS[found.kind].draws or found.options.get("job") != self.job:
            raise CandidateNotCheckable(
                f"job {check} is of kind '{found.kind}', expected a check of the candidate of job "
                f"{self.job}: GET /jobs/{self.job}/checks lists them"
            )
        if found.state not in TERMINAL:
            raise JobStillRunning(f"job {check} is {found.state}: the scans are not chosen yet")
        if found.state != "succeeded":
            raise CandidateNotCheckable(f"job {check} is {found.state} and chose no scans: {found.reason}")
        return found

    def _check_masks(self, session: Session, judged: Job, check: Job, task: Task) -> None:
        assert judged.cohort is not None
        names = {f"sha256:{scan.sha256}": scan.name for scan in cohorts.scans(session, judged.cohort)}
        drawn = masks.of_cohort(session, judged.cohort)
        chosen = [str(each["scan"]) for each in (check.result or {})["draws"]]
        gone = [digest for digest in chosen if digest not in names]
        missing = [names[digest] for digest in chosen if digest in names and names[digest] not in drawn]
        if gone or missing:
            first = (
                f"scan '{missing[0]}' has no mask" if missing else f"{gone[0]} is not in the cohort any more"
            )
            raise MasksMissing(
                f"masks of all {len(chosen)} chosen scans are needed, since they were drawn at random; "
                f"{len(gone) + len(missing)} are missing, first: {first}. Store an empty mask where there is "
                f"no target{', and start another check' if gone else ''}"
            )
        for digest in chosen:
            try:
                check_values(drawn[names[digest]].label_values, task)
            except TaskError as error:
                raise MasksInvalid(f"scan '{names[digest]}': {error}") from error

    def _job(
        self, session: Session, kind: JobKind, judged: Job, parent: Artefact, asked: Mapping[str, Any]
    ) -> Job:
        adaptation = adaptation_of(parent, judged.options)
        learned = adaptation is not None and adaptation.needs_masks
        about = {"job": self.job, "candidate": judged.candidate_digest, "learned_from_masks": learned}
        work = Work(
            kind=kind,
            hospital=judged.hospital,
            model=judged.model,
            parent=judged.parent,
            cohort=judged.cohort,
            options={**about, **asked},
        )
        return records.create(session, self.context.settings, work, self._request(asked))

    def _request(self, asked: Mapping[str, Any]) -> Asked:
        fingerprint = submission.fingerprint({"job": self.job, **asked})
        return Asked(self.request_id, self.key, fingerprint)

    def _submit(self, create: Callable[[Session], Job], asked: Mapping[str, Any]) -> tuple[str, bool]:
        database = self.context.database
        with database.read() as session:
            hospital = records.get(session, self.job).hospital
        return submission.submit(database, self.context.queue, hospital or "", self._request(asked), create)
