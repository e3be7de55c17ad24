"""Actors of API keys with their hospital, as names of keys are unique in a hospital alone.

Rows of the audit trail and of the serving log keep the actors that they were written with.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rename `key:NAME` of a hospital's key to `key:NAME@HOSPITAL`. So far each name had one hospital."""
    for plain, bound in _actors():
        _rename(plain, bound)


def downgrade() -> None:
    """Take the hospitals away."""
    for plain, bound in _actors():
        _rename(bound, plain)


def _actors() -> list[tuple[str, str]]:
    query = sa.text("SELECT DISTINCT name, hospital FROM api_key WHERE hospital IS NOT NULL")
    return [(f"key:{name}", f"key:{name}@{hospital}") for name, hospital in op.get_bind().execute(query)]


def _rename(old: str, new: str) -> None:
    for table, column in (("job", "actor"), ("api_key", "created_by")):
        statement = sa.text(f"UPDATE {table} SET {column} = :new WHERE {column} = :old")
        op.get_bind().execute(statement, {"new": new, "old": old})
