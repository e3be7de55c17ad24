"""Scans of viewers. Those that were kept without rows are deleted by the service: viewers send them again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "viewer_scan",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("share", sa.String(64), nullable=False),
        sa.Column("image", sa.JSON()),
        sa.Column("series", sa.JSON()),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("used_at", time, nullable=False),
        sa.Column("expires_at", time, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_viewer_scan"),
    )
    op.create_index("ix_viewer_scan_owner", "viewer_scan", ["owner"])
    op.create_index("ix_viewer_scan_expires_at", "viewer_scan", ["expires_at"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("viewer_scan")
