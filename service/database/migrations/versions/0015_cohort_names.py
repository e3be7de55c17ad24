"""Names of cohorts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a cohort has none until a person gives it one."""
    op.add_column("cohort", sa.Column("name", sa.String(200), nullable=True))


def downgrade() -> None:
    """Remove it."""
    op.drop_column("cohort", "name")
