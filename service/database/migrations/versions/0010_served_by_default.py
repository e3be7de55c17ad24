"""Entries of the serving log for what a hospital is served without a decision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Every entry so far was a decision."""
    op.add_column(
        "assignment", sa.Column("by_default", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_column("assignment", "by_default")
