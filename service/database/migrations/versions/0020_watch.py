"""The watch over the observations of every hospital and model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. What was observed before is watched, too: the cursor begins at 0."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "watch",
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("scanner", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since", time),
        sa.Column("version", sa.String(71), nullable=False),
        sa.Column("software", sa.String(64), nullable=False),
        sa.Column("locum", sa.String(32), nullable=False),
        sa.Column("began", time, nullable=False),
        sa.Column("answers", sa.Integer(), nullable=False),
        sa.Column("last_at", time, nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("today", sa.Integer(), nullable=False),
        sa.Column("arrivals", sa.JSON(), nullable=False),
        sa.Column("streams", sa.JSON(), nullable=False),
        sa.Column("usual", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hospital", "model", "scanner", name="pk_watch"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_watch_hospital_hospital"),
    )
    op.create_table(
        "watch_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("scanner", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("since", time),
        sa.Column("stream", sa.String(240)),
        sa.Column("observation", sa.BigInteger()),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("answered_at", time),
        sa.Column("answered_by", sa.String(300)),
        sa.Column("reason", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_watch_event"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_watch_event_hospital_hospital"),
    )
    op.create_index("ix_watch_event_hospital_model_id", "watch_event", ["hospital", "model", "id"])
    op.create_table(
        "watch_rule",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("months", sa.Double(), nullable=False),
        sa.Column("stop", sa.String(8), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_watch_rule"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_watch_rule_hospital_hospital"),
    )
    op.create_index("ix_watch_rule_hospital_model_id", "watch_rule", ["hospital", "model", "id"])
    cursor = op.create_table(
        "watch_cursor",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_watch_cursor"),
    )
    op.bulk_insert(cursor, [{"id": 1, "last": 0}])


def downgrade() -> None:
    """Remove them, with what is in them."""
    for table in ("watch_cursor", "watch_rule", "watch_event", "watch"):
        op.drop_table(table)
