"""`/models` and `/lineage`: list models and versions, their lineage, and the reports of their runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound
from model_store.store import Store, Tombstone, Version
from service.catalog.adapted import adapted_for
from service.catalog.parts import personalizations
from service.catalog.version import route_of
from service.context import ServiceContext
from service.http.dependencies import InCatalogue, InReports
from service.http.origins import self_contained
from service.http.parameters import ModelName, VersionNumber
from service.http.problems import problem_responses
from service.kinds import DESCRIPTION, adaptation_by_masks, adaptation_of, kind_of

router = APIRouter(tags=["models"])


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
    summary: str = Field(description="What its kind means for a hospital, in words.")
    adaptable: bool = Field(description="Whether a job can adapt it to a hospital (`POST /adaptations`).")
    masks: Literal["required", "optional", "none"] = Field(
        description="Whether a job adapts it by masks of some scans: `required` where there is no other way, "
        "`optional` (preset `masks`), or `none`."
    )
    hospital: str | None = Field(
        description="The hospital that it was adapted to; no other hospital is served it."
    )
    latest: VersionSummary | None = Field(description="The newest version that is not withdrawn.")
    task: str
    answers: str = Field(description="The route that takes scans for it: `/segment` or `/classify`.")
    labels: list[str] = Field(
        description="Labels of a segmentation, or classes of a classification in order."
    )
    channels: int
    sites: list[str] = Field(description="The sites of the federation that trained it.")
    personalizations: list[str] = Field(
        description="What `personalization` of a request on the newest version can be."
    )


class UnreadableModel(BaseModel):
    """A version in the store with an unreadable manifest."""

    name: str = Field(description="`name@version`.")
    detail: str


class ModelList(BaseModel):
    """The models that the store offers. Parts of a composite are not offered on their own."""

    models: list[ModelSummary]
    unreadable: list[UnreadableModel]


class ModelDetail(ModelSummary):
    """A model with all its versions, oldest first."""

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
    summary: str = Field(description="What its kind means for a hospital, in words.")
    part_of: str | None = Field(description="The composite that it is a part of.")
    hospital: str | None = Field(description="The hospital that it was adapted to.")
    method: str
    run: str = Field(description="The run of the federation, or the job, that made it.")
    parents: list[str] = Field(
        description="`name@version` of what it was made from; the digest where the store has it no longer."
    )
    parts: list[str] = Field(description="The same of what it is composed of.")
    report: bool = Field(description="Whether the report of its run is here for this caller.")


class LineageView(BaseModel):
    """The versions of the store, oldest first; parts of composites and withdrawn versions are included."""

    versions: list[LineageVersion]


@router.get("/models", responses=problem_responses(422))
def list_models(context: InCatalogue) -> ModelList:
    """List the models that a request can name; one adapted to a hospital needs its version."""
    models: list[ModelSummary] = []
    unreadable: list[UnreadableModel] = []
    for name in context.store.names():
        damaged = context.store.unreadable(name)
        unreadable += [
            UnreadableModel(name=f"{name}@{number}", detail=str(error)) for number, error in damaged.items()
        ]
        if len(damaged) == len(context.store.numbers(name)):
            continue
        versions = context.store.versions(name)
        if versions[-1].artefact.manifest.part_of is None:
            models.append(_summary(versions))
    return ModelList(models=models, unreadable=unreadable)


@router.get("/models/{model}", responses=problem_responses(404, 422, 503))
def get_model(context: InCatalogue, model: ModelName) -> ModelDetail:
    """Return one model with all its versions."""
    versions = context.store.versions(model)
    return ModelDetail(
        **_summary(versions).model_dump(),
        part_of=versions[-1].artefact.manifest.part_of,
        versions=[_version(version) for version in versions],
    )


@router.get("/models/{model}/versions/{version}", responses=problem_responses(404, 422, 503))
def get_version(context: InCatalogue, model: ModelName, version: VersionNumber) -> VersionDetail:
    """Return one version: manifest, digest, lineage, parts, and the tombstone of a withdrawn one."""
    found = find_version(context.store, model, version)
    artefact = found.artefact
    return VersionDetail(
        **_version(found).model_dump(),
        name=artefact.name,
        manifest=artefact.manifest.model_dump(mode="json"),
        parts=[
            Part(role=role, digest=digest, reference=_reference(context.store, digest))
            for role, digest in artefact.manifest.references().items()
        ],
        descendants=[str(child) for child in context.store.descendants(artefact.digest)],
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


@router.get("/lineage", responses=problem_responses(422))
def get_lineage(context: InCatalogue) -> LineageView:
    """List every version with what it was made from and composed of, withdrawn ones included."""
    store = context.store
    found = [version for name in store.names() for version in _readable(store, name)]
    names = {version.artefact.digest: str(version.artefact) for version in found}
    reports = _sees_reports(context)
    return LineageView(
        versions=[
            LineageVersion(
                **_version(version).model_dump(),
                name=artefact.name,
                kind=manifest.kind,
                summary=kind_of(artefact).summary,
                part_of=manifest.part_of,
                hospital=adapted_for(artefact),
                method=manifest.lineage.method,
                run=manifest.lineage.run,
                parents=[names.get(digest, digest) for digest in manifest.lineage.parents],
                parts=[names.get(digest, digest) for digest in manifest.references().values()],
                report=reports and manifest.part_of is None and _has_report(store, artefact),
            )
            for version in sorted(found, key=lambda each: each.artefact.published)
            for artefact in [version.artefact]
            for manifest in [artefact.manifest]
        ]
    )


def _has_report(store: Store, artefact: Artefact) -> bool:
    # A job's version comes from no run: a bucket need not be asked.
    return adapted_for(artefact) is None and store.has_report(artefact)


def _readable(store: Store, name: str) -> list[Version]:
    return [] if len(store.unreadable(name)) == len(store.numbers(name)) else store.versions(name)


def _sees_reports(context: ServiceContext) -> bool:
    caller = context.database.caller
    return caller.hospitals is None and (caller.has("operator") or caller.has("federation"))


def find_version(store: Store, model: str, version: int | str) -> Version:
    """A version by number or digest, withdrawn or not.

    Raises ReferenceNotFound, and why a version of this number cannot be read.
    """
    versions = store.versions(model)
    for candidate in versions:
        if version in (candidate.artefact.version, candidate.artefact.digest):
            return candidate
    if isinstance(version, int) and (damage := store.unreadable(model).get(version)):
        raise damage
    known = ", ".join(str(candidate.artefact.version) for candidate in versions)
    raise ReferenceNotFound(f"'{model}@{version}' is not in the store; '{model}' has the versions {known}")


def _summary(versions: list[Version]) -> ModelSummary:
    in_force = [version for version in versions if version.withdrawn is None]
    shown = (in_force or versions)[-1]
    manifest = shown.artefact.manifest
    return ModelSummary(
        name=manifest.name,
        kind=manifest.kind,
        summary=kind_of(shown.artefact).summary,
        adaptable=adaptation_of(shown.artefact) is not None,
        masks=_masks(shown.artefact),
        hospital=adapted_for(shown.artefact),
        latest=_version(shown) if in_force else None,
        task=manifest.task.name,
        answers=route_of(manifest.task.kind),
        labels=list(manifest.task.labels or manifest.task.class_names),
        channels=manifest.task.channels,
        sites=list(manifest.lineage.sites),
        personalizations=personalizations(shown.artefact),
    )


def _masks(artefact: Artefact) -> Literal["required", "optional", "none"]:
    adaptation = adaptation_of(artefact)
    if adaptation is not None and adaptation.needs_masks:
        return "required"
    return "none" if adaptation_by_masks(artefact) is None else "optional"


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
    for name in store.names():
        for version in store.versions(name):
            if version.artefact.digest == digest:
                return str(version.artefact)
    return None
