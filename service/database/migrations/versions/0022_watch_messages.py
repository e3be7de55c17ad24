"""Messages on alarms that webhooks have not received yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table. Alarms from before are not sent."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "watch_message",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("due", time, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_watch_message"),
    )
    op.create_index("ix_watch_message_address_due", "watch_message", ["address", "due"])
    op.create_index("ix_watch_message_created_at", "watch_message", ["created_at"])


def downgrade() -> None:
    """Remove it, with what was not sent."""
    op.drop_table("watch_message")
