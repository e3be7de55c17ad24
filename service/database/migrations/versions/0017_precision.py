"""The precision of the graph that answers, in entries of the serving log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Every entry so far was served in float32."""
    op.add_column(
        "assignment", sa.Column("precision", sa.String(16), nullable=False, server_default="float32")
    )
    op.add_column("assignment", sa.Column("reduced", sa.String(71), nullable=True))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("assignment", "reduced")
    op.drop_column("assignment", "precision")
