"""How the scans of a hospital use the keys of a pool, day by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make room for one row per hospital, version and day."""
    op.create_table(
        "key_usage",
        sa.Column("hospital", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("scans", sa.Integer(), nullable=False),
        sa.Column("shares", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_key_usage_hospital_hospital"),
        sa.PrimaryKeyConstraint("hospital", "digest", "day", name="pk_key_usage"),
    )


def downgrade() -> None:
    """Forget it."""
    op.drop_table("key_usage")
