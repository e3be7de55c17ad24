"""Whether a member's own model answers callers of other hospitals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no member has allowed it yet."""
    op.add_column(
        "hospital", sa.Column("shares_model", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_column("hospital", "shares_model")
