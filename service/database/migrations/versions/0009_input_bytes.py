"""The size of the scan that a job began with: the quota is counted without a look at the files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Scans that wait at this moment count nothing."""
    op.add_column("job", sa.Column("input_bytes", sa.BigInteger()))


def downgrade() -> None:
    """Remove it."""
    op.drop_column("job", "input_bytes")
