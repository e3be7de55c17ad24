"""Accept a request on a PACS: validate it, and create its durable job.

What identifies a patient (UIDs) is written to a file of the job, which is deleted at the job's end. The job's
row, and so every list, event and card, has only the PACS's name and the options.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from sqlalchemy.orm import Session

from service.catalog.network import Personalization, Selection, resolve_network
from service.cohorts import cohorts
from service.cohorts.intake import uid_key
from service.context import ServiceContext
from service.database import Job
from service.database.hospitals import require_hospital
from service.errors import DiskFull, ParametersContradict
from service.job_kinds import pacs_cohort, pacs_correction, pacs_follow_up, pacs_segment
from service.jobs import records, submission
from service.jobs.files import JobFolder
from service.jobs.records import Asked, Work
from service.pacs.configuration import require_storing, server_for
from service.prediction.answer import check_routing
from service.prediction.dicom_seg import check_codes
from service.prediction.options import SegmentOptions
from service.prediction.output import DICOM_OUTPUTS
from service.validation import COHORT_ID, DICOM_UID, HOSPITAL_ID, PRINTABLE


class SeriesSegmentation(SegmentOptions):
    """A series of a PACS to be segmented. Options are those of `POST /segment`."""

    hospital: str = Field(pattern=HOSPITAL_ID, description="The hospital of the scan.")
    study: str = Field(pattern=DICOM_UID, max_length=64, description="StudyInstanceUID.")
    series: str = Field(pattern=DICOM_UID, max_length=64, description="SeriesInstanceUID.")
    store: bool = Field(
        False,
        description="Whether the SEG or RTSTRUCT is stored in the PACS, with output=dicom-sr the report and "
        "the SEG that it refers to. Otherwise the answer is the job's result.",
    )
    store_unlike: bool = Field(
        False,
        description="Whether that of a scan that the guard warns of is stored too, also where `guard=auto` "
        "would refuse the scan. Otherwise such a job fails with the warnings, and nothing is stored.",
    )

    def options(self) -> SegmentOptions:
        """Those of the segmentation; the default output is `dicom-seg`.

        A caller of `store_unlike` has decided: the guard warns where it would refuse by default.
        """
        given = self.model_dump(exclude={"study", "series", "store", "store_unlike"})
        given["output"] = self.output or "dicom-seg"
        if self.store_unlike and self.guard == "auto":
            given["guard"] = "warn"
        return SegmentOptions.model_validate(given)


class SeriesOptions(SegmentOptions):
    """The options of a job that segments a series."""

    pacs: str
    store: bool
    store_unlike: bool = False

    def segmentation(self) -> SegmentOptions:
        """Those of the segmentation."""
        return SegmentOptions.model_validate(self.model_dump(exclude={"pacs", "store", "store_unlike"}))


_Value = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=PRINTABLE)]


class SeriesQuery(BaseModel):
    """Attributes that series must have (PS3.4 C.2.2.2): text with `*` and `?`, dates as 20260101-20260630."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    PatientID: _Value | None = None
    AccessionNumber: _Value | None = None
    StudyInstanceUID: _Value | None = None
    SeriesInstanceUID: _Value | None = None
    StudyDate: _Value | None = None
    StudyDescription: _Value | None = None
    Modality: _Value | None = None
    BodyPartExamined: _Value | None = None
    ProtocolName: _Value | None = None
    SeriesDescription: _Value | None = None

    @model_validator(mode="after")
    def _not_everything(self) -> SeriesQuery:
        if not self.model_dump(exclude_none=True):
            raise ValueError("expected at least one attribute: a query without any finds the whole PACS")
        return self


class CohortFill(BaseModel):
    """Series of a PACS for a cohort."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pacs: str = Field(pattern=HOSPITAL_ID, description="Name of the PACS.")
    query: SeriesQuery
    most: int = Field(100, ge=1, le=5000, description="The job fails if the query finds more series.")


class EditedSearch(BaseModel):
    """Where segmentations are looked for that a person edited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pacs: str = Field(pattern=HOSPITAL_ID, description="Name of the PACS.")
    query: SeriesQuery = Field(
        description="What the segmentations' studies or series have, such as `StudyDate`; `Modality` is SEG, "
        "and RTSTRUCT."
    )
    most: int = Field(100, ge=1, le=5000, description="The job fails if the query finds more series.")


