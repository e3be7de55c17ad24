"""Triggers that refuse to change or remove what was once written, so that not even a slip in the code can."""

from __future__ import annotations

from alembic import op


def protect(table: str, *unique: str) -> None:
    """Make a table append-only: UPDATE, DELETE, TRUNCATE and a replacing INSERT fail and say so.

    `unique` names the columns of the table's natural key.
    """
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{table} is append-only: % refused', TG_OP "
            "USING ERRCODE = 'integrity_constraint_violation'; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_append_only()"
        )
        return
    for event in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{event.lower()} BEFORE {event} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: {event} refused'); END"
        )
    # SQLite's INSERT OR REPLACE removes the old row without firing the trigger above, on a connection that
    # did not ask for recursive triggers.
    same = " AND ".join(f"{column} = NEW.{column}" for column in unique)
    op.execute(
        f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
        f"WHEN EXISTS (SELECT 1 FROM {table} WHERE ({same}) OR id = NEW.id) "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: REPLACE refused'); END"
    )


def release(table: str) -> None:
    """Undo `protect`, for a downgrade."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
        op.execute(f"DROP FUNCTION {table}_is_append_only()")
        return
    for name in ("update", "delete", "replace"):
        op.execute(f"DROP TRIGGER {table}_no_{name}")
