"""The commands of a change plan and of a shadow, against a service in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from locum.commands.app import app
from tests.helpers.service.api import Api

Locum = Callable[..., Any]
WHO = ("--actor", "ada", "--reason", "agreed on 3 May")


@pytest.fixture
def locum(api: Api, monkeypatch: pytest.MonkeyPatch) -> Locum:
    """`locum(*arguments)`: run the command in this process, against `api`."""
    monkeypatch.setenv("LOCUM_URL", str(api.client.base_url))
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


def test_plan_is_written_from_a_file_shown_and_ended(locum: Locum, tmp_path: Path) -> None:
    file = tmp_path / "change-plan.yaml"
    file.write_text("recipes: [auto, masks]\nmasks: 8\nat_least: -0.005\n")
    written = locum("change-plan", "write", "dune", "organ", file, *WHO)
    assert written.exit_code == 0, written.output
    assert "recipes: auto, masks" in written.output
    found = json.loads(locum("change-plan", "show", "dune", "organ", "--json").output)
    assert (found["plan"]["masks"], found["plan"]["at_least"], found["waiting"]) == (8, -0.005, [])
    file.write_text("recipe: auto\n")
    wrong = locum("change-plan", "write", "dune", "organ", file, *WHO)
    assert wrong.exit_code != 0
    assert "recipes" in str(wrong.exception) + wrong.output
    ended = locum("change-plan", "end", "dune", "organ", *WHO)
    assert "no change plan" in ended.output


def test_shadow_is_begun_shown_and_ended(
    start: Callable[..., Api],
    tmp_path: Path,
    publish_bright: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at in (100, 180):
        publish_bright(tmp_path, at=at)
    api = start(tmp_path)
    monkeypatch.setenv("LOCUM_URL", str(api.client.base_url))
    api.client.put("/hospitals/north", json={"name": "north"}).raise_for_status()

    def locum(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(each) for each in arguments])

    assert locum("assign", "bright@1", "-H", "north", *WHO).exit_code == 0
    itself = locum("shadow", "begin", "north", "bright", "1", *WHO)
    assert "bright@1 serves north already" in str(itself.exception)
    began = locum("shadow", "begin", "north", "bright", "2", "--every", 4, *WHO)
    assert began.exit_code == 0, began.output
    assert "bright@2 answers one scan in 4 of north, unseen" in began.output
    (found,) = json.loads(locum("shadow", "show", "north", "bright", "--json").output)
    assert (found["every"], found["answers"], found["ended"]) == (4, 0, None)
    ended = locum("shadow", "end", "north", "bright", *WHO)
    assert "bright@2: 0 scans, one in 4" in ended.output
