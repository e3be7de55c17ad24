"""Answered masks that hospitals keep, and what each hospital chose."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. No hospital keeps masks until somebody says so."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "kept_answer",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("request", sa.String(36), nullable=False),
        sa.Column("mask", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kept_answer"),
        sa.UniqueConstraint("hospital", "request", "mask", name="uq_kept_answer_hospital_request_mask"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_kept_answer_hospital_hospital"),
    )
    op.create_index("ix_kept_answer_hospital_at", "kept_answer", ["hospital", "at"])
    op.create_table(
        "kept_answer_rule",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("days", sa.Integer(), nullable=True),
        sa.Column("quota_bytes", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kept_answer_rule"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_kept_answer_rule_hospital_hospital"),
    )
    op.create_index("ix_kept_answer_rule_hospital_id", "kept_answer_rule", ["hospital", "id"])


def downgrade() -> None:
    """Remove them. The masks stay in the files, below `answers`."""
    for table in ("kept_answer_rule", "kept_answer"):
        op.drop_table(table)
