"""`python -m service doctor`: every part has a line, and what is wrong has words and a status."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.__main__ import app
from service.commands import doctor
from service.database import Database, WatchMessage, upgrade
from service.inference import loading, providers
from service.webhooks import read_webhooks
from tests.helpers.service.receiver import SECRET

Run = Callable[..., tuple[int, dict[str, dict[str, str]]]]
ON_CPU = json.dumps({"device": "cpu", "torch": "2"})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(jobs=..., error=..., LOCUM_NAME=value)`: the exit status, and the findings by part."""

    def invoke(jobs: str = ON_CPU, error: str = "", **variables: str) -> tuple[int, dict[str, Any]]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        done = subprocess.CompletedProcess([], int(not jobs), jobs, error)
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
        folders = ["--store", str(tmp_path / "store"), "--state-dir", str(tmp_path / "state")]
        answer = CliRunner().invoke(app, [*folders, "doctor", "--json"])
        found = [json.loads(line) for line in answer.stdout.splitlines()]
        return answer.exit_code, {each["part"]: each for each in found}

    return invoke


def test_new_machine_is_in_order_and_nothing_is_made(run: Run, tmp_path: Path) -> None:
    status, found = run(LOCUM_DEVICE="cpu")
    assert status == 0
    assert {part for part, each in found.items() if each["state"] != "ok"} == {"store"}
    assert "publish a model" in found["store"]["words"]
    assert "onnxruntime" in found["software"]["words"]
    assert [*tmp_path.iterdir()] == []


def test_gpu_that_is_demanded_and_missing_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "wanted_providers", lambda *_: [providers.CPU])
    status, found = run(jobs="", error="noise\nthe worker's torch finds no GPU", LOCUM_DEVICE="cuda:9")
    assert status == 1
    assert found["device of scans"]["state"] == found["device of jobs"]["state"] == "wrong"
    assert found["device of jobs"]["words"] == "the worker's torch finds no GPU"


def test_gpu_that_auto_cannot_use_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_DEVICE_FILES", (Path("/dev/null"),))
    monkeypatch.setattr(loading, "wanted_providers", lambda *_: [providers.CPU])
    status, found = run(error="jobs run on the CPU, because", LOCUM_DEVICE="auto")
    assert status == 0
    assert found["device of scans"]["state"] == found["device of jobs"]["state"] == "warning"
    assert "jobs run on the CPU" in found["device of jobs"]["words"]


def test_redis_that_does_not_answer_and_an_unknown_variable_are_named(run: Run) -> None:
    status, found = run(LOCUM_DEVICE="cpu", LOCUM_REDIS_URL="redis://127.0.0.1:1", LOCUM_DEVIC="x")
    assert status == 1
    assert found["redis"]["state"] == "wrong"
    assert found["settings"] == {
        "part": "settings",
        "state": "warning",
        "words": "LOCUM_DEVIC is ignored: no such setting, but LOCUM_DEVICE",
    }


def test_webhook_that_received_nothing_is_named_without_its_address(run: Run, tmp_path: Path) -> None:
    hooks = json.dumps([{"url": "https://chat.hospital.example/hooks/path", "secret": SECRET}])
    variables = {"LOCUM_DEVICE": "cpu", "LOCUM_WATCH_WEBHOOKS": hooks}
    _, found = run(**variables)
    assert (found["webhooks"]["state"], "nothing was sent" in found["webhooks"]["words"]) == ("ok", True)
    (tmp_path / "state").mkdir()
    database = Database(f"sqlite:///{tmp_path / 'state' / 'locum.db'}")
    upgrade(database)
    now = datetime(2026, 11, 28, 9, 41, tzinfo=UTC)
    (hook,) = read_webhooks(hooks)
    with database.write() as session:
        own = {"address": hook.address, "body": "{}", "created_at": now, "due": now}
        session.add_all(WatchMessage(id=f"msg_{n}", attempts=n, **own) for n in range(4))
    database.dispose()
    _, found = run(**variables)
    assert found["webhooks"]["state"] == "warning"
    said = "chat.hospital.example: 2 messages were not received, the oldest of 2026-11-28 09:41 UTC"
    assert found["webhooks"]["words"].startswith(said)
    assert "/hooks/" not in found["webhooks"]["words"]
