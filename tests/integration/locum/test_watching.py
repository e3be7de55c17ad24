"""The commands and client methods of the watch, against a service that has watched a month of answers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from locum import Client
from locum.commands.app import app
from service import observation
from service.database import Assignment, WatchRule
from service.observation import Answer, Observed, SeenLabel
from service.watch.watcher import look
from tests.helpers.service.api import Api

USUAL, CHANGED = 400, 40
Locum = Callable[..., Any]


@pytest.fixture
def locum(watched: Api, monkeypatch: pytest.MonkeyPatch) -> Locum:
    """`locum(*arguments)`: run the command in this process, against `watched`."""
    monkeypatch.setenv("LOCUM_URL", str(watched.client.base_url))
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def watched(api: Api) -> Api:
    """Of scanner `CT 2` the shift grew ninefold for the last 40 answers of `organ`; of `CT 1` nothing did."""
    random = np.random.default_rng(0)
    now = datetime.now(UTC)
    answers = []
    for number in range(USUAL + CHANGED):
        at = now - timedelta(hours=USUAL + CHANGED - number)
        for scanner in ("CT 1", "CT 2"):
            changed = 9 if scanner == "CT 2" and number >= USUAL else 1
            answers.append(
                Answer(
                    Observed(
                        *("organ", "sha256:1", "sha256:g", f"{scanner} {number}", (64, 64, 9), 0.5),
                        *("float32", "CPU"),
                        labels=(SeenLabel("organ", float(random.uniform()), 1000, 1.0, 1),),
                        locum="1",
                        scanner=scanner,
                        shift=changed * float(np.exp(random.normal(0, 0.3))),
                        shift_at="norms",
                    ),
                    *("dune", "key:pacs", f"{scanner} {number}", "http", at),
                )
            )
    with api.context.database.write() as session:
        own = {"version": 1, "digest": "sha256:1", "actor": "ada", "reason": "test"}
        began = now - timedelta(days=60)
        session.add(Assignment(hospital="dune", model="organ", sequence=1, at=began, **own))
        observation.append(session, answers)
    look(api.context.database)
    return api


def test_review_lists_the_least_sure_first_and_last_what_was_looked_at(watched: Api, locum: Locum) -> None:
    shown = locum("review", "--hospital", "dune", "--limit", 4, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    with Client(str(watched.client.base_url)) as client:
        newest = client.observations("dune", limit=500)
    assert [each.id for each in newest] == sorted((each.id for each in newest), reverse=True)
    assert len(newest) == 500
    # Confidences are drawn from a continuous law: no two are equal.
    least = sorted(newest, key=lambda each: each.labels["organ"].confidence)[:4]
    assert [each["request"] for each in found] == [each.request for each in least]
    assert [each["review"]["organ"] for each in found] == pytest.approx([place / 499 for place in range(4)])
    table = locum("review", "--hospital", "dune", "--model", "organ", "--limit", 2).stdout.splitlines()
    header = ["less sure", "label", "confidence", "model", "scanner", "at", "request", "looked at by"]
    assert re.split("  +", table[0]) == header
    cells = ["0 %", "organ", f"{least[0].labels['organ'].confidence:.3f}", "organ", str(least[0].scanner)]
    assert re.split("  +", table[1]) == [*cells, f"{least[0].at:%Y-%m-%d %H:%M}", least[0].request, "-"]
    assert len(table) == 3
    looked = watched.client.put(f"/hospitals/dune/observations/{least[0].id}/looked")
    assert looked.status_code == 200
    after = json.loads(locum("review", "--hospital", "dune", "--limit", 500, "--json").stdout)
    assert after[0]["request"] == least[1].request
    assert (after[-1]["request"], after[-1]["looked_by"]) == (least[0].request, "anonymous")


def test_observations_are_saved_as_a_table(locum: Locum, tmp_path: Path) -> None:
    out = tmp_path / "observed.csv"
    saved = locum("observations", "--hospital", "dune", "--out", out)
    assert saved.exit_code == 0, saved.output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (USUAL + CHANGED)
    assert saved.stdout == f"{out}: {len(rows)} rows, one per answer and label\n"
    assert {row["scanner"] for row in rows} == {"CT 1", "CT 2"}


def test_watch_names_the_alarm_obeys_and_is_answered(watched: Api, locum: Locum) -> None:
    shown = locum("watch", "--hospital", "dune")
    assert shown.exit_code == 1, shown.output
    header, one, two = shown.stdout.splitlines()
    assert header.split() == ["hospital", "model", "scanner", "state", "since", "alarms", "price"]
    assert one.startswith("dune      organ  CT 1     routine      -")
    assert two.startswith("dune      organ  CT 2     investigate  ")
    assert "  shift is higher  a change of one standard deviation is found after about " in two

    listed = json.loads(locum("watch", "--json").stdout)
    assert [(each["scanner"], each["state"]) for each in listed] == [
        ("CT 1", "routine"),
        ("CT 2", "investigate"),
    ]
    assert listed[1]["streams"]["shift"] >= 1
    assert datetime.fromisoformat(listed[1]["since"]) < datetime.now(UTC)

    rule = ("--months", 6, "--stop", "hold", "--reason", "agreed", "--actor", "ada")
    assert locum("watch", "set", "dune", "organ", *rule).exit_code == 0
    with watched.context.database.read() as session:
        (kept,) = session.query(WatchRule).all()
    assert (kept.months, kept.stop, kept.reason, kept.actor) == (6, "hold", "agreed", "ada")

    unknown = locum("watch", "answer", "dune", "organ", "--reason", "none")
    assert unknown.exit_code == 1
    assert "CT 1, CT 2" in str(unknown.exception)
    said = ("--scanner", "CT 2", "--reason", "new tube")
    answered = locum("watch", "answer", "dune", "organ", *said)
    assert answered.exit_code == 0, answered.output
    assert "learns what is usual: 0 answers so far" in answered.stdout
    assert locum("watch").exit_code == 0


def test_hospital_without_answers_has_empty_lists(watched: Api, locum: Locum) -> None:
    watched.client.put("/hospitals/empty", json={"name": "Empty"})
    assert locum("watch", "-H", "empty").stdout == "nothing is watched yet\n"
    assert json.loads(locum("watch", "-H", "empty", "--json").stdout) == []
    assert (
        locum("review", "-H", "empty").stdout
        == "no answers of the versions that serve this hospital were observed yet\n"
    )
