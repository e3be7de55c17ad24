"""`python -m service audit`, as a person types it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from service.__main__ import app


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["--state-dir", str(state), *words])


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A trail of three rows: its first, and one per key."""
    for name in ("first", "second"):
        assert run(tmp_path, "keys", "create", name, "--role", "admin").exit_code == 0
    return tmp_path


def test_verification_prints_the_head_that_a_later_one_expects(state: Path) -> None:
    found = run(state, "audit", "verify")
    assert (found.exit_code, "3 rows in order" in found.stderr) == (0, True)
    head = found.stdout.strip()
    assert run(state, "audit", "verify", "--expect", head).exit_code == 0
    forged = f"{head[:-1]}{'0' if head[-1] != '0' else '1'}"
    rewritten = run(state, "audit", "verify", "--expect", forged)
    assert (rewritten.exit_code, "row 3 has another digest than was noted" in rewritten.stderr) == (1, True)
    assert run(state, "audit", "verify", "--expect", "3").exit_code == 2


def test_changed_row_ends_verification_with_its_number(state: Path) -> None:
    with sqlite3.connect(state / "locum.db") as connection:
        connection.execute("DROP TRIGGER audit_no_update")
        connection.execute("UPDATE audit SET actor = 'x' WHERE id = 2")
    found = run(state, "audit", "verify")
    assert (found.exit_code, "row 2 (key.created" in found.stderr) == (1, True)
    assert run(state, "audit", "remove", "--before", "2100-01-01").exit_code == 1


def test_export_has_every_row_in_both_formats(state: Path) -> None:
    lines = run(state, "audit", "export").stdout.splitlines()
    assert [json.loads(line)["action"] for line in lines] == ["trail.begun", "key.created", "key.created"]
    messages = run(state, "audit", "export", "--format", "dicom", "--since", "2").stdout.splitlines()
    assert [message[:14] for message in messages] == ["<AuditMessage>"] * 2


def test_removed_rows_leave_a_trail_that_verifies(state: Path) -> None:
    removed = run(state, "audit", "remove", "--before", "2100-01-01")
    assert (removed.exit_code, "2 rows are removed so far, 2 left" in removed.stderr) == (0, True)
    noted, last = removed.stdout.splitlines()
    assert (noted.split(":")[0], run(state, "audit", "verify").stdout) == ("2", f"{last}\n")
    assert run(state, "audit", "verify", "--expect", noted).exit_code == 0
    assert "no row is that old" in run(state, "audit", "remove", "--before", "2000-01-01").stderr


def test_noted_row_that_was_removed_ends_verification_with_a_status_of_its_own(state: Path) -> None:
    assert run(state, "audit", "remove", "--before", "2100-01-01").exit_code == 0
    found = run(state, "audit", "verify", "--expect", f"1:{'a' * 64}")
    assert (found.exit_code, "row 1 was removed, so its noted digest" in found.stderr) == (3, True)
    assert found.stdout == ""
    found = run(state, "audit", "verify", "--expect", f"2:{'a' * 64}")
    assert (found.exit_code, "the checkpoint at row 2 has another digest" in found.stderr) == (1, True)
