"""Databases at the newest revision, without running the migrations for each.

They take 50 to 80 ms of a core, and tests begin with a new database hundreds of times. `upgrade` then finds
nothing to do; `tests/unit/service/database` migrates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import event

from service.database import Database, upgrade

# What the migrations of an empty database send to PostgreSQL, noted at the first of them.
_sent: list[tuple[str, Any]] = []


def begin_migrated(database: Database) -> None:
    """Make a new database what `upgrade` makes it; one that is there, or cannot be, is left alone."""
    file = database.file
    if file is not None:
        if file.parent.is_dir() and not file.exists():
            file.touch(mode=0o600)
            file.write_bytes(_migrated())
    elif not _sent:
        event.listen(database.engine, "before_cursor_execute", _note)
        try:
            upgrade(database)
        except BaseException:
            _sent.clear()
            raise
        finally:
            event.remove(database.engine, "before_cursor_execute", _note)
    else:
        with database.engine.begin() as connection:
            for statement, parameters in _sent:
                connection.exec_driver_sql(statement, parameters)


@cache
def _migrated() -> bytes:
    """The bytes of SQLite's file."""
    with TemporaryDirectory() as folder:
        made = Database(f"sqlite:///{Path(folder) / 'locum.db'}")
        upgrade(made)
        # What is in the log beside the file moves into it with the last connection.
        made.dispose()
        return (Path(folder) / "locum.db").read_bytes()


def _note(
    _connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
) -> None:
    if not statement.startswith("SELECT"):
        _sent.append((statement, parameters))
