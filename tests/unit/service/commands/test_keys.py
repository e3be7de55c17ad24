"""`python -m service keys`, as a person types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from service.__main__ import app
from service.database import Database
from service.identity import keys


@pytest.fixture
def run(tmp_path: Path):  # type: ignore[no-untyped-def]
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(app, ["--state-dir", str(tmp_path), "keys", *words])

    return invoke


def test_first_key_is_created_with_one_command(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = run("create", "first", "--role", "admin")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    with Database(f"sqlite:///{tmp_path}/locum.db").read() as session:
        caller = keys.caller_with(keys.find(session, key))
    assert (caller.actor, caller.hospitals, caller.has("approver")) == ("key:first", None, True)


def test_keys_are_listed_rotated_and_revoked(run) -> None:  # type: ignore[no-untyped-def]
    first = run("create", "first", "--role", "reader", "--days", "30").stdout.strip()
    second = run("rotate", first, "--overlap-hours", "0").stdout.strip()
    assert run("revoke", second[6:18]).exit_code == 0
    listed = run("list").stdout
    assert [first[6:18] in listed, second[6:18] in listed] == [True, True]
    assert listed.count("expired") == listed.count("revoked") == 1
    assert not {first, second} & set(listed.split())


def test_unknown_key_and_role_end_with_a_line(run) -> None:  # type: ignore[no-untyped-def]
    unknown = run("revoke", "0" * 12)
    assert (unknown.exit_code, "no key '000000000000'" in unknown.stderr) == (1, True)
    assert run("create", "x", "--role", "emperor").exit_code == 2


def test_name_is_held_to_the_rule_of_the_route(run) -> None:  # type: ignore[no-untyped-def]
    for name, expected in (
        ("n" * 131, "130 characters"),
        ("a\x1b[2J", "control characters"),
        (" ", "1 char"),
    ):
        ended = run("create", name, "--role", "reader")
        assert (ended.exit_code, expected in ended.stderr) == (2, True), ended.stderr
    assert run("create", "n" * 130, "--role", "reader").exit_code == 0
