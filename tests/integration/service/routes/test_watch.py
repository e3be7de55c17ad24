"""What the watch says over HTTP, and how answers obey the rule that was set before an alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from model_store.artefact import Artefact
from service.audit import trail
from service.database import Watch, WatchEvent
from service.jobs.files import JobFolder
from service.watch.watcher import look
from service.worker.runner import run_job
from tests.helpers.service.adapted_store import FIRST, PASSED, publish_adapted, publish_space, record_job
from tests.helpers.service.alarmed import put_alarm
from tests.helpers.service.api import Api

ALARMED = "an alarm of the watch waits for a person"


@pytest.fixture(scope="module")
def api(
    start: Callable[[Path], Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[..., Artefact],
) -> Api:
    """`bright`, of which a version adapted to `north` is assigned there."""
    root = tmp_path_factory.mktemp("store")
    space = publish_space(root, publish_bright)
    running = start(root)
    for hospital in ("north", "south"):
        assert running.client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    adapted = publish_adapted(root, publish_bright, space, "north", FIRST)
    record_job(running.context, adapted, PASSED)
    body = {"version": str(adapted), "reason": "test", "actor": "ada"}
    headers = {"If-None-Match": "*"}
    assert (
        running.client.put("/hospitals/north/serving/bright", json=body, headers=headers).status_code == 200
    )
    return running


@pytest.fixture
def alarm(api: Api) -> Iterator[None]:
    """An alarm of north's `bright` that is unanswered."""
    with api.context.database.write() as session:
        put_alarm(session, "north", "bright", api.store.open("bright.at-north@1").digest)
    yield
    with api.context.database.write() as session:
        for each in (*session.scalars(select(Watch)), *session.scalars(select(WatchEvent))):
            session.delete(each)


def put_rule(api: Api, stop: str) -> Any:
    body = {"stop": stop, "months": 6, "reason": "as agreed", "actor": "ada"}
    return api.client.put("/hospitals/north/watch/bright", json=body)


def test_rule_is_obeyed_until_a_person_answers(
    api: Api, make_png: Callable[..., bytes], picture: Any, alarm: None
) -> None:
    scan, fields = make_png(picture), {"hospital": "north", "model": "bright", "output": "json"}
    warned = api.segment(scan, **fields).json()
    assert any(ALARMED in each for each in warned["warnings"])
    assert warned["receipt"]["model"]["name"] == "bright.at-north@1"

    assert put_rule(api, "global").status_code == 200
    stopped = api.segment(scan, **fields).json()
    assert stopped["receipt"]["network"]["name"] == "bright.global@1"
    assert "by an alarm of the watch" in stopped["receipt"]["why"]
    assert any(ALARMED in each for each in stopped["warnings"])

    assert put_rule(api, "hold").status_code == 200
    held = api.segment(scan, **fields)
    assert (held.status_code, held.json()["type"].rpartition(":")[2]) == (409, "answers-held")
    # A person who looks into it names a version; other hospitals are not concerned.
    named = {**fields, "model": "bright.at-north@1"}
    assert api.segment(scan, **named).status_code == 200
    assert api.segment(scan, **{**fields, "hospital": "south"}).status_code == 200

    # A look between these answers begins a series of its own, without a scanner.
    watches = api.client.get("/watch").json()["watches"]
    (shown,) = (watch for watch in watches if watch["scanner"] == "CT 2")
    assert (shown["state"], shown["stop"], shown["months"]) == ("investigate", "hold", 6)
    assert [each["stream"] for each in shown["alarms"]] == ["shift"]
    answers = "/hospitals/north/watch/bright/answers"
    body = {"scanner": "CT 2", "reason": "a new tube, looked at 20 masks", "actor": "ada"}
    assert api.client.post(answers, json={**body, "scanner": "MR"}).status_code == 422
    assert api.client.post(answers, json=body).status_code == 200
    again = api.segment(scan, **fields)
    assert again.status_code == 200
    assert not any(ALARMED in each for each in again.json()["warnings"])
    (found,) = api.client.get("/hospitals/north/watch/bright").json()["events"]
    assert (found["answered_by"], found["reason"]) == ("ada", body["reason"])
    with api.context.database.snapshot() as session:
        trail.verify(session)
        rows = [row for row in trail.rows(session) if row["action"].startswith("watch.")]
    actions = ["watch.set", "watch.set", "watch.answered.refused", "watch.answered"]
    assert [row["action"] for row in rows] == actions
    assert rows[-1]["details"]["reason"] == body["reason"]


@pytest.mark.parametrize("personalization", ["auto", "scan"])
def test_answer_of_a_job_warns_of_the_alarm_in_which_the_scan_was_sent(
    api: Api, make_png: Callable[..., bytes], picture: Any, alarm: None, personalization: str
) -> None:
    assert put_rule(api, "warn").status_code == 200
    fields = {"hospital": "north", "model": "bright", "personalization": personalization}
    if personalization == "scan":
        # What no graph answers at once.
        fields["shape_weight"] = "0.1"
    form = {name: (None, value) for name, value in fields.items()}
    sent = api.client.post(
        "/segment", files={**form, "scan": ("s.png", make_png(picture))}, headers={"Prefer": "respond-async"}
    )
    assert sent.status_code == 202, sent.text
    job = sent.json()["id"]
    answered = {"scanner": "CT 2", "reason": "looked at", "actor": "ada"}
    assert api.client.post("/hospitals/north/watch/bright/answers", json=answered).status_code == 200
    if personalization == "scan":
        # These networks have no weights: what becomes of it is shown where there are some.
        kept = JobFolder(api.settings.open_files(), job).read_input()
        assert kept is not None
        assert kept.alarmed
        return
    run_job(job, api.settings)
    found = api.client.get(f"/jobs/{job}/result")
    assert found.status_code == 200, found.text
    assert "watch-alarm" in found.headers["locum-warning-names"].split(", ")


def test_metrics_and_lists_show_the_state_of_every_watch(api: Api, alarm: None) -> None:
    text = api.client.get("/metrics").text
    assert 'locum_watch_state{hospital="north",model="bright",scanner="CT 2"} 2.0' in text
    watches = api.client.get("/watch", params={"hospital": "south"}).json()["watches"]
    assert all((watch["hospital"], watch["scanner"]) == ("south", None) for watch in watches)
    assert api.client.get("/watch", params={"hospital": "nowhere"}).status_code == 404


def test_answers_that_were_given_are_watched_by_the_service_itself(
    api: Api, make_png: Callable[..., bytes], picture: Any
) -> None:
    fields = {"hospital": "south", "model": "bright", "scanner": "US 1"}
    # Another scan than the tests above sent: the same again is not counted.
    assert api.segment(make_png(picture[::-1]), **fields).status_code == 200
    look(api.context.database)
    found = api.client.get("/watch", params={"hospital": "south"}).json()["watches"]
    (watch,) = [each for each in found if each["scanner"] == "US 1"]
    assert (watch["state"], watch["answers"], watch["learning"]) == ("routine", 1, True)
    details = api.client.get("/hospitals/south/watch/bright").json()
    point = details["points"][-1]
    assert point["scanner"] == "US 1"
    assert set(point["values"]) == {"confidence of bright", "volume of bright"}
