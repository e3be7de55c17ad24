"""Requests and the rows of the audit trail that they leave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from service.audit import trail
from service.audit.dicom import audit_message
from service.database import Hospital
from service.http.audit import Audited, AuditedRoute
from service.identity import keys
from tests.helpers.service.adapted_store import FIRST, REFUSED, publish_adapted, publish_space, record_job
from tests.helpers.service.routes import every_route, operations

# They read no patient's data: models, settings, states of jobs, and counts. They are stated, since no route
# says which of its data are a patient's.
WITHOUT_ROW = {
    # A session that begins has its row from its own transaction.
    *((method, "/session") for method in ("GET", "POST", "DELETE")),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("GET", "/models/{model}/versions/{version}"),
    ("GET", "/models/{model}/versions/{version}/report"),
    ("GET", "/models/{model}/versions/{version}/card"),
    ("GET", "/models/{model}/versions/{version}/card.html"),
    ("GET", "/lineage"),
    ("GET", "/hospitals"),
    ("GET", "/hospitals/{hospital}"),
    ("GET", "/hospitals/{hospital}/serving/{model}"),
    ("GET", "/hospitals/{hospital}/serving/{model}/history"),
    ("GET", "/hospitals/{hospital}/serving/{model}/key-usage"),
    ("GET", "/hospitals/{hospital}/serving/{model}/plan"),
    ("GET", "/hospitals/{hospital}/serving/{model}/shadow"),
    ("GET", "/watch"),
    ("GET", "/hospitals/{hospital}/watch/{model}"),
    ("GET", "/hospitals/{hospital}/observations"),
    ("GET", "/hospitals/{hospital}/observations.csv"),
    ("GET", "/hospitals/{hospital}/answers"),
    ("GET", "/hospitals/{hospital}/report"),
    ("GET", "/hospitals/{hospital}/report.html"),
    ("GET", "/hospitals/{hospital}/corrections"),
    ("GET", "/hospitals/{hospital}/corrections/summary"),
    ("GET", "/hospitals/{hospital}/corrections/{request}"),
    ("GET", "/hospitals/{hospital}/kept-answers"),
    ("GET", "/hospitals/{hospital}/cohorts"),
    ("GET", "/hospitals/{hospital}/cohorts/{cohort}"),
    ("GET", "/jobs"),
    ("GET", "/jobs/{job}"),
    ("GET", "/jobs/{job}/events"),
    ("GET", "/jobs/{job}/checks"),
    ("GET", "/jobs/{job}/acceptance"),
    ("GET", "/hospitals/{hospital}/acceptances"),
    ("GET", "/keys"),
    ("GET", "/pacs"),
    ("GET", "/monailabel/info/"),
    ("GET", "/monailabel/session/{session}"),
    ("POST", "/monailabel/activelearning/{strategy}"),
}


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_space(store, publish_bright)
    found = start(store, auth="keys")
    now = datetime.now(UTC)
    with found.context.database.write() as session:
        session.add(Hospital(id="north", name="north", site=None, created_at=now, updated_at=now))
        session.flush()
        _, key = keys.create(session, "ada", "approver", "north")
    found.client.headers["Authorization"] = f"Bearer {key}"
    return found


def rows_after(api: Any, act: Callable[[], httpx.Response]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """The answer, and the rows that the request left, verified."""
    with api.context.database.read() as session:
        before = trail.head(session).number
    answer = act()
    with api.context.database.snapshot() as session:
        trail.verify(session)
        return answer, list(trail.rows(session, before + 1))


def test_every_operation_has_rows_or_is_listed_without() -> None:
    found = operations()
    assert {each for each, route in found.items() if Audited.of(route.endpoint) is None} == WITHOUT_ROW


def test_every_route_that_declares_a_row_writes_it() -> None:
    declaring = [route for route in every_route() if Audited.of(route.endpoint) is not None]
    assert [route.path for route in declaring if not isinstance(route, AuditedRoute)] == []


def test_segmented_scan_leaves_a_row_with_scan_version_and_request(
    api: Any, make_png: Callable[..., bytes], picture: Any
) -> None:
    scan = make_png(picture)
    answer, rows = rows_after(api, lambda: api.segment(scan, name="DOE^JOHN.png", hospital="north"))
    assert answer.status_code == 200
    # The hospital's first scan: what it is served without a decision is a row of its own.
    kept, row = rows
    assert (kept["actor"], kept["action"]) == ("service", "version.kept")
    assert kept["version"] == row["version"]
    assert (row["actor"], row["action"], row["outcome"]) == ("key:ada@north", "scan.segmented", 200)
    assert row["scan"] == f"sha256:{hashlib.sha256(scan).hexdigest()}"
    assert row["version"] == api.store.open("bright@1").digest
    assert (row["hospital"], row["request"]) == ("north", answer.headers["locum-request"])
    assert "DOE" not in str(row)


def test_stored_scan_and_its_deletion_leave_rows_without_its_name(
    api: Any, make_png: Callable[..., bytes], picture: Any
) -> None:
    scan = make_png(picture)
    cohort = api.client.post("/hospitals/north/cohorts").json()["id"]
    path = f"/hospitals/north/cohorts/{cohort}/scans/DOE^JOHN/1.png"
    _, stored = rows_after(api, lambda: api.client.put(path, content=scan))
    _, deleted = rows_after(api, lambda: api.client.delete(path))
    rows = stored + deleted
    assert [row["action"] for row in rows] == ["scan.stored", "scan.deleted"]
    assert rows[0]["scan"] == f"sha256:{hashlib.sha256(scan).hexdigest()}"
    assert {row["details"]["cohort"] for row in rows} == {cohort}
    assert "DOE" not in str(rows)


def test_look_at_a_mask_leaves_a_row_each_time_and_so_does_an_unknown_one(
    api: Any, make_png: Callable[..., bytes], picture: Any
) -> None:
    api.segment(make_png(picture), hospital="north")
    (newest,) = api.client.get("/hospitals/north/observations", params={"limit": 1}).json()["observations"]
    for number, status in ((newest["id"], 200), (newest["id"], 200), (newest["id"] + 1, 404)):
        address = f"/hospitals/north/observations/{number}/looked"
        answer, (row,) = rows_after(api, partial(api.client.put, address))
        assert (answer.status_code, row["outcome"]) == (status, status)
        assert (row["action"], row["actor"]) == ("observation.looked", "key:ada@north")
        assert (row["hospital"], row["details"]) == ("north", {"observation": str(number)})
        assert "110103" in audit_message(row)


def test_override_and_refusal_of_the_gate_are_rows(api: Any, publish_bright: Any) -> None:
    candidate = publish_adapted(api.store.root, publish_bright, api.store.open("bright@1"), "north", FIRST)
    job = record_job(api.context, candidate, REFUSED)
    _, (card,) = rows_after(api, lambda: api.client.get(f"/jobs/{job}/card"))
    # The job's hospital, since the path names none.
    assert (card["action"], card["hospital"]) == ("card.read", "north")

    def assign(**more: bool) -> Callable[[], httpx.Response]:
        body = {"version": "bright.at-north@1", "reason": "seen", **more}
        headers = {"If-Match": '"0"'}
        return lambda: api.client.put("/hospitals/north/serving/bright", json=body, headers=headers)

    answer, (refused,) = rows_after(api, assign())
    assert (answer.status_code, refused["action"], refused["outcome"]) == (
        409,
        "version.assigned.refused",
        409,
    )
    answer, (made,) = rows_after(api, assign(override=True))
    assert (answer.status_code, made["action"], made["version"]) == (
        200,
        "version.assigned",
        candidate.digest,
    )
    assert made["details"]["override"] is True
    assert made["request"] == answer.headers["locum-request"]


def test_missing_role_and_other_hospital_are_rows_and_a_missing_credential_is_not(api: Any) -> None:
    _, (role,) = rows_after(api, lambda: api.client.put("/hospitals/north", json={"name": "x"}))
    _, (other,) = rows_after(api, lambda: api.client.post("/hospitals/south/cohorts"))
    _, (ghost,) = rows_after(api, lambda: api.client.get(f"/jobs/{'d' * 32}/card"))
    assert [row["outcome"] for row in (role, other, ghost)] == [403, 404, 404]
    assert (other["hospital"], ghost["details"]) == ("south", {"job": "d" * 32})
    _, rows = rows_after(api, lambda: httpx.post(api.client.base_url.join("/segment")))
    assert rows == []


def test_answer_without_a_row_is_not_sent(
    api: Any, make_png: Callable[..., bytes], picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    monkeypatch.setattr(trail, "append_all", full)
    answer = api.segment(make_png(picture))
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
