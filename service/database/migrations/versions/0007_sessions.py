"""Sessions of browsers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "browser_session",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("hospitals", sa.JSON()),
        sa.Column("key", sa.String(12)),
        sa.Column("expires_at", time, nullable=False),
        sa.ForeignKeyConstraint(["key"], ["api_key.id"], name="fk_browser_session_key_api_key"),
        sa.PrimaryKeyConstraint("digest", name="pk_browser_session"),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("browser_session")
