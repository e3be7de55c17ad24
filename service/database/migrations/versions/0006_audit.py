"""The audit trail."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from service.database.digest_chain import FIRST_PREVIOUS, digest_of
from service.database.migrations.append_only import let_checkpoints_delete, protect, release

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables, and begin the trail with a row that counts the assignments before it."""
    time = sa.DateTime(timezone=True)
    audit = op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("hospital", sa.String(64)),
        sa.Column("version", sa.String(71)),
        sa.Column("scan", sa.String(71)),
        sa.Column("outcome", sa.Integer(), nullable=False),
        sa.Column("request", sa.String(36)),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_table(
        "audit_checkpoint",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("upto", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("assignments", sa.Integer(), nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("seal", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_checkpoint"),
        sa.UniqueConstraint("upto", name="uq_audit_checkpoint_upto"),
    )
    now = datetime.now(UTC)
    before = op.get_bind().execute(sa.text("SELECT MAX(id) FROM assignment")).scalar() or 0
    content = {
        "id": 1,
        "at": now,
        "actor": "service",
        "action": "trail.begun",
        "hospital": None,
        "version": None,
        "scan": None,
        "outcome": 200,
        "request": None,
        "details": {"assignments": before},
        "previous": FIRST_PREVIOUS,
    }
    stored = now.replace(tzinfo=None) if op.get_bind().dialect.name == "sqlite" else now
    op.bulk_insert(audit, [{**content, "at": stored, "digest": digest_of(content)}])
    protect("audit")
    let_checkpoints_delete()
    protect("audit_checkpoint")


def downgrade() -> None:
    """Remove both tables, with what is in them."""
    release("audit_checkpoint")
    op.drop_table("audit_checkpoint")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER audit_no_delete ON audit")
        op.execute("DROP FUNCTION audit_is_kept()")
    release("audit")
    op.drop_table("audit")
