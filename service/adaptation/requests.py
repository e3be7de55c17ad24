"""Submit adaptation requests: validate a received body and create its job, in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import Reduced
from personalization.options.masks import MASKS, MasksOptions
from personalization.options.presets import AUTO
from service.adaptation.quantisation import follow, require_segmenting
from service.catalog.adapted import require_parts
from service.catalog.version import resolve_parent
from service.catalog.ways import Ways, ways_of
from service.cohorts import cohorts, masks
from service.context import ServiceContext
from service.database import Job
from service.database.hospitals import require_hospital
from service.errors import CohortEmpty, MasksInvalid, MasksMissing
from service.job_kinds import adaptation as adaptation_job
from service.jobs import records, submission
from service.jobs.records import Asked, Work
from service.kinds import HospitalAdaptation, adaptation_by_masks, adaptation_of
from service.runtime.spool import Upload
from service.validation import COHORT_ID, parse


class AdaptationRequest(BaseModel):
    """What to adapt, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…` of a model that can be adapted; "
        "without a version, the one that serves the hospital or the parent of "
        "that version, else the newest. Optional when one model is offered.",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict)


class CohortAdaptation(AdaptationRequest):
    """An adaptation on the scans of a cohort."""

    cohort: str = Field(pattern=COHORT_ID, description="Id of the cohort. All its scans are used.")
    quantise: Reduced | None = Field(
        None,
        description="Afterwards, make a graph of the candidate in this precision on the same cohort, by a "
        "job of kind `quantisation` (`options.after` has this job's id).",
        exclude_if=lambda precision: precision is None,
    )


def check_place(context: ServiceContext, hospital: str, key: str | None) -> None:
    """Reject what can be rejected before a scan is received.

    An idempotency key of an earlier job passes: that job is the answer, even if the queue is full.

    Raises:
        HospitalUnknown, QueueFull.
    """
    with context.database.read() as session:
        require_hospital(session, hospital)
        if key is None or records.find_by_idempotency_key(session, hospital, key) is None:
            records.check_queue(session, context.settings, hospital)


@dataclass(frozen=True)
class AdaptationSubmission:
    """One request. `uploads` are the scans that came with it."""

    context: ServiceContext
    hospital: str
    asked: AdaptationRequest
    key: str | None
    request_id: str
    uploads: list[Upload] = field(default_factory=list)
    unused_masks: list[str] = field(default_factory=list, init=False)

    def is_new(self) -> bool:
        """Return whether the idempotency key is new, so the scans must be decoded. Raises as `make`."""
        new = self._before() is None
        if new:
            # Rejects what cannot be adapted before its scans are decoded.
            _ = self._chosen
        return new

    def make(self, formats: Sequence[str] = ()) -> tuple[str, bool]:
        """Create the job, or find the job of this idempotency key: (id, whether it is new).

        `formats` are those of the uploads.

        Raises:
            RequestInvalid: an option that this kind of model does not have.
            SelectionError, CohortError, JobError: a model that cannot be adapted, or not to this cohort.
            HospitalUnknown, StoreError.
        """
        database = self.context.database
        before = self._before()
        if before is not None:
            return before, False
        parent, adaptation, options = self._chosen
        if isinstance(self.asked, CohortAdaptation):
            if self.asked.quantise is not None:
                require_segmenting(parent, self.asked.quantise, self.context.settings)
            return self._submit(parent, adaptation, options, self.asked.cohort)
        with database.write() as session:
            cohort = cohorts.create(
                session, self.context.settings, self.hospital, "sent with its adaptation"
            ).id
        created = False
        try:
            self._store(cohort, formats)
            job, created = self._submit(parent, adaptation, options, cohort)
        finally:
            if not created:
                # Rejected, or a simultaneous copy of the request created the job first.
                cohorts.remove(database, self.context.settings, self.hospital, cohort)
        return job, created

    def _before(self) -> str | None:
        """Find the earlier job of this idempotency key."""
        with self.context.database.read() as session:
            require_hospital(session, self.hospital)
            before = records.replayed(session, self.hospital, self._request)
            return None if before is None else before.id

    @cached_property
    def _chosen(self) -> tuple[Artefact, HospitalAdaptation[Any], dict[str, Any]]:
        """Resolve the parent, the adaptation of its kind, and the validated options."""
        parent = resolve_parent(
            self.context.store,
            self.context.database,
            self.asked.model,
            self.hospital,
            new_versions=self.context.settings.new_versions,
        )
        require_parts(self.context.store, parent)
        ways = ways_of(self.context.store, parent)
        asked = self._by_masks(parent, ways)
        ways.check(asked)
        adaptation = adaptation_of(parent, asked)
        assert adaptation is not None
        if adaptation.needs_masks and not isinstance(self.asked, CohortAdaptation):
            raise MasksMissing(
                f"'{parent}' is adapted by masks of some scans, and a form with scans has no place for them: "
                "make a cohort, PUT scans and masks, then ask with its id"
            )
        options = parse(adaptation.options, asked, "options").model_dump(mode="json")
        return parent, adaptation, options

    def _by_masks(self, parent: Artefact, ways: Ways) -> dict[str, JsonValue]:
        """The options, where `auto` stands for preset `masks`: the cohort has masks that suffice, or there is
        no other way to adapt the parent.

        Options that `masks` does not have stand for another preset.
        """
        asked = self.asked.options
        by_masks = adaptation_by_masks(parent)
        if by_masks is None or asked.get("preset", AUTO) != AUTO:
            return asked
        chosen = {**asked, "preset": MASKS}
        if adaptation_of(parent) is by_masks:
            return chosen
        if (
            not isinstance(self.asked, CohortAdaptation)
            or not chosen.keys() <= MasksOptions.model_fields.keys()
        ):
            return asked
        cohort = self.asked.cohort
        with self.context.database.read() as session:
            cohorts.usable(session, self.hospital, cohort)
            if not masks.of_cohort(session, cohort):
                return asked
            if ways.masks == "required":
                return chosen
            try:
                by_masks.check(session, parent, cohort)
            except (MasksInvalid, MasksMissing) as error:
                self.unused_masks.append(f"the masks of the cohort are not used: {error}")
                return asked
        return chosen

    @cached_property
    def _request(self) -> Asked:
        scans = [upload.received_sha256 for upload in self.uploads]
        content = {"scans": scans, **self.asked.model_dump(mode="json")}
        return Asked(self.request_id, self.key, submission.fingerprint(content))

    def _store(self, cohort: str, formats: Sequence[str]) -> None:
        for number, (upload, found) in enumerate(zip(self.uploads, formats, strict=True), start=1):
            cohorts.add_scan(
                self.context.database,
                self.context.settings,
                self.hospital,
                cohort,
                f"{number:04d}",
                upload,
                found,
            )

    def _submit(
        self, parent: Artefact, adaptation: HospitalAdaptation[Any], options: Mapping[str, Any], cohort: str
    ) -> tuple[str, bool]:
        def create(session: Session) -> Job:
            cohorts.usable(session, self.hospital, cohort, lock=True)
            cohorts.may_learn(session, self.hospital, cohort)
            if not cohorts.totals(session, [cohort]):
                raise CohortEmpty(
                    f"Cohort {cohort} has no scans: PUT /hospitals/{self.hospital}/cohorts/{cohort}/scans/"
                    "NAME adds one."
                )
            adaptation.check(session, parent, cohort)
            work = Work(
                kind=adaptation_job.KIND,
                hospital=self.hospital,
                model=parent.name,
                parent=parent.digest,
                cohort=cohort,
                options=options,
            )
            job = records.create(session, self.context.settings, work, self._request)
            if isinstance(self.asked, CohortAdaptation) and self.asked.quantise is not None:
                follow(session, self.context, job, self.asked.quantise)
            for why in self.unused_masks:
                records.append_event(session, job, "warning", {"message": why})
            return job

        database, queue = self.context.database, self.context.queue
        return submission.submit(database, queue, self.hospital, self._request, create)
