"""The calendar of runs: planned, agreed, ready, running, ended."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from training.errors import ConfigurationError
from training.network import calendar
from training.network.__main__ import app
from training.network.calendar import Entry as Planned
from training.network.kits import Kit, provision
from training.network.messages import PROTOCOL, About, Agreed, PlannedRun
from training.network.roster import Entry, Row

SITES = ("aster", "birch")
DAY = date(2100, 12, 5)


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", SITES)
    return root


@pytest.fixture
def own(provisioned: Path) -> Kit:
    kit = Kit.open(provisioned / "server", server=True)
    (kit.folder / calendar.FILE).unlink(missing_ok=True)
    return kit


def row(site: str, run: Planned, *, agreed: bool, steps: tuple[str, ...] = ()) -> Row:
    said = {run.id: Agreed(by="Ada", at=datetime.now(UTC))} if agreed else {}
    fields = {"protocol": PROTOCOL, "locum": "0.2.0", "kit": "0" * 64, "policy": "0" * 64}
    about = About(**fields, clock=datetime.now(UTC), agreed=said)  # type: ignore[arg-type]
    return Row(site, "now", True, "", Entry(about=about), steps)


def test_run_is_planned_agreed_ready_running_and_ended(own: Kit) -> None:
    run = calendar.add(own, "hearts, 25 rounds", DAY, ())
    assert calendar.ahead(own, "aster") == (run.message,)
    rows = [row("aster", run, agreed=True), row("birch", run, agreed=False)]
    found = calendar.standing(run, rows)
    assert found.state == "planned: waits for the agreement of birch"
    assert found.agreed["aster"].by == "Ada"
    # Agreement is not readiness.
    rows[1] = row("birch", run, agreed=True, steps=("set its clock",))
    assert calendar.standing(run, rows).state == "agreed: birch not ready"
    assert calendar.standing(run, [rows[0], row("birch", run, agreed=True)]).state == "ready"
    with calendar.noted(own, run.id):
        assert calendar.standing(calendar.find(own, run.id), rows).state.startswith("running since ")
    assert calendar.standing(calendar.find(own, run.id), rows).state.startswith("ended on ")
    assert calendar.ahead(own, "aster") == ()


def test_run_that_fails_has_not_ended(own: Kit) -> None:
    run = calendar.add(own, "hearts", DAY, ["birch"])
    assert calendar.ahead(own, "aster") == ()
    with pytest.raises(KeyboardInterrupt), calendar.noted(own, run.id):
        raise KeyboardInterrupt
    assert calendar.find(own, run.id).ended is None


@pytest.mark.parametrize(
    ("what", "sites", "words"),
    [
        ("", (), "a line of 1 to 200"),
        ("a\x1b[2J", (), "printable"),
        ("hearts", ("elm",), "'elm': expected one of"),
    ],
)
def test_what_cannot_be_planned_is_named(own: Kit, what: str, sites: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        calendar.add(own, what, DAY, sites)
    with pytest.raises(ConfigurationError, match="a day to come, found 2020-01-01"):
        calendar.add(own, "hearts", date(2020, 1, 1), ())
    with pytest.raises(ConfigurationError, match="no planned run 'none'"), calendar.noted(own, "none"):
        pass


def test_person_at_a_hospital_agrees(tmp_path: Path) -> None:
    assert calendar.agreements(tmp_path) == {}
    with pytest.raises(ConfigurationError, match="start `locum site` first, and not of 'a1b2c3'"):
        calendar.agree(tmp_path, "a1b2c3", "Ada")
    calendar.remember(tmp_path, [PlannedRun(id=each, what="hearts", on=DAY) for each in ("a1b2c3", "d4e5f6")])
    calendar.agree(tmp_path, "a1b2c3", "Ada")
    calendar.agree(tmp_path, "d4e5f6", "Ben")
    assert {id_: said.by for id_, said in calendar.agreements(tmp_path).items()} == {
        "a1b2c3": "Ada",
        "d4e5f6": "Ben",
    }
    for id_, by in (("a1b2c3", ""), ("a1b2c3", "a\nb"), ("é", "Ada")):
        with pytest.raises(ConfigurationError, match="cannot be noted"):
            calendar.agree(tmp_path, id_, by)
    (tmp_path / calendar.AGREED).write_text("{")
    assert calendar.agreements(tmp_path) == {}


def test_command_plans_shows_and_drops(own: Kit) -> None:
    kits = ("calendar", "--kits", str(own.folder.parent))
    made = CliRunner().invoke(app, [*kits, "--add", "hearts, 25 rounds", "--on", "2100-12-05"])
    assert made.exit_code == 0, made.output
    (entry,) = calendar.read(own)
    for words in (entry.id, "2100-12-05", "hearts, 25 rounds", "waits for the"):
        assert words in made.output
    assert CliRunner().invoke(app, [*kits, "--add", "hearts"]).exit_code == 2
    assert CliRunner().invoke(app, [*kits, "--drop", "none"]).exit_code == 2
    assert CliRunner().invoke(app, [*kits, "--drop", entry.id]).exit_code == 0
    assert calendar.read(own) == []
    (own.folder / calendar.FILE).write_text("{")
    assert "is no calendar" in CliRunner().invoke(app, [*kits]).output
