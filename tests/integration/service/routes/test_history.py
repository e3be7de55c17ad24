"""Which version answered, by which decision; and the report of a period."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from locum.commands.app import app
from model_store.artefact import Artefact
from model_store.digest import sha256
from tests.helpers.service.alarmed import put_alarm
from tests.helpers.service.api import Api

TODAY = f"{datetime.now(UTC):%Y-%m-%d}"


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[..., Artefact],
    make_png: Callable[..., bytes],
    picture: NDArray[Any],
) -> Api:
    """Two versions, the second by a decision, and an answer by each; a hospital beside it."""
    store = tmp_path_factory.mktemp("store")
    publish_bright(store)
    api = start(store)
    for hospital in ("north", "south"):
        assert api.client.put(f"/hospitals/{hospital}", json={"name": hospital.title()}).status_code == 201
    scan = make_png(picture)
    assert api.segment(scan, hospital="north", model="bright").status_code == 200
    second = publish_bright(store, at=150)
    body = {"version": second.version, "actor": "Ada", "reason": "the new threshold <b>"}
    put = api.client.put("/hospitals/north/serving/bright", json=body, headers={"If-Match": '"0"'})
    assert put.status_code == 200, put.text
    assert api.segment(scan, hospital="north", model="bright", scanner="CT 1").status_code == 200
    assert api.segment(scan, hospital="south", model="bright").status_code == 200
    return api


def ask(api: Api, hospital: str = "north", **params: str) -> list[dict[str, Any]]:
    answer = api.client.get(f"/hospitals/{hospital}/answers", params=params)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["answers"]
    return found


def test_scan_finds_its_answers_each_with_the_decision_in_force_then(
    api: Api, make_png: Callable[..., bytes], picture: NDArray[Any]
) -> None:
    digest = sha256(make_png(picture))
    newest, first = ask(api, scan=digest)
    assert (first["artefact"], newest["artefact"]) == ("bright@1", "bright@2")
    assert (first["decision"]["by_default"], first["decided"]) == (True, True)
    assert (newest["decision"]["actor"], newest["decision"]["sequence"]) == ("Ada", 2)
    assert newest["decided"]
    assert newest["made_by"] is None
    assert ask(api, scan=digest, day=TODAY) == [newest, first]
    before = f"{datetime.now(UTC) - timedelta(days=2):%Y-%m-%d}"
    assert ask(api, scan=digest, day=before) == []
    assert ask(api, request=newest["request"]) == [newest]
    assert ask(api, "south", request=newest["request"]) == []


def test_version_that_a_request_named_was_not_decided(
    api: Api, make_png: Callable[..., bytes], picture: NDArray[Any]
) -> None:
    said = api.segment(make_png(picture), hospital="north", model="bright@1")
    (found,) = ask(api, request=said.headers["Locum-Request"])
    assert (found["artefact"], found["decision"]["artefact"], found["decided"]) == (
        "bright@1",
        "bright@2",
        False,
    )


def test_correction_is_part_of_the_account(
    api: Api, make_png: Callable[..., bytes], picture: NDArray[Any]
) -> None:
    request = api.segment(make_png(picture), hospital="north", model="bright").headers["Locum-Request"]
    put = api.client.put(f"/hospitals/north/corrections/{request}", files={"accepted": (None, "true")})
    assert put.status_code == 201, put.text
    (found,) = ask(api, request=request)
    assert found["correction"]["accepted"]


def test_question_is_of_one_thing_at_a_hospital_that_is_registered(api: Api) -> None:
    for params in (
        {},
        {"series": "1.2", "request": "x"},
        {"scan": "no digest"},
        {"series": "1.2", "day": "x"},
    ):
        assert api.client.get("/hospitals/north/answers", params=params).status_code == 422, params
    assert api.client.get("/hospitals/nowhere/answers", params={"series": "1.2"}).status_code == 404


def test_report_counts_what_the_rows_have_and_another_period_nothing(api: Api) -> None:
    found = api.client.get("/hospitals/north/report", params={"from": TODAY, "to": TODAY})
    assert found.status_code == 200, found.text
    report = found.json()
    observed = api.client.get("/hospitals/north/observations", params={"limit": 500}).json()["observations"]
    assert sum(each["answers"] for each in report["arrivals"]) == len(observed)
    assert {each["scanner"] for each in report["arrivals"]} == {None, "CT 1"}
    assert [each["artefact"] for each in report["inventory"]] == ["bright@2"]
    assert [each["by_default"] for each in report["decisions"]] == [False, True]
    assert [key["name"] for key in report["keys"]] == []
    past = api.client.get("/hospitals/north/report", params={"from": "2020-01-01", "to": "2020-12-31"}).json()
    assert (past["inventory"], past["arrivals"], past["decisions"]) == ([], [], [])
    for days in ({"from": TODAY, "to": "2020-01-01"}, {"from": "2020-01-01", "to": TODAY}, {"to": "x"}):
        assert api.client.get("/hospitals/north/report", params=days).status_code == 422


def test_page_of_the_report_escapes_what_people_wrote(api: Api) -> None:
    page = api.client.get("/hospitals/north/report.html", params={"from": TODAY, "to": TODAY})
    assert page.headers["content-type"].startswith("text/html")
    assert "the new threshold &lt;b&gt;" in page.text
    assert "<b>" not in page.text.split("What serves at the end")[1]
    assert "bright@2" in page.text


def card_of(api: Api, version: int, **params: str) -> dict[str, Any]:
    answer = api.client.get(f"/models/bright/versions/{version}/card", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_card_has_what_the_other_routes_say_of_the_version(api: Api) -> None:
    for number, hospitals in ((1, ["north"]), (2, ["north", "south"])):
        card = card_of(api, number)
        described = api.client.get(f"/models/bright/versions/{number}").json()
        assert (card["artefact"], card["digest"]) == (f"bright@{number}", described["digest"])
        lineage = described["manifest"]["lineage"]
        assert {name: card["training"][name] for name in ("method", "run", "rounds")} == {
            name: lineage[name] for name in ("method", "run", "rounds")
        }
        assert [each["hospital"] for each in card["hospitals"]] == hospitals
        for own in card["hospitals"]:
            place = f"/hospitals/{own['hospital']}"
            report = api.client.get(f"{place}/report", params={"from": TODAY, "to": TODAY}).json()
            arrivals = [each for each in report["arrivals"] if each["version"] == card["digest"]]
            assert own["arrivals"] == arrivals
            log = api.client.get(f"{place}/serving/bright/history").json()["entries"]
            served = [each["sequence"] for each in log if each["digest"] == card["digest"]]
            assert {*served} <= {each["sequence"] for each in own["changes"]}
    first = card_of(api, 1)["hospitals"][0]["changes"]
    # The first served by default, and the second took its place.
    assert [(each["artefact"], each["by_default"]) for each in first] == [
        ("bright@1", True),
        ("bright@2", False),
    ]


def test_card_has_the_alarms_and_the_plan_of_the_time_in_which_the_version_served(api: Api) -> None:
    with api.context.database.write() as session:
        put_alarm(session, "north", "bright", api.store.open("bright@2").digest)
    plan = {"plan": {"recipes": ["auto"]}, "actor": "Ada", "reason": "agreed"}
    assert api.client.put("/hospitals/north/serving/bright/plan", json=plan).status_code == 200
    (north,) = card_of(api, 2, hospital="north")["hospitals"]
    assert [(each["stream"], each["answered_at"]) for each in north["alarms"]] == [("shift", None)]
    assert [each["plan"]["recipes"] for each in north["plans"]] == [["auto"]]
    # One that was ended on the day on which it was written stays in card and report.
    ended = {"plan": None, "actor": "Ada", "reason": "<b>too narrow"}
    assert api.client.put("/hospitals/north/serving/bright/plan", json=ended).status_code == 200
    (north,) = card_of(api, 2, hospital="north")["hospitals"]
    assert [each["plan"] is None for each in north["plans"]] == [True, False]
    today = datetime.now(UTC).date().isoformat()
    period = {"from": today, "to": today}
    report = api.client.get("/hospitals/north/report", params=period).json()
    assert report["plans"] == north["plans"]
    page = api.client.get("/hospitals/north/report.html", params=period).text
    assert "&lt;b&gt;too narrow" in page
    (before,) = card_of(api, 1, hospital="north")["hospitals"]
    assert before["alarms"] == []


def test_page_of_the_card_escapes_what_people_wrote(api: Api) -> None:
    page = api.client.get("/models/bright/versions/2/card.html")
    assert page.headers["content-type"].startswith("text/html")
    assert "the new threshold &lt;b&gt;" in page.text
    assert "<b>" not in page.text
    none = api.client.get("/models/bright/versions/2/card", params={"hospital": "nowhere"})
    assert none.status_code == 404


def test_keys_are_reported_to_an_admin_alone_without_secrets(
    start: Callable[..., Api], tmp_path: Path, publish_bright: Callable[..., Artefact]
) -> None:
    from service.identity import keys

    publish_bright(tmp_path)
    api = start(tmp_path, auth="keys")
    with api.context.database.write() as session:
        _, admin = keys.create(session, "head", "admin", None, None)
    who = {"Authorization": f"Bearer {admin}"}
    api.client.put("/hospitals/north", json={"name": "North"}, headers=who).raise_for_status()
    with api.context.database.write() as session:
        _, reader = keys.create(session, "ward", "reader", "north", None)
        _, own = keys.create(session, "chief", "admin", "north", None)
    seen = {}
    for name, key in (("head", admin), ("ward", reader), ("chief", own)):
        found = api.client.get(
            "/hospitals/north/report",
            params={"from": TODAY, "to": TODAY},
            headers={"Authorization": f"Bearer {key}"},
        )
        assert found.status_code == 200, found.text
        assert not any(secret in found.text for secret in (admin, reader, own))
        listed = found.json()["keys"]
        seen[name] = None if listed is None else [each["name"] for each in listed]
    assert seen == {"head": ["head", "ward", "chief"], "ward": None, "chief": ["ward", "chief"]}


def test_commands_answer_the_auditor_and_save_the_report(
    api: Api,
    make_png: Callable[..., bytes],
    picture: NDArray[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCUM_URL", str(api.client.base_url))

    def locum(*words: str) -> Any:
        return CliRunner().invoke(app, list(words))

    scan = tmp_path / "scan.png"
    scan.write_bytes(make_png(picture))
    said = locum("audit", "answer", "--hospital", "north", "--scan", str(scan), "--day", TODAY)
    assert said.exit_code == 0, said.output
    assert "by Ada: the new threshold" in said.output
    none = locum("audit", "answer", "--hospital", "north", "--series", "1.2.3")
    assert (none.exit_code, "has no answer to it" in none.output) == (1, True)
    assert locum("audit", "answer", "--hospital", "north").exit_code == 2
    saved = locum(
        "report", "--hospital", "north", "--from", TODAY, "--to", TODAY, "--out", str(tmp_path / "out")
    )
    assert saved.exit_code == 0, saved.output
    assert {each.suffix for each in (tmp_path / "out").iterdir()} == {".html", ".json"}
    saved = locum("card", "bright@2", "--hospital", "south", "--out", str(tmp_path / "cards"))
    assert saved.exit_code == 0, saved.output
    assert sorted(each.name for each in (tmp_path / "cards").iterdir()) == ["bright-2.html", "bright-2.json"]
    (south,) = json.loads((tmp_path / "cards" / "bright-2.json").read_text())["hospitals"]
    assert south["hospital"] == "south"
    assert locum("card", "bright").exit_code == 2
