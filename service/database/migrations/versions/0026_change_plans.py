"""Change plans, and signatures of what is outside them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. No model has a plan until somebody writes one."""

    def common() -> list[sa.Column[Any]]:
        return [
            sa.Column("id", sa.Integer(), nullable=False),
            sa.Column("hospital", sa.String(64), nullable=False),
            sa.Column("model", sa.String(200), nullable=False),
            sa.Column("actor", sa.String(300), nullable=False),
            sa.Column("reason", sa.Text(), nullable=False),
            sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        ]

    own: dict[str, sa.Column[Any]] = {
        "change_plan": sa.Column("plan", sa.JSON(none_as_null=True), nullable=True),
        "change_signature": sa.Column("version", sa.String(71), nullable=False),
    }
    for table, column in own.items():
        op.create_table(
            table,
            *common(),
            column,
            sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
            sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name=f"fk_{table}_hospital_hospital"),
        )
        op.create_index(f"ix_{table}_hospital_model_id", table, ["hospital", "model", "id"])


def downgrade() -> None:
    """Remove them, with what is in them."""
    for table in ("change_signature", "change_plan"):
        op.drop_table(table)
