"""Corrections of answers, and what finds the answer that is corrected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. Earlier answers can be corrected, and are not compared voxel by voxel."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    time = sa.DateTime(timezone=True)
    op.add_column("observation", sa.Column("mask", sa.String(64), nullable=True))
    op.add_column("observation", sa.Column("choice", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("cohort", sa.Column("corrections_of", sa.String(200), nullable=True))
    op.add_column("cohort", sa.Column("may_train", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.create_table(
        "correction",
        sa.Column("id", number, nullable=False),
        sa.Column("observation", sa.BigInteger(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(71), nullable=False),
        sa.Column("request", sa.String(36), nullable=False),
        sa.Column("scanner", sa.String(200), nullable=True),
        sa.Column("answered_at", time, nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("way", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("note", sa.String(200), nullable=True),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("mask", sa.String(64), nullable=True),
        sa.Column("cohort", sa.String(32), nullable=True),
        sa.Column("scan", sa.String(200), nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("exact", sa.Boolean(), nullable=True),
        sa.Column("watched", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_correction"),
        sa.UniqueConstraint("observation", name="uq_correction_observation"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_correction_hospital_hospital"),
        sa.ForeignKeyConstraint(["cohort"], ["cohort.id"], name="fk_correction_cohort_cohort"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_correction_at", "correction", ["at"])
    op.create_index("ix_correction_request", "correction", ["request"])
    op.create_index("ix_correction_hospital_model_id", "correction", ["hospital", "model", "id"])
    op.create_index("ix_correction_state_hospital_model", "correction", ["state", "hospital", "model"])
    op.create_table(
        "corrected_label",
        sa.Column("correction", number, autoincrement=False, nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("dice", sa.Double(), nullable=True),
        sa.Column("surface_dice", sa.Double(), nullable=True),
        sa.Column("hd95", sa.Double(), nullable=True),
        sa.Column("added_voxels", sa.BigInteger(), nullable=False),
        sa.Column("removed_voxels", sa.BigInteger(), nullable=False),
        sa.Column("added_ml", sa.Double(), nullable=True),
        sa.Column("removed_ml", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("correction", "label", name="pk_corrected_label"),
        sa.ForeignKeyConstraint(
            ["correction"],
            ["correction.id"],
            name="fk_corrected_label_correction_correction",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    """Remove them, with what is in them; the scans and masks stay in their cohorts."""
    op.drop_table("corrected_label")
    op.drop_table("correction")
    for table, column in (
        ("cohort", "may_train"),
        ("cohort", "corrections_of"),
        ("observation", "choice"),
        ("observation", "mask"),
    ):
        op.drop_column(table, column)
