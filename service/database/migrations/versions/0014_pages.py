"""Indexes for pages of jobs, for the counts of jobs, and for the job behind a version."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_INDEXES = {
    "ix_job_created_at_id": ["created_at", "id"],
    "ix_job_hospital_created_at": ["hospital", "created_at"],
    "ix_job_kind_state": ["kind", "state"],
    "ix_job_finished_at": ["finished_at"],
    "ix_job_candidate_digest": ["candidate_digest"],
}


def upgrade() -> None:
    """Add the indexes."""
    for name, columns in _INDEXES.items():
        op.create_index(name, "job", columns)


def downgrade() -> None:
    """Remove them."""
    for name in _INDEXES:
        op.drop_index(name, "job")
