"""Devices of jobs and of workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; of what is there, any device."""
    for table in ("job", "worker"):
        op.add_column(table, sa.Column("device_class", sa.String(8), nullable=True))


def downgrade() -> None:
    """Remove them."""
    for table in ("job", "worker"):
        with op.batch_alter_table(table) as batch:
            batch.drop_column("device_class")
