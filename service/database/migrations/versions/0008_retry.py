"""Jobs that wait for another system: when they are tried again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.database.models import UtcDateTime

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the time of the next attempt."""
    op.add_column("job", sa.Column("retry_at", UtcDateTime(), nullable=True))


def downgrade() -> None:
    """Remove the time of the next attempt."""
    op.drop_column("job", "retry_at")
