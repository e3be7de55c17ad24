"""Inside the change plan one approver assigns a version; outside it two persons sign, each with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from service.database import AuditRow
from tests.helpers.service.adapted_store import FIRST, PASSED, publish_adapted, publish_space, record_job
from tests.helpers.service.api import Api

SERVING = "/hospitals/north/serving/bright"
JUDGED = {**PASSED, "masks": {"masks": 12, "at_least": 0.01, "decision": "accepts"}}


@pytest.fixture
def api(start: Callable[..., Api], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Api:
    root: Path = tmp_path_factory.mktemp("store")
    publish_space(root, publish_bright)
    running = start(root)
    assert running.client.put("/hospitals/north", json={"name": "north"}).status_code == 201
    candidate = publish_adapted(root, publish_bright, running.store.open("bright@1"), "north", FIRST)
    record_job(running.context, candidate, JUDGED)
    return running


def write(api: Api, plan: dict[str, Any] | None) -> dict[str, Any]:
    body = {"plan": plan, "actor": "chief", "reason": "agreed on 3 May"}
    answer = api.client.put(f"{SERVING}/plan", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def assign(api: Api, actor: str, **more: Any) -> httpx.Response:
    tag = api.client.get(SERVING).headers["etag"]
    body = {"version": "bright.at-north@1", "actor": actor, "reason": f"{actor} looked", **more}
    headers = {"If-None-Match": "*"} if tag == '"0"' else {"If-Match": tag}
    answer: httpx.Response = api.client.put(SERVING, json=body, headers=headers)
    return answer


def test_change_inside_the_plan_needs_one_signature(api: Api) -> None:
    plan = {"recipes": ["paper"], "masks": 10, "at_least": 0.0, "impact": "none of treatment"}
    written = write(api, plan)
    assert (written["plan"]["masks"], written["actor"], written["waiting"]) == (10, "chief", [])
    assigned = assign(api, "ada")
    assert assigned.status_code == 200, assigned.text
    assert api.client.get(SERVING).json()["assignment"]["reason"] == "ada looked"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"recipes": ["masks"]}, "made by 'paper', and the plan allows masks"),
        ({"recipes": ["paper"], "masks": 20}, "12 masks judged it, and the plan asks for 20"),
        ({"recipes": ["paper"], "at_least": 0.02}, "at least +2.0 points, and the bound is +1.0"),
        ({"recipes": ["paper"], "checks": ["practised"]}, "it has not passed practised"),
        ({"recipes": ["paper"], "acceptance": True}, "the hospital has not accepted it"),
    ],
)
def test_change_outside_the_plan_waits_for_a_second_person(api: Api, plan: dict[str, Any], why: str) -> None:
    write(api, plan)
    first = assign(api, "ada")
    assert (first.status_code, first.json()["type"]) == (409, "urn:locum:problem:second-signature-needed")
    assert why in first.json()["detail"]
    assert api.client.get(SERVING).json()["assignment"] is None
    # The same person again is no second one.
    assert assign(api, "ada").status_code == 409
    (waiting,) = api.client.get(f"{SERVING}/plan").json()["waiting"]
    assert (waiting["actor"], waiting["reason"]) == ("ada", "ada looked")
    assert assign(api, "bert").status_code == 200
    entry = api.client.get(SERVING).json()["assignment"]
    assert entry["actor"] == "bert"
    assert why in entry["reason"]
    assert "first signed by ada: ada looked" in entry["reason"]
    assert api.client.get(f"{SERVING}/plan").json()["waiting"] == []
    with api.context.database.read() as session:
        rows = session.scalars(select(AuditRow.action).where(AuditRow.action.like("plan.%"))).all()
    assert rows == ["plan.written", "plan.signed"]


def test_days_between_changes_count_and_a_rollback_is_always_allowed(api: Api) -> None:
    write(api, {"recipes": ["paper", "federation"], "every_days": 30})
    assert assign(api, "ada", version=1).status_code == 200
    soon = assign(api, "ada")
    assert soon.status_code == 409
    assert "30 days" in soon.json()["detail"]
    assert assign(api, "bert").status_code == 200
    tag = api.client.get(SERVING).headers["etag"]
    back = {"actor": "ada", "reason": "masks were worse"}
    answer = api.client.post(f"{SERVING}/rollback", json=back, headers={"If-Match": tag})
    assert answer.status_code == 200
    write(api, None)
    assert api.client.get(f"{SERVING}/plan").json()["plan"] is None
    assert assign(api, "ada").status_code == 200
