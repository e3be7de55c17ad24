"""`/models` and `/lineage`: list models and versions, their lineage, and the reports of their runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound, StoreError
from model_store.index import Record
from model_store.manifest import IMPORTED, Lineage
from model_store.store import Store
from model_store.task import Task
from model_store.versions import Tombstone, Version, some
from service import history
from service.catalog.adapted import adapted_for
from service.catalog.parts import personalizations
from service.catalog.version import route_of
from service.catalog.ways import ways_of
from service.context import ServiceContext
from service.database.hospitals import lent_sites
from service.errors import RequestInvalid
from service.history import VersionCard
from service.http.dependencies import AsReader, InCatalogue, InReports
from service.http.origins import self_contained
from service.http.parameters import Limit, ModelName, Page, VersionNumber
from service.http.problems import problem_responses
from service.kinds import DESCRIPTION
from service.validation import DIGEST, HOSPITAL_ID, MODEL_NAME

router = APIRouter(tags=["models"])

# For one page: names that are looked at, and versions of a name that are read to find damage.
_MOST_VISITED, _MOST_READ = 1000, 20

Adapted = Annotated[
    bool | None,
    Query(description="`false`: only what the federation made; `true`: only what was adapted to a hospital."),
]
AdaptedTo = Annotated[
    str | None, Query(pattern=HOSPITAL_ID, description="Only what was adapted to this hospital.")
]


OneHospital = Annotated[
    str | None, Query(pattern=HOSPITAL_ID, description="Only what is recorded at this hospital.")
]


class VersionSummary(BaseModel):
    """One version. It never changes, but it or an ancestor can be withdrawn."""

    version: int
    digest: str = Field(description="`sha256:` and the hash of the manifest: what a receipt refers to.")
    published: datetime
    withdrawn: Tombstone | None = Field(
        description="Actor, time and reason of a withdrawal. A withdrawn version does not open."
    )
    flagged: list[str] = Field(description="Withdrawn ancestors.")


class ModelSummary(BaseModel):
    """A model that a request can name."""

    name: str
    kind: str = Field(description=DESCRIPTION)
    summary: str = Field(description="What its kind and its network mean for a hospital, in words.")
    adaptable: bool = Field(description="Whether a job can adapt it to a hospital (`POST /adaptations`).")
    masks: Literal["required", "optional", "none"] = Field(
        description="Whether a job adapts it by masks of some scans: `required` where `auto` does nothing "
        "without, `optional` (preset `masks`), or `none`."
    )
    presets: list[str] = Field(
        description="What `options.preset` of a job that adapts it can be; empty where it has no presets."
    )
    hospital: str | None = Field(
        description="The hospital that it was adapted to; no other hospital is served it."
    )
    latest: VersionSummary | None = Field(
        description="The newest version that is not withdrawn and, where the service opens only what trusted "
        "keys signed, that one of them signed. Null if there is none."
    )
    untrusted: bool = Field(
        description="Whether `latest` is null, or not the newest, because no trusted key signed a version."
    )
    task: str
    answers: str = Field(description="The route that takes scans for it: `/segment` or `/classify`.")
    labels: list[str] = Field(
        description="Labels of a segmentation, or classes of a classification in order."
    )
    channels: int
    channel_names: list[str] = Field(
        description="Names of the channels of a volume, in order, where each is a file of its own; empty "
        "where one file has all.",
    )
    imported: str | None = Field(
        description="Where a model that was made elsewhere comes from, and its licence. Null for one of a "
        "federation.",
    )
    sites: list[str] = Field(description="The sites of the federation that trained it.")
    personalizations: list[str] = Field(
        description="What `personalization` of a request on the newest version can be."
    )


class UnreadableModel(BaseModel):
    """A version in the store with an unreadable manifest."""

    name: str = Field(description="`name@version`.")
    detail: str


class ModelList(Page):
    """The models that the store offers, by name. Parts of a composite are not offered on their own.

    A page may have fewer models than `limit` asks for, also none, and be followed by others.
    """

    models: list[ModelSummary]
    unreadable: list[UnreadableModel] = Field(
        description=f"Among the newest {_MOST_READ} versions of each name of the page."
    )


class ModelDetail(ModelSummary, Page):
    """A model with its versions, oldest first."""

    part_of: str | None
    versions: list[VersionSummary]


class Part(BaseModel):
    """An artefact that is part of a composite."""

    role: str
    digest: str
    reference: str | None = Field(description="`name@version`; null if it is no longer in the store.")


class VersionDetail(VersionSummary):
    """A version with its manifest."""

    name: str
    manifest: dict[str, Any]
    parts: list[Part]
    descendants: list[str] = Field(description="Artefacts made from this one or composed of it.")


class LineageVersion(VersionSummary):
    """A version as a node of the lineage."""

    name: str
    kind: str = Field(description=DESCRIPTION)
    summary: str = Field(description="What its kind and its network mean for a hospital, in words.")
    part_of: str | None = Field(description="The composite that it is a part of.")
    hospital: str | None = Field(description="The hospital that it was adapted to.")
    method: str
    run: str = Field(description="The run of the federation, or the job, that made it.")
    parents: list[str] = Field(
        description="`name@version` of what it was made from; the digest where the store has it no longer."
    )
    parts: list[str] = Field(description="The same of what it is composed of.")
    weights: str | None = Field(
        None,
        description="Where its training began with weights from elsewhere: their origin, licence and digest.",
    )
    report: bool = Field(description="Whether the report of its run is here for this caller.")


class LineageView(Page):
    """The versions of the store, oldest first; parts of composites and withdrawn versions are included."""

    versions: list[LineageVersion]


@router.get("/models", responses=problem_responses(422))
def list_models(
    context: InCatalogue,
    adapted: Adapted = None,
    hospital: AdaptedTo = None,
    after: Annotated[str | None, Query(pattern=MODEL_NAME, description="List the names after this.")] = None,
    limit: Limit = 200,
) -> ModelList:
    """List the models that a request can name; one adapted to a hospital needs its version."""
    store, wanted = context.store, _filter(adapted, hospital)
    last = {record.name: record for record in store.lineage.records()}
    everything = adapted is None and hospital is None
    # Nothing is known of a name without a readable version.
    names = [name for name in store.versions.names() if (wanted(last[name]) if name in last else everything)]
    visited = names[0 if after is None else bisect_right(names, after) :]
    models: list[ModelSummary] = []
    unreadable: list[UnreadableModel] = []
    following: str | None = None
    for count, name in enumerate(visited):
        if len(models) == limit or count == _MOST_VISITED:
            following = visited[count - 1]
            break
        damaged = store.versions.unreadable(name, store.versions.numbers(name)[-_MOST_READ:])
        unreadable += [
            UnreadableModel(name=f"{name}@{number}", detail=str(error)) for number, error in damaged.items()
        ]
        if name in last and last[name].part_of is None:
            with suppress(StoreError):
                models.append(_summary(store, name)[0])
    return ModelList(models=models, unreadable=unreadable, next=following)


@router.get("/models/{model}", responses=problem_responses(404, 422, 503))
def get_model(
    context: InCatalogue,
    model: ModelName,
    after: Annotated[
        int | None, Query(ge=1, le=999_999_999, description="List the versions after this number.")
    ] = None,
    limit: Limit = 200,
) -> ModelDetail:
    """Return one model with its versions."""
    store = context.store
    summary, part_of = _summary(store, model)
    _check_shared(context, store.versions.newest(model)[0].artefact)
    numbers = store.versions.numbers(model)
    start = 0 if after is None else bisect_right(numbers, after)
    page = numbers[start : start + limit]
    versions = []
    for number in page:
        with suppress(StoreError):
            versions.append(_version(store.versions.get(model, number)))
    more = start + limit < len(numbers)
    return ModelDetail(
        **summary.model_dump(), part_of=part_of, versions=versions, next=str(page[-1]) if more else None
    )


@router.get("/models/{model}/versions/{version}", responses=problem_responses(404, 422, 503))
def get_version(context: InCatalogue, model: ModelName, version: VersionNumber) -> VersionDetail:
    """Return one version: manifest, digest, lineage, parts, and the tombstone of a withdrawn one."""
    found = find_version(context.store, model, version)
    artefact = found.artefact
    _check_shared(context, artefact)
    return VersionDetail(
        **_version(found).model_dump(),
        name=artefact.name,
        manifest=artefact.manifest.model_dump(mode="json"),
        parts=[
            Part(role=role, digest=digest, reference=_reference(context.store, digest))
            for role, digest in artefact.manifest.references().items()
        ],
        descendants=[str(child) for child in context.store.lineage.descendants(artefact.digest)],
    )


@router.get(
    "/models/{model}/versions/{version}/report",
    response_class=HTMLResponse,
    responses=problem_responses(404, 422, 503),
)
def get_report(context: InReports, model: ModelName, version: VersionNumber) -> HTMLResponse:
    """Return the report of the run that made a version: curves, change of Dice and bytes by site.

    One self-contained HTML page without patients' data. It describes every member, so a caller of one
    hospital finds none.
    """
    artefact = find_version(context.store, model, version).artefact
    report = context.store.report(artefact) if _sees_reports(context) else None
    if report is None:
        raise ReferenceNotFound(
            f"'{artefact}' has no report here: training.federate attaches one to the model that it publishes"
        )
    return self_contained(report)


@router.get("/models/{model}/versions/{version}/card", responses=problem_responses(404, 422, 503))
def get_version_card(
    context: AsReader, model: ModelName, version: VersionNumber, hospital: OneHospital = None
) -> VersionCard:
    """Return what is recorded of a version: training data, acceptance, monitoring and changes.

    The last three are by hospital, of those that the caller may see. It has no pixel, and no name of a
    patient or scan.
    """
    found = find_version(context.store, model, version)
    _check_shared(context, found.artefact)
    with context.database.snapshot() as session:
        return history.version_card(session, context.store, found, hospital)


@router.get(
    "/models/{model}/versions/{version}/card.html",
    response_class=HTMLResponse,
    responses=problem_responses(404, 422, 503),
)
def get_version_page(
    context: AsReader, model: ModelName, version: VersionNumber, hospital: OneHospital = None
) -> HTMLResponse:
    """Return the same card as one self-contained HTML page."""
    # Its templates are imported for the first page.
    from service.history.page import render_card

    return self_contained(render_card(get_version_card(context, model, version, hospital)))


@router.get("/lineage", responses=problem_responses(422))
def get_lineage(
    context: InCatalogue,
    adapted: Adapted = None,
    hospital: AdaptedTo = None,
    after: Annotated[
        str | None, Query(pattern=DIGEST, description="Digest of a version: list those after it.")
    ] = None,
    limit: Limit = 200,
) -> LineageView:
    """List versions with what they were made from and composed of, withdrawn ones included."""
    store, wanted = context.store, _filter(adapted, hospital)
    records = sorted(filter(wanted, store.lineage.records()), key=_age)
    start = 0
    if after is not None:
        last = store.lineage.locate(after)
        if last is None:
            raise RequestInvalid([{"field": "query.after", "reason": "no version has this digest by now"}])
        start = bisect_right(records, _age(last), key=_age)
    page = records[start : start + limit]
    reports = _sees_reports(context)
    versions = []
    for record in page:
        with suppress(StoreError):
            versions.append(_in_lineage(store, store.versions.get(record.name, record.number), reports))
    more = start + limit < len(records)
    return LineageView(versions=versions, next=page[-1].digest if more else None)


def _age(record: Record) -> tuple[float, str, int]:
    return record.published, record.name, record.number


def _filter(adapted: bool | None, hospital: str | None) -> Callable[[Record], bool]:
    return lambda record: (
        adapted in (None, record.adapted_to is not None) and hospital in (None, record.adapted_to)
    )


def _in_lineage(store: Store, version: Version, reports: bool) -> LineageVersion:
    artefact = version.artefact
    manifest = artefact.manifest
    return LineageVersion(
        **_version(version).model_dump(),
        name=artefact.name,
        kind=manifest.kind,
        summary=ways_of(store, artefact).summary,
        part_of=manifest.part_of,
        hospital=adapted_for(artefact),
        method=manifest.lineage.method,
        run=manifest.lineage.run,
        parents=[_reference(store, digest) or digest for digest in manifest.lineage.parents],
        parts=[_reference(store, digest) or digest for digest in manifest.references().values()],
        weights=None if manifest.lineage.weights is None else str(manifest.lineage.weights),
        report=reports and manifest.part_of is None and _has_report(store, artefact),
    )


def _has_report(store: Store, artefact: Artefact) -> bool:
    # A job's version comes from no run: a bucket need not be asked.
    return adapted_for(artefact) is None and store.has_report(artefact)


def _sees_reports(context: ServiceContext) -> bool:
    caller = context.database.caller
    return caller.hospitals is None and (caller.has("operator") or caller.has("federation"))


def _check_shared(context: ServiceContext, artefact: Artefact) -> None:
    """Raise ReferenceNotFound for a member's own model that another hospital's caller may not use.

    Its manifest describes that hospital's patients: statistics of their scans, scores.
    """
    # Only networks of one site have one.
    site = getattr(artefact.manifest, "site", None)
    if site is None or artefact.manifest.part_of is None:
        return
    with context.database.read() as session:
        lent = lent_sites(session)
    if lent is not None and site not in lent:
        raise ReferenceNotFound(
            f"'{artefact}' is the own model of site '{site}', which its hospital does not share "
            "(`shares_model`); ask for another model"
        )


def find_version(store: Store, model: str, version: int | str) -> Version:
    """A version by number or digest, withdrawn or not.

    Raises ReferenceNotFound, and why a version of this number cannot be read.
    """
    numbers = store.versions.numbers(model)
    if isinstance(version, str):
        record = store.lineage.locate(version)
        number = None if record is None or record.name != model else record.number
    else:
        number = version
    if number in numbers:
        return store.versions.get(model, number)
    if not numbers:
        known = some(store.versions.names()) or "none"
        raise ReferenceNotFound(f"'{model}' is not in the store; names: {known}")
    known = some([str(each) for each in numbers])
    raise ReferenceNotFound(f"'{model}@{version}' is not in the store; '{model}' has the versions {known}")


def _summary(store: Store, name: str) -> tuple[ModelSummary, str | None]:
    """Summarise a model by what its name opens, else by its newest; return what that is a part of, too.

    Raises ReferenceNotFound for an unknown name, and an error of its versions if none is readable.
    """
    shown, opens, untrusted, last = store.versions.newest(name)
    manifest, ways = shown.artefact.manifest, ways_of(store, shown.artefact)
    summary = ModelSummary(
        name=manifest.name,
        kind=manifest.kind,
        summary=ways.summary,
        adaptable=ways.adaptable,
        masks=ways.masks,
        presets=list(ways.for_cohorts),
        hospital=adapted_for(shown.artefact),
        latest=_version(shown) if opens else None,
        untrusted=untrusted,
        task=manifest.task.name,
        answers=route_of(manifest.task.kind),
        labels=list(manifest.task.labels or manifest.task.class_names),
        channels=manifest.task.channel_count,
        channel_names=_channel_names(manifest.task),
        imported=_imported(manifest.lineage),
        sites=list(manifest.lineage.sites),
        personalizations=personalizations(shown.artefact, ways),
    )
    return summary, last.part_of


def _channel_names(task: Task) -> list[str]:
    return [channel.name for channel in task.channel_list] if task.separate_channels else []


def _imported(lineage: Lineage) -> str | None:
    weights = lineage.weights
    if weights is None or lineage.method != IMPORTED:
        return None
    return f"{weights.origin or weights.file}; licence {weights.licence or 'not stated'}"


def _version(version: Version) -> VersionSummary:
    artefact = version.artefact
    return VersionSummary(
        version=artefact.version,
        digest=artefact.digest,
        published=artefact.published,
        withdrawn=version.withdrawn,
        flagged=list(version.flagged),
    )


def _reference(store: Store, digest: str) -> str | None:
    # Not `by_digest`, which refuses a withdrawn part: here it is only named.
    record = store.lineage.locate(digest, thorough=False)
    return None if record is None else str(record)
