"""Cohorts, jobs and their events; adapted versions in the serving log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.database.models import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables of long work."""
    op.add_column("assignment", sa.Column("artefact", sa.String(200), nullable=True))
    op.add_column(
        "assignment", sa.Column("override", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.create_table(
        "cohort",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("note", sa.String(200), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("deleted_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_cohort_hospital_hospital"),
        sa.PrimaryKeyConstraint("id", name="pk_cohort"),
    )
    op.create_index("ix_cohort_hospital", "cohort", ["hospital"])
    op.create_index("ix_cohort_expires_at", "cohort", ["expires_at"])
    op.create_table(
        "cohort_scan",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("cohort", sa.String(32), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["cohort"], ["cohort.id"], name="fk_cohort_scan_cohort_cohort"),
        sa.PrimaryKeyConstraint("id", name="pk_cohort_scan"),
        sa.UniqueConstraint("cohort", "name", name="uq_cohort_scan_cohort_name"),
    )
    _create_job()
    op.create_table(
        "job_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["job.id"], name="fk_job_event_job_job"),
        sa.PrimaryKeyConstraint("id", name="pk_job_event"),
        # An id that was given out once is never given out again, even if its event should be removed.
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_event_job_id", "job_event", ["job", "id"])


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=True),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("parent", sa.String(71), nullable=False),
        sa.Column("cohort", sa.String(32), nullable=True),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(200), nullable=True),
        sa.Column("lease_until", UtcDateTime(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("gate", sa.JSON(), nullable=True),
        sa.Column("candidate_name", sa.String(200), nullable=True),
        sa.Column("candidate_version", sa.Integer(), nullable=True),
        sa.Column("candidate_digest", sa.String(71), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.String(200), nullable=True),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.Column("request_id", sa.String(36), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("queued_at", UtcDateTime(), nullable=True),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_job_hospital_hospital"),
        sa.ForeignKeyConstraint(["cohort"], ["cohort.id"], name="fk_job_cohort_cohort"),
        sa.PrimaryKeyConstraint("id", name="pk_job"),
        sa.UniqueConstraint("hospital", "idempotency_key", name="uq_job_hospital_idempotency_key"),
    )
    op.create_index("ix_job_state_created_at", "job", ["state", "created_at"])
    op.create_index("ix_job_cohort", "job", ["cohort"])
    op.create_index("ix_job_expires_at", "job", ["expires_at"])


def downgrade() -> None:
    """Remove them, and everything in them; the files of cohorts and jobs stay."""
    for table in ("job_event", "job", "cohort_scan", "cohort"):
        op.drop_table(table)
    op.drop_column("assignment", "override")
    op.drop_column("assignment", "artefact")
