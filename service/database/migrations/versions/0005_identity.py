"""API keys, and the actor of a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of keys, and to jobs the caller that made them; unknown for earlier ones."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("hospital", sa.String(64)),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", time, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", time),
        sa.Column("revoked_at", time),
        sa.Column("last_used_at", time),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_api_key_hospital_hospital"),
        sa.PrimaryKeyConstraint("id", name="pk_api_key"),
    )
    op.create_index("ix_api_key_name", "api_key", ["name"])
    op.add_column("job", sa.Column("actor", sa.String(300)))


def downgrade() -> None:
    """Remove both."""
    op.drop_column("job", "actor")
    op.drop_table("api_key")
