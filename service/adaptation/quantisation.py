"""Requests for a graph in another precision, judged on the scans of a cohort."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import KindMismatch, PublishRefused
from model_store.manifest import ModelManifest, Reduced
from service.catalog.network import select_network
from service.catalog.version import resolve_version
from service.cohorts import cohorts
from service.context import ServiceContext
from service.database import Job
from service.database.hospitals import require_hospital
from service.errors import CohortEmpty, NotReducible
from service.inference.sessions import probe_provider
from service.job_kinds import quantisation
from service.jobs import records, submission
from service.jobs.records import Asked, Work
from service.quantisation.precision import check_provider
from service.quantisation.work import require_reducible
from service.settings import Settings
from service.validation import COHORT_ID


class QuantisationBody(BaseModel):
    """Which graph is made, of what, on which scans."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cohort: str = Field(pattern=COHORT_ID, description="Id of the cohort; at most 400 of its scans are used.")
    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…`; without a version, the one that serves the "
        "hospital. Of it the network that answers the hospital is taken. Optional when one model is offered.",
    )
    precision: Reduced = Field("int8", description="`int8` for a CPU, `float16` for a GPU.")


class QuantisationOptions(BaseModel):
    """The options of the job. `after` is the adaptation of which it takes the candidate."""

    precision: Reduced
    after: str | None = None


@dataclass(frozen=True)
class QuantisationRequest:
    """One request on the scans of a hospital."""

    context: ServiceContext
    hospital: str
    asked: QuantisationBody
    key: str | None
    request_id: str

    def make(self) -> tuple[str, bool]:
        """Create the job, or find the one of this idempotency key: (id, whether it is new).

        Raises:
            HospitalUnknown, SelectionError, StoreError: no network answers the hospital.
            NotReducible: no other graph can be made of it.
            PrecisionUnavailable: the device does not take the precision.
            CohortError, QueueFull, IdempotencyConflict.
        """
        database = self.context.database
        fingerprint = submission.fingerprint({"quantise": self.asked.model_dump(mode="json")})
        asked = Asked(self.request_id, self.key, fingerprint)
        with database.read() as session:
            require_hospital(session, self.hospital)
            before = records.replayed(session, self.hospital, asked)
        if before is not None:
            return before.id, False
        network = self._network()

        def create(session: Session) -> Job:
            cohorts.usable(session, self.hospital, self.asked.cohort, lock=True)
            if not cohorts.totals(session, [self.asked.cohort]):
                raise CohortEmpty(
                    f"Cohort {self.asked.cohort} has no scans: PUT /hospitals/{self.hospital}/cohorts/"
                    f"{self.asked.cohort}/scans/NAME adds one."
                )
            work = Work(
                kind=quantisation.KIND,
                hospital=self.hospital,
                model=network.name,
                parent=network.digest,
                cohort=self.asked.cohort,
                options={"precision": self.asked.precision},
            )
            return records.create(session, self.context.settings, work, asked)

        return submission.submit(database, self.context.queue, self.hospital, asked, create)

    def _network(self) -> Artefact[ModelManifest]:
        """The float32 network that answers the hospital's scans."""
        context = self.context
        check_provider(self.asked.precision, probe_provider(context.settings.device))
        found = resolve_version(
            context.store,
            context.database,
            self.asked.model,
            self.hospital,
            new_versions=context.settings.new_versions,
        )
        # Without the precision that it is served in now.
        chosen = select_network(context.store, replace(found, entry=None)).model
        try:
            return require_reducible(chosen)
        except (KindMismatch, PublishRefused) as error:
            raise NotReducible(str(error)) from error


def require_segmenting(parent: Artefact, precision: Reduced, settings: Settings) -> None:
    """Reject a graph that could not be made of the candidate. Raises NotReducible, PrecisionUnavailable."""
    if parent.manifest.task.kind != "segmentation":
        raise NotReducible(
            f"'{parent}' classifies: expected a model that segments with `quantise`; leave it out"
        )
    check_provider(precision, probe_provider(settings.device))


def follow(session: Session, context: ServiceContext, adaptation: Job, precision: Reduced) -> Job:
    """Add the job that makes the graph of an adaptation's candidate, once there is one.

    Raises QueueFull.
    """
    work = Work(
        kind=quantisation.KIND,
        hospital=adaptation.hospital,
        model=adaptation.model,
        parent=adaptation.parent,
        cohort=adaptation.cohort,
        options={"precision": precision, "after": adaptation.id},
    )
    job = records.create(session, context.settings, work, Asked(adaptation.request_id))
    # The reconciler sends its message, behind that of the adaptation.
    job.queued_at = None
    return job
