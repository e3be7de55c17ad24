"""Masks of the scans of a cohort."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.database.models import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make room for one mask beside each scan."""
    op.create_table(
        "cohort_mask",
        sa.Column("scan", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("cohort", sa.String(32), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("label_values", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["scan"], ["cohort_scan.id"], name="fk_cohort_mask_scan_cohort_scan"),
        sa.ForeignKeyConstraint(["cohort"], ["cohort.id"], name="fk_cohort_mask_cohort_cohort"),
        sa.PrimaryKeyConstraint("scan", name="pk_cohort_mask"),
    )
    op.create_index("ix_cohort_mask_cohort", "cohort_mask", ["cohort"])


def downgrade() -> None:
    """Remove it; the masks' files are swept, since no row names them."""
    op.drop_table("cohort_mask")
