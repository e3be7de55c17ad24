"""Which workers run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "worker",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("started_at", time, nullable=False),
        sa.Column("seen_at", time, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_worker"),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("worker")
