"""A version's card, from what is recorded: training data, acceptance, monitoring, changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.store import Store
from model_store.versions import Tombstone, Version
from service import corrections, shadow
from service.about import NOTICE, locum_version
from service.catalog.adapted import adapted_for, job_of
from service.corrections import CorrectionFigures
from service.database import Acceptance, Assignment, ChangePlanRow, Job, Observation, Shadow, WatchEvent
from service.database.hospitals import require_hospital, visible_hospitals
from service.history.answers import AcceptanceFacts, DecisionView, JobFacts, reference
from service.history.period import MOST_ROWS, AlarmFacts, Arrivals, PlanFacts, arrivals_of
from service.kinds import kind_of
from service.serving import assignments
from service.shadow import ShadowReport

MOST_HOSPITALS = 50
"""Hospitals of a card, by id."""


class TrainingFacts(BaseModel):
    """What the version was made from."""

    method: str
    run: str = Field(description="The run of the federation, or the job, that made it.")
    sites: list[str] = Field(description="The members on which it was trained.")
    scans: int | None = Field(description="Training scans, as the guard knows them; null where not stated.")
    rounds: int
    seed: int
    weights: str | None = Field(description="Where its training began with weights from elsewhere.")
    parents: list[str] = Field(description="`name@version` of what it was made from, or the digest.")
    metrics: dict[str, float] = Field(description="What it, or its global model, was published with.")
    details: dict[str, Any] = Field(description="The configuration of the run.")
    software: dict[str, str]
    made_by: JobFacts | None = Field(description="The job that made it at a hospital, with its gate.")


class AcceptedLabel(BaseModel):
    """One label in the report of an acceptance: means over the patients with masks."""

    model_config = ConfigDict(extra="ignore")

    n: int
    dice: float | None
    lower_bound: float | None = Field(description="Lower bound of the mean Dice, one-sided, 95 % sure.")
    surface_dice: float | None
    missed: float | None = Field(description="Share of patients without any hit.")
    bias_ml: float | None


class CardAcceptance(AcceptanceFacts):
    """A decision on the report of an acceptance, with the figures of that report."""

    precision: str
    labels: dict[str, AcceptedLabel]


class AtHospital(BaseModel):
    """What is recorded of a version at one hospital."""

    hospital: str
    name: str
    acceptances: list[CardAcceptance] = Field(description="Newest first.")
    arrivals: list[Arrivals] = Field(description="Its answers, by scanner.")
    alarms: list[AlarmFacts] = Field(description="Those of the watch while it served, newest first.")
    corrections: list[CorrectionFigures]
    shadows: list[ShadowReport] = Field(description="Where it answered unseen.")
    changes: list[DecisionView] = Field(
        description="Entries of the serving log by which it began to serve, or another took its place."
    )
    plans: list[PlanFacts] = Field(
        description="Change plans of the models that it served for, also those that ended, newest first."
    )


class VersionCard(BaseModel):
    """A version as it is known from what is recorded; nothing of it was typed for the card."""

    artefact: str = Field(description="`name@version`.")
    digest: str
    kind: str
    summary: str
    task: str
    modality: str | None
    labels: list[str]
    hospital: str | None = Field(description="The hospital that it was adapted to.")
    published: datetime
    withdrawn: Tombstone | None
    flagged: list[str] = Field(description="Withdrawn ancestors.")
    descendants: list[str] = Field(description="Versions made from it, or composed of it.")
    training: TrainingFacts
    hospitals: list[AtHospital]
    hospitals_left_out: int
    made_at: datetime
    locum: str = Field(description="The version that made the card.")
    notice: str = NOTICE


def version_card(session: Session, store: Store, version: Version, hospital: str | None) -> VersionCard:
    """Read what is recorded of a version, at one hospital or at all that the caller may see.

    Raises HospitalUnknown.
    """
    artefact = version.artefact
    manifest, task = artefact.manifest, artefact.manifest.task
    if hospital is None:
        known = _hospitals(session, artefact.digest)
        rows = [each for each in visible_hospitals(session) if each.id in known]
    else:
        rows = [require_hospital(session, hospital)]
    return VersionCard(
        artefact=str(artefact),
        digest=artefact.digest,
        kind=manifest.kind,
        summary=kind_of(artefact).summary,
        task=task.name,
        modality=task.modality,
        labels=list(task.labels),
        hospital=adapted_for(artefact),
        published=artefact.published,
        withdrawn=version.withdrawn,
        flagged=list(version.flagged),
        descendants=[str(child) for child in store.lineage.descendants(artefact.digest)],
        training=_training(session, store, artefact),
        hospitals=[
            _at_hospital(session, store, artefact.digest, each.id, each.name)
            for each in rows[:MOST_HOSPITALS]
        ],
        hospitals_left_out=max(len(rows) - MOST_HOSPITALS, 0),
        made_at=datetime.now(UTC),
        locum=locum_version(),
    )


def _hospitals(session: Session, digest: str) -> set[str]:
    """Those of which the rows that persons made name the version; also hospitals that the caller sees not."""
    return {
        each
        for table, column in (
            (Assignment, Assignment.digest),
            (Acceptance, Acceptance.version),
            (Shadow, Shadow.version),
        )
        for each in session.scalars(select(table.hospital).where(column == digest).distinct())
    }


def _training(session: Session, store: Store, artefact: Artefact) -> TrainingFacts:
    manifest, job = artefact.manifest, job_of(session, artefact.digest)
    lineage, network = manifest.lineage, _network(store, artefact)
    statistics = getattr(network, "statistics", None)
    return TrainingFacts(
        method=lineage.method,
        run=lineage.run,
        sites=list(lineage.sites),
        scans=None if statistics is None or not statistics.count else statistics.count,
        rounds=lineage.rounds,
        seed=lineage.seed,
        weights=None if lineage.weights is None else str(lineage.weights),
        parents=[reference(store, digest) or digest for digest in lineage.parents],
        metrics={**network.metrics, **manifest.metrics},
        details=dict(lineage.details),
        software=dict(manifest.software),
        made_by=None if job is None else JobFacts.of(job),
    )


def _network(store: Store, artefact: Artefact) -> Any:
    """The manifest of the version's one network, or of its global model; its own where that does not open."""
    digest = kind_of(artefact).parts(artefact).global_model
    with suppress(StoreError):
        return artefact.manifest if digest is None else store.by_digest(digest).manifest
    return artefact.manifest


