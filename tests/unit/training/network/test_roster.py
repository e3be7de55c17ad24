"""The roster: what the operator last heard of each hospital, and what is missing there."""

from __future__ import annotations

import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model_store.errors import LocumStoreError
from training.network.__main__ import app
from training.network.about import tell
from training.network.cell import Rejected
from training.network.checking import Hospital
from training.network.kits import Kit, certificates, provision, renew
from training.network.messages import PROTOCOL, About, Asking, Found, Planned, PlannedRun, pack, unpack
from training.network.policy import Policy
from training.network.roster import FILE, Roster, Row, between_runs, mail, rows

SITES = ("aster", "birch", "cedar")
RUNS = (PlannedRun(id="a1b2c3", what="hearts", on=date(2026, 12, 5)),)


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", SITES)
    return root


@pytest.fixture
def root(provisioned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(provisioned, tmp_path / "kits"))


def about(root: Path, site: str, **changes: Any) -> About:
    kit = Kit.open(root / site, server=False).certified().fingerprint
    fields = {
        "protocol": PROTOCOL,
        "locum": "0.2.0",
        "clock": datetime.now(UTC),
        "kit": kit,
        "policy": "0" * 64,
    }
    return About(**{**fields, **changes})


def by_site(root: Path, now: datetime | None = None) -> dict[str, Row]:
    own = Kit.open(root / "server", server=True)
    return {row.site: row for row in rows(own, certificates(root), now)}


def test_each_hospital_is_ready_or_has_what_is_missing_in_a_sentence(root: Path) -> None:
    roster = Roster(Kit.open(root / "server", server=True))
    roster.heard("aster", about(root, "aster"))
    slow = datetime.now(UTC) - timedelta(hours=2)
    wrong = Found(part="disk", state="wrong", words="none is free")
    roster.heard("birch", about(root, "birch", protocol=3, clock=slow, findings=(wrong,)))
    found = by_site(root)
    assert (found["aster"].state, found["aster"].here) == ("ready", True)
    assert found["birch"].open == (
        f"upgrade it: it speaks version 3 of the wire, the operator {PROTOCOL}",
        "set its clock, which differs by 2:00:00",
        "mend the disk: none is free",
    )
    assert found["birch"].state.endswith("(and 2 more)")
    assert found["cedar"].state == "start `locum site` with its kit: it was never heard"
    # Three weeks of silence are no health.
    later = by_site(root, datetime.now(UTC) + timedelta(days=21))["aster"]
    assert not later.here
    assert later.state.startswith("start `locum site`: it is silent since ")
    ends = by_site(root, datetime.now(UTC) + timedelta(days=340))["aster"]
    assert ends.open[0].startswith("renew its certificate, which ends in 19 days (the operator: `locum")


def test_refusal_stands_until_the_hospital_says_that_it_changed(root: Path) -> None:
    roster = Roster(Kit.open(root / "server", server=True))
    roster.refused("aster", "plan_digest: expected a, found b")
    assert by_site(root)["aster"].state == "mend why it was turned away: plan_digest: expected a, found b"
    assert Roster(Kit.open(root / "server", server=True))._entries["aster"].refused is not None
    roster.heard("aster", about(root, "aster"))
    assert by_site(root)["aster"].state == "ready"


def test_earlier_certificate_is_told_from_the_renewed_one(root: Path) -> None:
    before = about(root, "aster")
    shutil.move(root / "aster", root / "handed")
    renew(root, ["aster"])
    Roster(Kit.open(root / "server", server=True)).heard("aster", before)
    assert "put the renewed client.crt and rootCA.pem into its kit" in by_site(root)["aster"].state


def test_damaged_roster_begins_again(root: Path) -> None:
    (root / "server" / FILE).write_text("{")
    assert by_site(root)["aster"].heard == "never"


def test_mail_has_exactly_the_open_steps(root: Path) -> None:
    own = Kit.open(root / "server", server=True)
    Roster(own).heard("aster", about(root, "aster"))
    found = by_site(root)
    assert mail(found["aster"], own) == "To aster: everything is in order for the next run of hearts."
    text = mail(found["cedar"], own)
    assert text.startswith(
        "To cedar: before the next run of hearts, please\n\n  1. start `locum site` with its kit"
    )
    assert "locum site check" in text


def test_between_runs_hospitals_of_the_consortium_are_heard(root: Path) -> None:
    own = Kit.open(root / "server", server=True)
    said: list[str] = []
    planned = lambda site: RUNS if site == "aster" else ()  # noqa: E731
    handle = between_runs(Roster(own), own.content.sites, planned, said.append)
    for site, expected in (("aster", RUNS), ("birch", ())):
        assert unpack(Planned, handle(site, "hello", pack(about(root, site))))[0].runs == expected
    with pytest.raises(Rejected, match="no run has begun yet") as error:
        handle("aster", "invite", pack(Asking(protocol=PROTOCOL)))
    assert error.value.code == "idle"
    for _ in range(2):
        with pytest.raises(Rejected, match="birch speaks version 3 of the wire, the operator 4: upgrade Loc"):
            handle("birch", "invite", b"")
    assert len(said) == 1
    assert said[0].startswith("birch cannot take part: birch speaks version 3 of the wire")
    with pytest.raises(Rejected, match="no hospital of this consortium"):
        handle("elm", "hello", pack(about(root, "aster")))
    assert by_site(root)["aster"].here


def test_hospital_tells_what_its_policy_permits(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    here = Hospital(root / "aster", tmp_path, path, tmp_path / "state", "cpu")
    path.write_text("allows: [weights]\nconsents: true\n")
    told = tell(here, Policy.read(path))
    assert (told.device, told.patients, told.labels) == ("cpu", None, None)
    assert {each.part for each in told.findings} >= {"device", "folders", "disk", "clock", "kit", "data"}
    assert not {"operator", "step"} & {each.part for each in told.findings}
    path.write_text("allows: [weights]\nconsents: true\nreports: false\n")
    quiet = tell(here, Policy.read(path))
    assert (quiet.device, quiet.free_gib, quiet.findings) == (None, None, ())
    assert quiet.policy != told.policy
    with pytest.raises((LocumStoreError, OSError)):
        tell(Hospital(root / "aster", policy=tmp_path / "none"), Policy.read(path))


def test_command_shows_the_roster_and_writes_the_mail(root: Path) -> None:
    Roster(Kit.open(root / "server", server=True)).heard("aster", about(root, "aster", patients=24))
    shown = CliRunner().invoke(app, ["roster", "--kits", str(root)])
    assert shown.exit_code == 0, shown.output
    for words in ("aster", "ready", "24", "359 days", "never"):
        assert words in shown.output
    lines = CliRunner().invoke(app, ["roster", "--kits", str(root), "--json"]).output.splitlines()
    assert len(lines) == len(SITES)
    written = CliRunner().invoke(app, ["roster", "--kits", str(root), "--mail", "birch"])
    assert "1. start `locum site` with its kit" in written.output
    assert CliRunner().invoke(app, ["roster", "--kits", str(root), "--mail", "elm"]).exit_code == 2
