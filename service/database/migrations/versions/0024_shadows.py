"""Versions that answer unseen, and how their answers compare."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    time = sa.DateTime(timezone=True)
    op.create_table(
        "shadow",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(71), nullable=False),
        sa.Column("artefact", sa.String(300), nullable=False),
        sa.Column("every", sa.Integer(), nullable=False),
        sa.Column("rule", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("looks", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("began", time, nullable=False),
        sa.Column("ended", time, nullable=True),
        sa.Column("ended_by", sa.String(300), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_shadow"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_shadow_hospital_hospital"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_shadow_hospital_model", "shadow", ["hospital", "model"])
    op.create_table(
        "shadow_answer",
        sa.Column("id", number, nullable=False),
        sa.Column("shadow", sa.Integer(), nullable=False),
        sa.Column("request", sa.String(36), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("served", sa.String(71), nullable=False),
        sa.Column("choice", sa.JSON(), nullable=False),
        sa.Column("served_shift", sa.Double(), nullable=True),
        sa.Column("shadow_shift", sa.Double(), nullable=True),
        sa.Column("exact", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_shadow_answer"),
        sa.UniqueConstraint("shadow", "request", name="uq_shadow_answer_shadow_request"),
        sa.ForeignKeyConstraint(["shadow"], ["shadow.id"], name="fk_shadow_answer_shadow_shadow"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_shadow_answer_request", "shadow_answer", ["request"])
    op.create_index("ix_shadow_answer_at", "shadow_answer", ["at"])
    op.create_table(
        "shadow_label",
        sa.Column("answer", number, autoincrement=False, nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("agreement", sa.Double(), nullable=True),
        sa.Column("served_voxels", sa.BigInteger(), nullable=False),
        sa.Column("shadow_voxels", sa.BigInteger(), nullable=False),
        sa.Column("served_ml", sa.Double(), nullable=True),
        sa.Column("shadow_ml", sa.Double(), nullable=True),
        sa.Column("served_confidence", sa.Double(), nullable=False),
        sa.Column("shadow_confidence", sa.Double(), nullable=False),
        sa.Column("served_dice", sa.Double(), nullable=True),
        sa.Column("shadow_dice", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("answer", "label", name="pk_shadow_label"),
        sa.ForeignKeyConstraint(
            ["answer"], ["shadow_answer.id"], name="fk_shadow_label_answer_shadow_answer", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    """Remove them, with what is in them."""
    for table in ("shadow_label", "shadow_answer", "shadow"):
        op.drop_table(table)