def _at_hospital(session: Session, store: Store, digest: str, hospital: str, name: str) -> AtHospital:
    served = select(Assignment.model).where(Assignment.hospital == hospital, Assignment.digest == digest)
    models = sorted(session.scalars(served.distinct()))
    logs = {model: assignments.history(session, hospital, model) for model in models}
    planned = select(ChangePlanRow).where(ChangePlanRow.hospital == hospital, ChangePlanRow.model.in_(models))
    answered = and_(Observation.hospital == hospital, Observation.version == digest)
    accepted = select(Acceptance).where(Acceptance.hospital == hospital, Acceptance.version == digest)
    unseen = select(Shadow).where(Shadow.hospital == hospital, Shadow.version == digest)
    return AtHospital(
        hospital=hospital,
        name=name,
        acceptances=[
            _acceptance(session, store, row)
            for row in session.scalars(accepted.order_by(Acceptance.id.desc()).limit(MOST_ROWS))
        ],
        arrivals=arrivals_of(session, store, answered),
        alarms=[
            each for model, log in logs.items() for each in _alarms(session, hospital, model, log, digest)
        ],
        corrections=[
            each
            for model in models
            for each in corrections.summary(session, hospital, model)
            if each.version == digest
        ],
        shadows=[
            shadow.report(session, row, points=0)
            for row in session.scalars(unseen.order_by(Shadow.id.desc()).limit(MOST_ROWS))
        ],
        changes=[DecisionView.of(entry) for log in logs.values() for entry in _changes(log, digest)],
        plans=[
            PlanFacts.model_validate(row)
            for row in session.scalars(planned.order_by(ChangePlanRow.id.desc()).limit(MOST_ROWS))
        ],
    )


def _acceptance(session: Session, store: Store, row: Acceptance) -> CardAcceptance:
    job = session.get(Job, row.job)
    report: Mapping[str, Any] = {} if job is None or job.result is None else job.result["report"]
    labels = {label: AcceptedLabel.model_validate(own) for label, own in report.get("labels", {}).items()}
    facts = AcceptanceFacts.of(row, store).model_dump()
    return CardAcceptance(**facts, precision=row.precision, labels=labels)


def _changes(log: Sequence[Assignment], digest: str) -> list[Assignment]:
    """The entries of a version, and those that took its place, oldest first."""
    before = [None, *(entry.digest for entry in log)]
    return [entry for entry, last in zip(log, before, strict=False) if digest in (entry.digest, last)]


def _alarms(
    session: Session, hospital: str, model: str, log: Sequence[Assignment], digest: str
) -> list[AlarmFacts]:
    """Those that were raised while the version served."""
    ends = [*(entry.at for entry in log[1:]), datetime.max.replace(tzinfo=UTC)]
    spans = [
        and_(WatchEvent.at >= entry.at, WatchEvent.at < end)
        for entry, end in zip(log, ends, strict=True)
        if entry.digest == digest
    ]
    of = (WatchEvent.hospital == hospital, WatchEvent.model == model, WatchEvent.kind == "alarm")
    query = select(WatchEvent).where(*of, or_(*spans)).order_by(WatchEvent.id.desc()).limit(MOST_ROWS)
    return [AlarmFacts.model_validate(each) for each in session.scalars(query)]
