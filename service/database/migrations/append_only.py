"""Triggers that refuse to change or remove what was once written, so that not even a slip in the code can.

Alembic is imported by what migrates: every verification reads the triggers without it.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

# Table -> the columns of its natural key.
_PROTECTED = {
    "assignment": ("hospital", "model", "sequence"),
    "audit": ("id",),
    "audit_checkpoint": ("upto",),
}
# What is observed of answers expires, and is never changed.
_UNCHANGED = ("observation", "observed_label")
# Rows of the audit trail up to the last checkpoint may go.
_KEPT = "OLD.id > COALESCE((SELECT MAX(upto) FROM audit_checkpoint), 0)"


def protect(table: str) -> None:
    """Make a table append-only: UPDATE, DELETE, TRUNCATE and a replacing INSERT fail and say so."""
    from alembic import op

    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            f"$${_refusing(table)}$$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_append_only()"
        )
        return
    for statement in _sqlite_triggers(table).values():
        op.execute(statement)


def forbid_changes(table: str) -> None:
    """Make UPDATE of a table fail. Its rows may go: what was observed expires."""
    from alembic import op

    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE FUNCTION {table}_is_never_changed() RETURNS trigger LANGUAGE plpgsql AS "
            f"$${_refusing(table)}$$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_never_changed()"
        )
        return
    op.execute(_sqlite_update(table))


def release(table: str) -> None:
    """Undo `protect`, for a downgrade."""
    from alembic import op

    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
        op.execute(f"DROP FUNCTION {table}_is_append_only()")
        return
    for name in _sqlite_triggers(table):
        op.execute(f"DROP TRIGGER {name}")


def let_checkpoints_delete() -> None:
    """Replace the guard of the audit trail against deletion: rows up to the last checkpoint may go."""
    from alembic import op

    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER audit_append_only ON audit")
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
        )
        op.execute(f"CREATE FUNCTION audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS $${_keeping()}$$")
        op.execute(
            "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit "
            "FOR EACH ROW EXECUTE FUNCTION audit_is_kept()"
        )
        return
    op.execute("DROP TRIGGER audit_no_delete")
    op.execute(_sqlite_deletion("audit", f"WHEN {_KEPT} "))


def missing_guards(session: Session) -> list[str]:
    """The triggers of the migrated database that are missing, switched off, or not what they were."""
    if session.get_bind().dialect.name == "postgresql":
        expected = {f"{table}_append_only": _refusing(table) for table in _PROTECTED}
        expected["audit_no_delete"] = _keeping()
        expected |= {f"{table}_no_update": _refusing(table) for table in _UNCHANGED}
        query = (
            "SELECT tgname, prosrc FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid "
            "JOIN pg_proc ON pg_proc.oid = tgfoid "
            "WHERE pg_table_is_visible(pg_class.oid) AND tgenabled IN ('O', 'A') AND tgqual IS NULL"
        )
    else:
        expected = {name: each for table in _PROTECTED for name, each in _sqlite_triggers(table).items()}
        expected["audit_no_delete"] = _sqlite_deletion("audit", f"WHEN {_KEPT} ")
        expected |= {f"{table}_no_update": _sqlite_update(table) for table in _UNCHANGED}
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
    found = {row[0]: row[1] for row in session.execute(text(query))}
    return sorted(name for name, definition in expected.items() if found.get(name) != definition)


def _sqlite_triggers(table: str) -> dict[str, str]:
    # SQLite's INSERT OR REPLACE removes the old row without firing the trigger against deletion, on a
    # connection that did not ask for recursive triggers.
    same = " AND ".join(f"{column} = NEW.{column}" for column in _PROTECTED[table])
    return {
        f"{table}_no_update": _sqlite_update(table),
        f"{table}_no_delete": _sqlite_deletion(table),
        f"{table}_no_replace": f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
        f"WHEN EXISTS (SELECT 1 FROM {table} WHERE ({same}) OR id = NEW.id) "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: REPLACE refused'); END",
    }


def _sqlite_update(table: str) -> str:
    return (
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: UPDATE refused'); END"
    )


def _sqlite_deletion(table: str, condition: str = "") -> str:
    return (
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {condition}"
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only: DELETE refused'); END"
    )


def _refusing(table: str) -> str:
    """The body of the function that PostgreSQL's triggers of this table call."""
    return (
        f" BEGIN RAISE EXCEPTION '{table} is append-only: % refused', TG_OP "
        "USING ERRCODE = 'integrity_constraint_violation'; END "
    )


def _keeping() -> str:
    return (
        f" BEGIN IF {_KEPT} THEN RAISE EXCEPTION 'audit is append-only: DELETE refused' "
        "USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END "
    )
