"""Which answers a person looked at."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table. Earlier answers have no row."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "looked_at",
        sa.Column("observation", number, autoincrement=False, nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("observation", name="pk_looked_at"),
        sa.ForeignKeyConstraint(
            ["observation"],
            ["observation.id"],
            name="fk_looked_at_observation_observation",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    """Remove it, with what is in it."""
    op.drop_table("looked_at")
