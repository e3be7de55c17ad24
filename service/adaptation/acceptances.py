"""Requests for an acceptance: which version is scored on which masks, and what is asked of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from model_store.errors import TaskError
from model_store.manifest import Precision
from model_store.preprocessing import check_values
from model_store.task import Task
from service.acceptance.thresholds import Thresholds
from service.catalog.network import Selection, select_network
from service.catalog.precision import newest_reduced
from service.catalog.version import resolve_version
from service.cohorts import cohorts, masks
from service.cohorts.intake import uid_key
from service.context import ServiceContext
from service.database import Job
from service.database.hospitals import require_hospital
from service.errors import CohortEmpty, MasksInvalid, MasksMissing, NotAcceptable
from service.inference.sessions import probe_provider
from service.job_kinds import acceptance
from service.jobs import records, submission
from service.jobs.files import JobFolder
from service.jobs.records import Asked, Work
from service.prediction.dicom_seg import check_codes
from service.quantisation.precision import check_provider
from service.validation import COHORT_ID, DICOM_UID, HOSPITAL_ID


class PacsSeries(BaseModel):
    """A series of a PACS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=HOSPITAL_ID, description="Name of the PACS (`GET /pacs`).")
    study: str = Field(pattern=DICOM_UID, max_length=64, description="StudyInstanceUID.")
    series: str = Field(pattern=DICOM_UID, max_length=64, description="SeriesInstanceUID.")


class AcceptanceBody(BaseModel):
    """Which version is scored on which scans, and what is asked of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cohort: str = Field(
        pattern=COHORT_ID,
        description="Id of the cohort: scans with masks, and others that narrow the bounds.",
    )
    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…`; without a version, the one that serves the "
        "hospital. The network that answers the hospital's scans is scored. Optional when one model is "
        "offered.",
    )
    precision: Precision | None = Field(
        None,
        description="The graph that is scored; by default that of the hospital's assignment.",
    )
    thresholds: Thresholds | None = Field(
        None, description="What is asked of each label. Without it the report has figures and no verdict."
    )
    pacs: PacsSeries | None = Field(
        None,
        description="A series of which the answer is stored in the PACS as a DICOM SEG, fetched again, and "
        "compared voxel by voxel. The SEG stays there.",
    )
    actor: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Who measures. Required where the service authenticates no caller (LOCUM_AUTH=none).",
    )


class AcceptanceOptions(BaseModel):
    """The options of the job. `chosen` is the network (`Selection.kept`), `by` who measures.

    `before` counts the earlier acceptances of this version at the hospital: enough tries meet any threshold.
    `pacs` is the one through which the answer to a series is sent; None for none.
    """

    chosen: dict[str, str | None]
    thresholds: Thresholds | None = None
    by: str
    before: int = 0
    pacs: str | None = None


@dataclass(frozen=True)
class AcceptanceRequest:
    """One request on the scans of a hospital. `by` is who measures."""

    context: ServiceContext
    hospital: str
    asked: AcceptanceBody
    by: str
    key: str | None
    request_id: str

    def start(self) -> tuple[str, bool]:
        """Create the job, or find the one of this idempotency key: (id, whether it is new).

        Raises:
            HospitalUnknown, SelectionError, StoreError: no network answers the hospital.
            NotAcceptable: the version does not segment.
            PrecisionUnavailable: there is no graph in the precision, or the device does not take it.
            RequestInvalid: a threshold is for a label that the version does not have.
            MasksMissing, MasksInvalid: no scan has a mask, or one has values outside the task.
            CohortError, QueueFull, IdempotencyConflict.
        """
        database = self.context.database
        said = self.asked.model_dump(mode="json")
        if self.asked.pacs is not None:
            # As for every job on a PACS: a plain digest would tell a UID to a reader that tries them all.
            said["secret"] = uid_key(self.context.settings).hex()
        fingerprint = submission.fingerprint({"accept": said})
        asked = Asked(self.request_id, self.key, fingerprint)
        with database.read() as session:
            require_hospital(session, self.hospital)
            before = records.replayed(session, self.hospital, asked)
        if before is not None:
            return before.id, False
        selection = self._selection()
        if self.asked.thresholds is not None:
            self.asked.thresholds.require_labels(
                tuple(selection.manifest.task.labels), str(selection.offered)
            )
        if self.asked.pacs is not None:
            check_codes(selection.manifest.task, "binary")
        job_id = records.new_id()
        folder = JobFolder(self.context.settings.open_files(), job_id)

        def create(session: Session) -> Job:
            cohorts.usable(session, self.hospital, self.asked.cohort, lock=True)
            self._check_masks(session, selection.manifest.task)
            earlier = records.count(session, self.hospital, acceptance.KIND, selection.offered.digest)
            options = AcceptanceOptions(
                chosen=selection.kept,
                thresholds=self.asked.thresholds,
                by=self.by,
                before=earlier,
                pacs=None if self.asked.pacs is None else self.asked.pacs.name,
            )
            work = Work(
                kind=acceptance.KIND,
                hospital=self.hospital,
                model=selection.offered.name,
                parent=selection.offered.digest,
                cohort=self.asked.cohort,
                options=options.model_dump(mode="json"),
            )
            return records.create(session, self.context.settings, work, asked, job_id=job_id)

        created = False
        try:
            if self.asked.pacs is not None:
                # A file, since no UID is in the database; before the row, since no job runs without it.
                wanted = self.asked.pacs.model_dump(include={"study", "series"})
                folder.write(folder.REQUEST, json.dumps(wanted).encode())
            found, created = submission.submit(database, self.context.queue, self.hospital, asked, create)
        finally:
            if not created:
                folder.delete()
        return found, created

    def _selection(self) -> Selection:
        """The network that answers the hospital's scans by this version."""
        context, precision = self.context, self.asked.precision
        found = resolve_version(
            context.store,
            context.database,
            self.asked.model,
            self.hospital,
            new_versions=context.settings.new_versions,
        )
        # An alarm of the watch stops answers; the version is what it is.
        found = replace(found, stop=None)
        if found.artefact.manifest.task.kind != "segmentation":
            raise NotAcceptable(
                f"'{found.artefact}' classifies: expected a version that segments, of which masks can be "
                "compared"
            )
        if precision is None:
            return select_network(context.store, found)
        selection = select_network(context.store, replace(found, entry=None))
        if precision == "float32":
            return selection
        check_provider(precision, probe_provider(context.settings.device))
        return replace(selection, model=newest_reduced(context.store, selection.model, precision))

    def _check_masks(self, session: Session, task: Task) -> None:
        place = f"/hospitals/{self.hospital}/cohorts/{self.asked.cohort}/scans"
        if not cohorts.totals(session, [self.asked.cohort]):
            raise CohortEmpty(f"Cohort {self.asked.cohort} has no scans: PUT {place}/NAME adds one.")
        drawn = masks.of_cohort(session, self.asked.cohort)
        if not drawn:
            raise MasksMissing(
                f"no scan of cohort {self.asked.cohort} has a mask, and an acceptance compares with masks: "
                f"PUT {place}/NAME/mask adds one; ten patients give bounds"
            )
        for name, mask in drawn.items():
            _check_values(name, mask.label_values, task)


def _check_values(name: str, values: Sequence[int], task: Task) -> None:
    try:
        check_values(values, task)
    except TaskError as error:
        raise MasksInvalid(f"scan '{name}': {error}") from error
