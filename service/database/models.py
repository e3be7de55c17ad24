"""The tables, typed. Times are UTC; append-only tables are guarded by triggers (see the migrations)."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC. SQLite stores no time zone, so it is removed and restored here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse a naive time, which could mean any hour of the day."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: times in the database are aware and in UTC")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return an aware datetime in UTC, for every time zone of the server's session."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Names of constraints follow one rule, so that a later migration can address them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Hospital(Base):
    """A hospital that is served. One that took part in the federation names its site there.

    `shares_model`: whether the site's own model answers callers of other hospitals, too.
    """

    __tablename__ = "hospital"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    site: Mapped[str | None] = mapped_column(String(200))
    shares_model: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ApiKey(Base):
    """An API key: `digest` is its SHA-256 (64 hex digits). `hospital` null: every hospital."""

    __tablename__ = "api_key"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), index=True)
    role: Mapped[str] = mapped_column(String(16))
    hospital: Mapped[str | None] = mapped_column(ForeignKey("hospital.id"))
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(200))
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class BrowserSession(Base):
    """A browser that signed in. `digest` is one of its cookie; `key` the API key, if one was exchanged."""

    __tablename__ = "browser_session"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    actor: Mapped[str] = mapped_column(String(300))
    roles: Mapped[list[str]] = mapped_column(JSON)
    hospitals: Mapped[list[str] | None] = mapped_column(JSON)
    key: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Assignment(Base):
    """One entry of the serving log: from `at` on, this version of the model serves the hospital.

    Append-only. The entries of a (hospital, model) are numbered from 1; the number's uniqueness is what
    makes one of two concurrent writers lose. `previous` is the entry a rollback returns to, so that a
    rollback after a rollback goes one further back; `restores` is set on the entries that a rollback made.
    `artefact` names the version's artefact where that is not `model` itself but one adapted from it;
    `override` is set when a candidate that its gate refused was assigned all the same. `by_default` is set on
    an entry that no person decided: the newest version, when the hospital was first served. `precision` is
    that of the graph that answers; `reduced` is the digest of the version that has it, null for float32.
    """

    __tablename__ = "assignment"
    __table_args__ = (
        UniqueConstraint("hospital", "model", "sequence"),
        CheckConstraint("sequence >= 1", name="sequence_from_one"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    sequence: Mapped[int]
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(71))
    actor: Mapped[str] = mapped_column(String(200))
    reason: Mapped[str] = mapped_column(Text)
    previous: Mapped[int | None]
    restores: Mapped[int | None]
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    artefact: Mapped[str | None] = mapped_column(String(200))
    override: Mapped[bool] = mapped_column(default=False, server_default=false())
    by_default: Mapped[bool] = mapped_column(default=False, server_default=false())
    precision: Mapped[str] = mapped_column(String(16), default="float32", server_default="float32")
    reduced: Mapped[str | None] = mapped_column(String(71))


class AuditRow(Base):
    """One row of the audit trail, numbered from 1 without a gap; see `service.audit.trail`. Append-only.

    `scan` is the digest of a scan's bytes, `version` the digest of an artefact version, `outcome` the status
    of the answer, `request` its id. `previous` is the digest of the row before, `digest` this row's.
    """

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    actor: Mapped[str] = mapped_column(String(300))
    action: Mapped[str] = mapped_column(String(40))
    hospital: Mapped[str | None] = mapped_column(String(64))
    version: Mapped[str | None] = mapped_column(String(71))
    scan: Mapped[str | None] = mapped_column(String(71))
    outcome: Mapped[int]
    request: Mapped[str | None] = mapped_column(String(36))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    previous: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))


class AuditCheckpoint(Base):
    """The rows up to number `upto` were removed; the last had this `digest`. Append-only.

    `assignments` is the largest id of an assignment that they recorded, `previous` the seal of the checkpoint
    before, `seal` the digest of this one.
    """

    __tablename__ = "audit_checkpoint"

    id: Mapped[int] = mapped_column(primary_key=True)
    upto: Mapped[int] = mapped_column(unique=True)
    digest: Mapped[str] = mapped_column(String(64))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(300))
    assignments: Mapped[int]
    previous: Mapped[str] = mapped_column(String(64))
    seal: Mapped[str] = mapped_column(String(64))


class Observation(Base):
    """What is known of one answer, with no pixel and no name; see `service.observation`. Never changed.

    `model` is the name that hospitals are assigned versions of, `version` and `graph` are digests. `series`
    and `scan` are keyed digests, by which a correction finds its answer. `scanner` names the device: as the
    client said, else by the DICOM header, which `acquisition` repeats. `shift` is measured at `shift_at`.
    `usual`: whether the request left it to the service which network answers. `mask` is a keyed digest of the
    answer's voxels, and `choice` what makes the same answer again; both are null of older rows.
    """

    __tablename__ = "observation"
    __table_args__ = (
        Index("ix_observation_hospital_model_id", "hospital", "model", "id"),
        Index("ix_observation_hospital_version_id", "hospital", "version", "id"),
        Index("ix_observation_hospital_scan", "hospital", "scan"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    hospital: Mapped[str | None] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[str] = mapped_column(String(71))
    graph: Mapped[str] = mapped_column(String(71))
    request: Mapped[str] = mapped_column(String(36), index=True)
    way: Mapped[str] = mapped_column(String(16))
    actor: Mapped[str] = mapped_column(String(300))
    series: Mapped[str | None] = mapped_column(String(64))
    scan: Mapped[str] = mapped_column(String(64))
    scanner: Mapped[str | None] = mapped_column(String(200))
    acquisition: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    shift: Mapped[float | None]
    shift_at: Mapped[str | None] = mapped_column(String(16))
    size: Mapped[list[int]] = mapped_column(JSON)
    spacing: Mapped[list[float] | None] = mapped_column(JSON(none_as_null=True))
    unlike: Mapped[int]
    seconds: Mapped[float]
    warnings: Mapped[list[str]] = mapped_column(JSON)
    precision: Mapped[str] = mapped_column(String(16))
    provider: Mapped[str] = mapped_column(String(64))
    locum: Mapped[str] = mapped_column(String(32))
    usual: Mapped[bool]
    mask: Mapped[str | None] = mapped_column(String(64))
    choice: Mapped[dict[str, str | None] | None] = mapped_column(JSON(none_as_null=True))


class ObservedLabel(Base):
    """What is known of one label in an answer. Never changed.

    `confidence` is 0 to 1 (`service.inference.confidence`); `volume_ml` null without spacing. `parts` is the
    number of connected components, null where counting them would have taken long.
    """

    __tablename__ = "observed_label"

    observation: Mapped[int] = mapped_column(
        ForeignKey("observation.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    label: Mapped[str] = mapped_column(String(200), primary_key=True)
    confidence: Mapped[float]
    voxels: Mapped[int] = mapped_column(BigInteger)
    volume_ml: Mapped[float | None]
    parts: Mapped[int | None]
    at_border: Mapped[bool]


class LookedAt(Base):
    """That a person looked at the mask of an answer: the first one. Deleted with the observation."""

    __tablename__ = "looked_at"

    observation: Mapped[int] = mapped_column(
        ForeignKey("observation.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    actor: Mapped[str] = mapped_column(String(300))
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class Correction(Base):
    """The mask that a person made of an answer, or that it was right: one row per answer, the newest.

    Facts of the answer are repeated, since its observation may expire earlier. `accepted`: it was right as it
    was. `cohort` and `scan` (the name there) say where scan and mask are; null where the scan never came.
    `exact`: whether the answer that it was measured against has the voxels of the one that was served.
    `watched`: whether the watch has counted it.
    """

    __tablename__ = "correction"
    __table_args__ = (
        Index("ix_correction_hospital_model_id", "hospital", "model", "id"),
        Index("ix_correction_state_hospital_model", "state", "hospital", "model"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    observation: Mapped[int] = mapped_column(BigInteger, unique=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[str] = mapped_column(String(71))
    request: Mapped[str] = mapped_column(String(36), index=True)
    scanner: Mapped[str | None] = mapped_column(String(200))
    answered_at: Mapped[datetime] = mapped_column(UtcDateTime)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    way: Mapped[str] = mapped_column(String(16))
    actor: Mapped[str] = mapped_column(String(300))
    seconds: Mapped[float | None]
    note: Mapped[str | None] = mapped_column(String(200))
    accepted: Mapped[bool]
    mask: Mapped[str | None] = mapped_column(String(64))
    cohort: Mapped[str | None] = mapped_column(ForeignKey("cohort.id"))
    scan: Mapped[str | None] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    exact: Mapped[bool | None]
    watched: Mapped[bool] = mapped_column(default=False)


class CorrectedLabel(Base):
    """What a person changed of one label; null where there is nothing to measure (`service.corrections`)."""

    __tablename__ = "corrected_label"

    correction: Mapped[int] = mapped_column(
        ForeignKey("correction.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    label: Mapped[str] = mapped_column(String(200), primary_key=True)
    dice: Mapped[float | None]
    surface_dice: Mapped[float | None]
    hd95: Mapped[float | None]
    added_voxels: Mapped[int] = mapped_column(BigInteger)
    removed_voxels: Mapped[int] = mapped_column(BigInteger)
    added_ml: Mapped[float | None]
    removed_ml: Mapped[float | None]


class KeptAnswer(Base):
    """An answered mask that is kept; see `service.corrections.kept_answers`.

    `mask` is the digest that the answer's observation has, `size` the bytes of all its files.
    """

    __tablename__ = "kept_answer"
    __table_args__ = (
        UniqueConstraint("hospital", "request", "mask"),
        Index("ix_kept_answer_hospital_at", "hospital", "at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    request: Mapped[str] = mapped_column(String(36))
    mask: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class KeptAnswerRule(Base):
    """For how many days, and in how many bytes, a hospital keeps answered masks; the newest row counts.

    `days` is null where it keeps none.
    """

    __tablename__ = "kept_answer_rule"
    __table_args__ = (Index("ix_kept_answer_rule_hospital_id", "hospital", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    days: Mapped[int | None]
    quota_bytes: Mapped[int] = mapped_column(BigInteger)
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class Shadow(Base):
    """A version that answers a hospital's scans unseen, beside the one that serves; see `service.shadow`.

    `version` is its digest, `artefact` its `name@version`. `rule` says when it is assigned without a person,
    and `looks` how often that was looked at.
    """

    __tablename__ = "shadow"
    __table_args__ = (Index("ix_shadow_hospital_model", "hospital", "model"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[str] = mapped_column(String(71))
    artefact: Mapped[str] = mapped_column(String(300))
    every: Mapped[int]
    rule: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    looks: Mapped[int] = mapped_column(default=0)
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    began: Mapped[datetime] = mapped_column(UtcDateTime)
    ended: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_by: Mapped[str | None] = mapped_column(String(300))


class ShadowAnswer(Base):
    """A scan that both versions answered. `served` is the digest of the other; `choice` makes the shadow's
    answer again. `exact`: the served answer was made again to the voxel.
    """

    __tablename__ = "shadow_answer"
    __table_args__ = (UniqueConstraint("shadow", "request"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    shadow: Mapped[int] = mapped_column(ForeignKey("shadow.id"))
    request: Mapped[str] = mapped_column(String(36), index=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    served: Mapped[str] = mapped_column(String(71))
    choice: Mapped[dict[str, Any]] = mapped_column(JSON)
    served_shift: Mapped[float | None]
    shadow_shift: Mapped[float | None]
    exact: Mapped[bool]


class ShadowLabel(Base):
    """One label by both versions; `served_dice` and `shadow_dice` are with a person's correction."""

    __tablename__ = "shadow_label"

    answer: Mapped[int] = mapped_column(
        ForeignKey("shadow_answer.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    label: Mapped[str] = mapped_column(String(200), primary_key=True)
    agreement: Mapped[float | None]
    served_voxels: Mapped[int] = mapped_column(BigInteger)
    shadow_voxels: Mapped[int] = mapped_column(BigInteger)
    served_ml: Mapped[float | None]
    shadow_ml: Mapped[float | None]
    served_confidence: Mapped[float]
    shadow_confidence: Mapped[float]
    served_dice: Mapped[float | None]
    shadow_dice: Mapped[float | None]


class Watch(Base):
    """The watch of one scanner's answers by one model at a hospital; see `service.watch`.

    `scanner` is "" where none is known. `began` is when the series began, with answer `version`; `answers`
    are those since. `day` is the last day of which `today` counts the arrivals. `streams` and `usual` are
    what the sums need to go on; `state` is routine, watch or investigate, the last since `since`.
    """

    __tablename__ = "watch"

    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"), primary_key=True)
    model: Mapped[str] = mapped_column(String(200), primary_key=True)
    scanner: Mapped[str] = mapped_column(String(200), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    version: Mapped[str] = mapped_column(String(71))
    software: Mapped[str] = mapped_column(String(64))
    locum: Mapped[str] = mapped_column(String(32))
    began: Mapped[datetime] = mapped_column(UtcDateTime)
    answers: Mapped[int]
    last_at: Mapped[datetime] = mapped_column(UtcDateTime)
    day: Mapped[date] = mapped_column(Date)
    today: Mapped[int]
    arrivals: Mapped[dict[str, Any]] = mapped_column(JSON)
    streams: Mapped[dict[str, Any]] = mapped_column(JSON)
    usual: Mapped[bytes] = mapped_column(LargeBinary)


class WatchEvent(Base):
    """An alarm, or a change beside which alarms are read: of version, of the scanner's software, of Locum.

    `kind` is alarm, version, software or locum. An alarm has its `stream`, the answer at which it was raised,
    and since when; `answered_at` is when a person answered it.
    """

    __tablename__ = "watch_event"
    __table_args__ = (Index("ix_watch_event_hospital_model_id", "hospital", "model", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    scanner: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(16))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    stream: Mapped[str | None] = mapped_column(String(240))
    observation: Mapped[int | None] = mapped_column(BigInteger)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    answered_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    answered_by: Mapped[str | None] = mapped_column(String(300))
    reason: Mapped[str | None] = mapped_column(Text)


class WatchRule(Base):
    """What an approver set for a hospital and model; the newest row counts.

    `months` between false alarms, and what happens at `investigate`: warn, global or hold.
    """

    __tablename__ = "watch_rule"
    __table_args__ = (Index("ix_watch_rule_hospital_model_id", "hospital", "model", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    months: Mapped[float]
    stop: Mapped[str] = mapped_column(String(8))
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class Acceptance(Base):
    """What a person decided on the report of an acceptance; see `service.acceptance`. Rows are only added.

    `job` measured, `digest` is of its report and `verdict` what that says. `version` is a digest, `precision`
    that of the graph that was measured. `override`: accepted against the verdict.
    """

    __tablename__ = "acceptance"
    __table_args__ = (Index("ix_acceptance_hospital_version_id", "hospital", "version", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(String(32))
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[str] = mapped_column(String(71))
    precision: Mapped[str] = mapped_column(String(16))
    verdict: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(71))
    accepted: Mapped[bool]
    override: Mapped[bool]
    measured_by: Mapped[str] = mapped_column(String(300))
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class AcceptanceRule(Base):
    """Whether a hospital demands an acceptance before an assignment; the newest row counts."""

    __tablename__ = "acceptance_rule"
    __table_args__ = (Index("ix_acceptance_rule_hospital_id", "hospital", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    demanded: Mapped[bool]
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class ChangePlanRow(Base):
    """A change plan of a hospital's model (`service.change_plan`); the newest row counts. Null ends it."""

    __tablename__ = "change_plan"
    __table_args__ = (Index("ix_change_plan_hospital_model_id", "hospital", "model", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    plan: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class ChangeSignature(Base):
    """The first of two signatures under an assignment outside the change plan."""

    __tablename__ = "change_signature"
    __table_args__ = (Index("ix_change_signature_hospital_model_id", "hospital", "model", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[str] = mapped_column(String(71))
    actor: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class WatchMessage(Base):
    """A message on an alarm to one webhook that has not received it yet; see `service.watch.messages`.

    `id` is its `webhook-id`, `address` the SHA-256 of the URL, and `body` the JSON that is sent at `due`.
    """

    __tablename__ = "watch_message"
    __table_args__ = (Index("ix_watch_message_address_due", "address", "due"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    address: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    due: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int]


class WatchCursor(Base):
    """The last observation that was watched: one row."""

    __tablename__ = "watch_cursor"

    id: Mapped[int] = mapped_column(primary_key=True)
    last: Mapped[int] = mapped_column(BigInteger)


class Secret(Base):
    """A random value of this installation, made by the migration that added its use."""

    __tablename__ = "secret"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary(32))


class KeyUsage(Base):
    """How a hospital's scans of one day (UTC) used the keys of one version of a pool.

    `shares` has for every entry the sum over the `scans` of its share among a scan's picks. Nothing says
    which scan it was.
    """

    __tablename__ = "key_usage"

    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(String(71), primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    model: Mapped[str] = mapped_column(String(200))
    version: Mapped[int]
    scans: Mapped[int]
    shares: Mapped[list[float]] = mapped_column(JSON)


class Verification(Base):
    """One pass over the store in which every file of every version was hashed again.

    Written at its end: a pass that was killed leaves no row. `damaged` maps a reference to what is wrong
    with it.
    """

    __tablename__ = "verification"

    id: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    versions: Mapped[int]
    damaged: Mapped[dict[str, str]] = mapped_column(JSON)


class Cohort(Base):
    """Scans that a hospital uploaded for jobs. The row stays after their deletion at `deleted_at`.

    `corrections_of` is the model of a cohort of corrections, which the service fills. `may_train`: whether a
    job may learn from it.
    """

    __tablename__ = "cohort"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"), index=True)
    name: Mapped[str | None] = mapped_column(String(200))
    note: Mapped[str | None] = mapped_column(String(200))
    corrections_of: Mapped[str | None] = mapped_column(String(200))
    may_train: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class CohortScan(Base):
    """One scan. Its file is called by `sha256` (64 hex digits); `name` is the client's and never a path."""

    __tablename__ = "cohort_scan"
    __table_args__ = (UniqueConstraint("cohort", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    cohort: Mapped[str] = mapped_column(ForeignKey("cohort.id"))
    name: Mapped[str] = mapped_column(String(200))
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    format: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class CohortMask(Base):
    """The mask of one scan, drawn by the hospital; its file is beside the scan's, called by `sha256`.

    `label_values` are the values that occur in it, ascending.
    """

    __tablename__ = "cohort_mask"

    scan: Mapped[int] = mapped_column(ForeignKey("cohort_scan.id"), primary_key=True, autoincrement=False)
    cohort: Mapped[str] = mapped_column(ForeignKey("cohort.id"), index=True)
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    format: Mapped[str] = mapped_column(String(16))
    label_values: Mapped[list[int]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ViewerScanRow(Base):
    """A scan that a viewer sent, see `service.viewers.scans`.

    `owner` and `share` are digests: of the caller, and of what shares the quota with it. `image` is the
    viewer's own name, `series` what the scan's header says: JSON, since PostgreSQL takes no NUL in a text.
    """

    __tablename__ = "viewer_scan"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64), index=True)
    share: Mapped[str] = mapped_column(String(64))
    image: Mapped[str | None] = mapped_column(JSON(none_as_null=True))
    series: Mapped[str | None] = mapped_column(JSON(none_as_null=True))
    format: Mapped[str] = mapped_column(String(16))
    sha256: Mapped[str] = mapped_column(String(71))
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    used_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class Job(Base):
    """Long work that was accepted. This row, not the message in Redis, is the job.

    `token` is the fencing token: it grows with every claim, and a worker with another token than the row's
    may not write. `actor` is the caller that made the job. `queued_at` is when a message was last sent; null
    when one has to be sent at once. A job that waits for another system is not claimed before `retry_at`.
    `model` and `parent` are empty for a job that needs no model. `input_bytes` is the size of the scan that a
    job on one scan began with. `device_class` is `cpu` or `cuda` where only workers of that class take it.
    """

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("hospital", "idempotency_key"),
        Index("ix_job_state_created_at", "state", "created_at"),
        Index("ix_job_created_at_id", "created_at", "id"),
        Index("ix_job_hospital_created_at", "hospital", "created_at"),
        Index("ix_job_kind_state", "kind", "state"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    hospital: Mapped[str | None] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    parent: Mapped[str] = mapped_column(String(71))
    cohort: Mapped[str | None] = mapped_column(ForeignKey("cohort.id"), index=True)
    input_bytes: Mapped[int | None] = mapped_column(BigInteger)
    device_class: Mapped[str | None] = mapped_column(String(8))
    options: Mapped[dict[str, Any]] = mapped_column(JSON)

    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int] = mapped_column(default=0)
    token: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None] = mapped_column(String(200))
    lease_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancel_requested: Mapped[bool] = mapped_column(default=False, server_default=false())

    progress: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    gate: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    candidate_name: Mapped[str | None] = mapped_column(String(200))
    candidate_version: Mapped[int | None]
    candidate_digest: Mapped[str | None] = mapped_column(String(71), index=True)
    reason: Mapped[str | None] = mapped_column(Text)

    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(36))
    actor: Mapped[str | None] = mapped_column(String(300))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    queued_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    retry_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime, index=True)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class Worker(Base):
    """A worker process, by host and process id, until it ends; see `service.jobs.presence`.

    `device_class` says where its jobs compute: `cpu` or `cuda`.
    """

    __tablename__ = "worker"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    device_class: Mapped[str | None] = mapped_column(String(8))


class JobEvent(Base):
    """An event of a job. Ids grow within a job, so that a reader can resume after one."""

    __tablename__ = "job_event"
    __table_args__ = (Index("ix_job_event_job_id", "job", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("job.id"))
    type: Mapped[str] = mapped_column(String(16))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
