"""What was decided on acceptances, and which hospitals demand one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. No hospital demands one until somebody says so."""
    op.create_table(
        "acceptance",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(71), nullable=False),
        sa.Column("precision", sa.String(16), nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("override", sa.Boolean(), nullable=False),
        sa.Column("measured_by", sa.String(300), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_acceptance"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_acceptance_hospital_hospital"),
    )
    op.create_index("ix_acceptance_hospital_version_id", "acceptance", ["hospital", "version", "id"])
    op.create_table(
        "acceptance_rule",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("demanded", sa.Boolean(), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_acceptance_rule"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_acceptance_rule_hospital_hospital"),
    )
    op.create_index("ix_acceptance_rule_hospital_id", "acceptance_rule", ["hospital", "id"])


def downgrade() -> None:
    """Remove them, with what is in them."""
    for table in ("acceptance_rule", "acceptance"):
        op.drop_table(table)
