"""Hospitals, the serving log, and the record of verifications."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.database.migrations.append_only import protect, release
from service.database.models import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "hospital",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("site", sa.String(200), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hospital"),
    )
    op.create_table(
        "assignment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("previous", sa.Integer(), nullable=True),
        sa.Column("restores", sa.Integer(), nullable=True),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("sequence >= 1", name="ck_assignment_sequence_from_one"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_assignment_hospital_hospital"),
        sa.PrimaryKeyConstraint("id", name="pk_assignment"),
        sa.UniqueConstraint("hospital", "model", "sequence", name="uq_assignment_hospital_model_sequence"),
    )
    protect("assignment")
    op.create_table(
        "verification",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=False),
        sa.Column("versions", sa.Integer(), nullable=False),
        sa.Column("damaged", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_verification"),
    )
    op.create_index("ix_verification_finished_at", "verification", ["finished_at"])


def downgrade() -> None:
    """Remove them, and everything in them."""
    op.drop_index("ix_verification_finished_at", "verification")
    op.drop_table("verification")
    release("assignment")
    op.drop_table("assignment")
    op.drop_table("hospital")