class FillOptions(BaseModel):
    """The options of a job that fills a cohort, or looks for edited segmentations."""

    pacs: str
    most: int


class SeriesUids(BaseModel):
    """A series of a PACS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str = Field(pattern=DICOM_UID, max_length=64, description="StudyInstanceUID.")
    series: str = Field(pattern=DICOM_UID, max_length=64, description="SeriesInstanceUID.")


class FollowUp(SeriesUids):
    """A series, which is compared with earlier ones of the same patient."""

    hospital: str = Field(pattern=HOSPITAL_ID, description="The hospital of the scans.")
    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…`: one version reads every series. Optional when one "
        "model is offered.",
    )
    personalization: Literal["auto", "global", "member", "hospital"] = Field(
        "auto", description="As for `POST /segment`."
    )
    site: str | None = Field(None, max_length=256, description="As for `POST /segment`.")
    earlier: list[SeriesUids] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="The earlier series. By default those of other studies to which a SEG or SR in the PACS "
        "refers, if it was made before.",
    )
    repeats: str | None = Field(
        None,
        pattern=COHORT_ID,
        description="A cohort of the hospital with repeated scans of patients who did not change in between: "
        "the version answers them, and the spread of its volumes says which change is more than that.",
    )
    most: int = Field(20, ge=1, le=100, description="Earlier series that are read; the newest count.")


class FollowUpOptions(BaseModel):
    """The options of a job that follows a patient up."""

    pacs: str
    hospital: str
    personalization: Literal["auto", "global", "member", "hospital"] = "auto"
    site: str | None = None
    most: int


@dataclass(frozen=True)
class PacsSubmission:
    """A request of one client on one PACS. `key` is its idempotency key."""

    context: ServiceContext
    pacs: str
    key: str | None
    request_id: str

    def segment(self, asked: SeriesSegmentation) -> tuple[str, bool]:
        """Create the job that segments a series, or find that of the idempotency key: (id, whether new).

        Raises:
            HospitalUnknown, PacsUnknown, PacsReadOnly: not with this PACS.
            SelectionError, CodesMissing, LabelsOverlap, StoreError: not with this model.
            QueueFull, IdempotencyConflict, DiskFull.
        """
        self._server(asked.hospital)
        if asked.store:
            require_storing(self.context.settings.pacs, self.pacs, asked.hospital)
        options = asked.options()
        if asked.store and options.output not in DICOM_OUTPUTS:
            raise ParametersContradict(
                f"`store` belongs to output=dicom-seg, dicom-sr and dicom-rtstruct, found {options.output}; "
                "leave one of them out."
            )
        if asked.store_unlike and not asked.store:
            raise ParametersContradict("`store_unlike` belongs to `store`; set both, or leave it out.")
        selection = self._select(options)
        work = Work(
            kind=pacs_segment.KIND,
            hospital=asked.hospital,
            model=selection.offered.name,
            parent=selection.offered.digest,
            options={
                "pacs": self.pacs,
                "store": asked.store,
                "store_unlike": asked.store_unlike,
                **options.model_dump(mode="json"),
            },
        )
        wanted = {"study": asked.study, "series": asked.series}
        return self._submit(asked.hospital, work, wanted, {"alarmed": selection.alarmed})

    def fill(self, hospital: str, cohort: str, asked: CohortFill) -> tuple[str, bool]:
        """Create the job that adds series to a cohort, or find that of the idempotency key.

        Raises:
            HospitalUnknown, PacsUnknown, CohortUnknown, CohortDeleted.
            QueueFull, IdempotencyConflict, DiskFull.
        """
        self._server(hospital)

        options = {"pacs": self.pacs, "most": asked.most}
        work = Work(kind=pacs_cohort.KIND, hospital=hospital, cohort=cohort, options=options)
        query = asked.query.model_dump(exclude_none=True)
        return self._submit(hospital, work, {"cohort": cohort, "query": query})

    def find_edited(self, hospital: str, asked: EditedSearch) -> tuple[str, bool]:
        """Create the job that looks for edited segmentations, or find that of the idempotency key.

        Raises:
            HospitalUnknown, PacsUnknown, QueueFull, IdempotencyConflict, DiskFull.
        """
        self._server(hospital)
        options = {"pacs": self.pacs, "most": asked.most}
        work = Work(kind=pacs_correction.KIND, hospital=hospital, options=options)
        return self._submit(hospital, work, {"query": asked.query.model_dump(exclude_none=True)})

    def follow_up(self, asked: FollowUp) -> tuple[str, bool]:
        """Create the job that compares a series with earlier ones, or find that of the idempotency key.

        Raises:
            HospitalUnknown, PacsUnknown: not with this PACS.
            SelectionError, NoVolumeToReport, StoreError: not with this model.
            CohortUnknown, CohortDeleted, QueueFull, IdempotencyConflict, DiskFull.
        """
        self._server(asked.hospital)
        options = FollowUpOptions(
            pacs=self.pacs, **asked.model_dump(include={"hospital", "personalization", "site", "most"})
        )
        selection = self._network(asked.model, options.hospital, options.personalization, options.site)
        work = Work(
            kind=pacs_follow_up.KIND,
            hospital=asked.hospital,
            model=selection.offered.name,
            parent=selection.offered.digest,
            cohort=asked.repeats,
            options=options.model_dump(mode="json"),
        )
        wanted = asked.model_dump(mode="json", include={"study", "series", "earlier"})
        return self._submit(asked.hospital, work, wanted)

    def _server(self, hospital: str) -> None:
        """Raises HospitalUnknown, PacsUnknown."""
        with self.context.database.read() as session:
            require_hospital(session, hospital)
        server_for(self.context.settings.pacs, self.pacs, hospital)

    def _select(self, options: SegmentOptions) -> Selection:
        """Choose the network now: the job answers with this version, whatever is assigned later."""
        if options.preset is not None or options.shape_weight is not None:
            raise ParametersContradict(
                "`preset` and `shape_weight` belong to personalization=scan with a routing-space; leave them "
                "out."
            )
        selection = self._network(options.model, options.hospital, options.personalization, options.site)
        check_routing(options, selection.offered)
        if options.output in ("dicom-seg", "dicom-sr"):
            check_codes(selection.manifest.task, options.segmentation_type or "binary")
        return selection

    def _network(
        self,
        model: str | None,
        hospital: str | None,
        personalization: Personalization | Literal["scan"],
        site: str | None,
    ) -> Selection:
        return resolve_network(
            self.context.store,
            self.context.database,
            model,
            hospital,
            personalization,
            site,
            kind="segmentation",
            new_versions=self.context.settings.new_versions,
        )

    def _submit(
        self, hospital: str, work: Work, wanted: Mapping[str, Any], found: Mapping[str, Any] | None = None
    ) -> tuple[str, bool]:
        """`found` is what the job reads beside what is wanted, and what does not tell two requests apart."""
        database, settings = self.context.database, self.context.settings
        # Keyed: a plain digest in the database would tell a patient's id to a reader that tries them all.
        secret = uid_key(settings).hex()
        # Apart, since both have a `series`.
        asked_for = {"wanted": wanted, "options": work.options, "secret": secret}
        fingerprint = submission.fingerprint(asked_for)
        job_id = records.new_id()
        folder = JobFolder(settings.open_files(), job_id)
        asked = Asked(self.request_id, self.key, fingerprint)

        def create(session: Session) -> Job:
            if work.cohort is not None:
                cohorts.usable(session, hospital, work.cohort)
            return records.create(session, settings, work, asked, job_id=job_id)

        created = False
        try:
            # The file comes before the row, because a job without its request cannot run.
            folder.write(folder.REQUEST, json.dumps({**wanted, **(found or {})}).encode())
            job, created = submission.create_once(database, hospital, asked, create)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull("The service's disk is full; send the request later.") from error
        finally:
            if not created:
                folder.delete()
        if created:
            submission.send(database, self.context.queue, job.id)
        return job.id, created
