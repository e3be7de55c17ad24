"""`/hospitals/{hospital}/observations`: what is known of a hospital's answers, as pages or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from service import corrections, observation
from service.context import ServiceContext
from service.corrections import kept_answers
from service.database import CohortScan, caller_of
from service.database.hospitals import require_hospital
from service.errors import ObservationUnknown, RequestInvalid
from service.http.audit import Audited, AuditedRoute
from service.http.dependencies import AsAdmin, AsReader
from service.http.parameters import HospitalId, Limit, Page
from service.http.problems import problem_responses
from service.observation import Stored
from service.validation import MODEL_NAME
from service.watch.watcher import forget

router = APIRouter(tags=["observations"], route_class=AuditedRoute)

OfModel = Annotated[str | None, Query(pattern=MODEL_NAME, description="Only answers of this model.")]
# The largest number of a row that is asked for: every database and JSON has it.
_LARGEST = 2**53 - 1
_LABEL = ("label", "confidence", "voxels", "volume_ml", "parts", "at_border")


class ObservedLabelView(BaseModel):
    """One label of an answer."""

    confidence: float = Field(description="As in the answer: how sure the network was, 0 to 1.")
    voxels: int
    volume_ml: float | None
    parts: int | None
    at_border: bool


class KeptScan(BaseModel):
    """Where the scan of an answer is."""

    cohort: str
    scan: str = Field(description="Its name in the cohort.")


class ObservationView(BaseModel):
    """What is known of one answer: no pixel, no name, no UID."""

    id: int
    at: datetime
    model: str
    version: str = Field(description="Digest of the version that answered.")
    graph: str
    request: str
    way: str = Field(description="How it left: `http`, `viewer`, `pacs` or `job`.")
    actor: str
    series: str | None = Field(description="Keyed digest of the DICOM series' UID.")
    scan: str = Field(description="Keyed digest of the scan's bytes: equal for equal scans.")
    scanner: str | None
    acquisition: dict[str, Any] | None = Field(description="What the DICOM header says of it.")
    shift: float | None = Field(description="As in the receipt.")
    shift_at: str | None
    size: list[int]
    spacing: list[float] | None
    unlike: int = Field(description="Number of the guard's warnings.")
    seconds: float
    warnings: list[str]
    precision: str
    provider: str
    locum: str
    usual: bool = Field(description="Whether the request left it to the service which network answers.")
    looked_at: datetime | None = Field(description="When somebody said that they looked at the mask.")
    looked_by: str | None
    labels: dict[str, ObservedLabelView]
    review: dict[str, float] | None = Field(
        None,
        description="With `order=review`: by label, the share of the other newest answers that are less "
        "sure. Labels of fewer than 20 others are left out.",
    )
    kept: KeptScan | None = Field(
        None,
        description="With `order=review`, to an operator: the scan, where a cohort of the hospital has it. A "
        "DICOM series is known by the file that was sent.",
    )


class ObservationList(Page):
    """Observations of a hospital, newest first, or most doubtful first."""

    observations: list[ObservationView]


@router.get("/hospitals/{hospital}/observations", responses=problem_responses(404, 422))
def list_observations(
    context: AsReader,
    hospital: HospitalId,
    model: OfModel = None,
    after: Annotated[
        int | None, Query(ge=1, le=_LARGEST, description="List those before this one in time.")
    ] = None,
    limit: Limit = 100,
    order: Annotated[
        Literal["time", "review"],
        Query(
            description="`review`, which needs `model` and takes no `after`: the newest 500 answers of the "
            "version that serves, least sure first. Those that somebody looked at come last."
        ),
    ] = "time",
) -> ObservationList:
    """List what was observed of the hospital's answers, newest first.

    Every answer leaves one: by a request, to a viewer, to a PACS, or as the result of a job.
    """
    if order == "review":
        if model is None:
            raise RequestInvalid([{"field": "query.model", "reason": "required with order=review"}])
        if after is not None:
            raise RequestInvalid(
                [{"field": "query.after", "reason": "order=review is one page: leave it out"}]
            )
        with context.database.read() as session:
            require_hospital(session, hospital)
            ranked = observation.most_doubtful(session, hospital, model, limit)
            # A scan's name is a patient's, which a reader does not see.
            scans = {each.stored.row["scan"] for each in ranked if caller_of(session).has("operator")}
            kept = corrections.kept_scans(session, hospital, scans) if scans else {}
            page = [_view(each.stored, each.ranks, kept.get(each.stored.row["scan"])) for each in ranked]
        return ObservationList(observations=page, next=None)
    with context.database.read() as session:
        require_hospital(session, hospital)
        found = observation.page(session, hospital, model, before=after, limit=limit + 1)
    page = [_view(each) for each in found[:limit]]
    return ObservationList(observations=page, next=str(page[-1].id) if page and len(found) > limit else None)


@router.get(
    "/hospitals/{hospital}/observations.csv",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {}}}, **problem_responses(404, 422)},
)
def export_observations(context: AsReader, hospital: HospitalId, model: OfModel = None) -> StreamingResponse:
    """Export all observations of a hospital as CSV, newest first: a row per answer and label."""
    with context.database.read() as session:
        require_hospital(session, hospital)
    return StreamingResponse(_rows(context, hospital, model), media_type="text/csv")


@router.put("/hospitals/{hospital}/observations/{observation}/looked", responses=problem_responses(404, 422))
def look_at_observation(
    context: Annotated[AsReader, Audited("observation.looked")],
    hospital: HospitalId,
    number: Annotated[
        int, Path(ge=1, le=_LARGEST, alias="observation", description="The `id` of the observation.")
    ],
) -> ObservationView:
    """Note that the caller looked at the mask of an answer. The first one who says so stays in the list."""
    with context.database.write() as session:
        require_hospital(session, hospital)
        found = observation.look_at(session, hospital, number, caller_of(session).actor)
        if found is None:
            raise ObservationUnknown(f"{hospital} has no observation {number}: it may have expired")
        return _view(found)


@router.delete("/hospitals/{hospital}/observations", status_code=204, responses=problem_responses(404, 422))
def delete_observations(
    context: Annotated[AsAdmin, Audited("observations.deleted")], hospital: HospitalId
) -> None:
    """Delete all observations of a hospital, its kept answers, its corrections' figures, and what its watches
    hold of them.

    The audit trail keeps who did it; what the watches called stays in their history.
    """
    with context.database.read() as session:
        require_hospital(session, hospital)
    going = True
    while going:
        with context.database.write() as session:
            going = observation.delete_of(session, hospital) > 0
    going = True
    while going:
        with context.database.write() as session:
            going = corrections.delete_of(session, hospital) > 0
    kept_answers.delete_of(context.database, context.settings, hospital)
    with context.database.write() as session:
        forget(session, hospital)


def _view(
    stored: Stored, ranks: Mapping[str, float] | None = None, scan: CohortScan | None = None
) -> ObservationView:
    labels = {
        name: ObservedLabelView(**{each: row[each] for each in _LABEL[1:]})
        for name, row in stored.labels.items()
    }
    review = None if ranks is None else dict(ranks)
    kept = None if scan is None else KeptScan(cohort=scan.cohort, scan=scan.name)
    return ObservationView(**{**stored.row, "labels": labels}, review=review, kept=kept)


def _rows(context: ServiceContext, hospital: str, model: str | None) -> Iterator[str]:
    names = [name for name in ObservationView.model_fields if name not in ("labels", "review", "kept")]
    yield _line([*names, *_LABEL])
    before: int | None = None
    while True:
        # A transaction for each page: a slow client must not hold one.
        with context.database.read() as session:
            found = observation.page(session, hospital, model, before=before, limit=_PAGE)
        for stored in found:
            before = stored.row["id"]
            own = [stored.row[name] for name in names]
            for row in stored.labels.values():
                yield _line([*own, *(row[name] for name in _LABEL)])
        if len(found) < _PAGE:
            return


_PAGE = 500


def _line(values: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow([_cell(value) for value in values])
    return line.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet takes for a formula gets an apostrophe: a header names the scanner."""
    if isinstance(value, datetime):
        return value.isoformat()
    text = str(value) if isinstance(value, str | list | dict) else value
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
