"""`/hospitals` and the serving log over HTTP."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from model_store.artefact import Artefact
from model_store.manifest import GRAPH
from model_store.store import Store
from service.database import AuditRow, Hospital
from service.routes import hospitals
from service.routes import serving as serving_routes
from service.serving import assignments
from tests.helpers.service.asking import problem

Publish = Callable[..., Artefact]

WHO = {"actor": "ada", "reason": "better on our validation cases"}


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish) -> Any:
    """On a store with three versions of `bright`, which no test touches."""
    root = tmp_path_factory.mktemp("store")
    fill(root, publish_bright)
    return start(root)


@pytest.fixture
def client(api: Any) -> httpx.Client:
    client: httpx.Client = api.client
    return client


@pytest.fixture
def serving(client: httpx.Client) -> str:
    """`/hospitals/.../serving/bright` of a hospital of the test's own."""
    return register(client)


@pytest.fixture
def root(tmp_path: Path, publish_bright: Publish) -> Path:
    """Another such store, to be withdrawn from and damaged."""
    fill(tmp_path, publish_bright)
    return tmp_path


@pytest.fixture
def own(start: Callable[..., Any], root: Path) -> httpx.Client:
    """A client of an API on `root`."""
    client: httpx.Client = start(root).client
    return client


def fill(root: Path, publish: Publish) -> None:
    for at in (70, 80, 90):
        publish(root, at=at)
    publish(root, "space.part", at=60, part_of="space")


def register(client: httpx.Client) -> str:
    hospital = f"/hospitals/h-{uuid.uuid4().hex}"
    assert client.put(hospital, json={"name": "North General"}).status_code == 201
    return f"{hospital}/serving/bright"


def assign(client: httpx.Client, serving: str, version: int | str, tag: str) -> httpx.Response:
    return client.put(serving, json={"version": version, **WHO}, headers={"If-Match": tag})


def test_hospital_is_registered_changed_and_listed(client: httpx.Client) -> None:
    body = {"name": "South Clinic", "site": "CS"}
    made = client.put("/hospitals/south", json=body)
    assert made.status_code == 201
    changed = client.put("/hospitals/south", json={**body, "name": "South"})
    assert changed.status_code == 200
    found = client.get("/hospitals/south").json()
    assert (found["id"], found["name"], found["site"]) == ("south", "South", "CS")
    assert found["created_at"] == made.json()["created_at"] <= found["updated_at"]
    listed = client.get("/hospitals").json()["hospitals"]
    assert found in listed
    assert [hospital["id"] for hospital in listed] == sorted(hospital["id"] for hospital in listed)


def test_another_site_is_a_decision_with_a_tag_a_reason_and_an_actor(api: Any) -> None:
    client, path = api.client, "/hospitals/west"
    first = client.put(path, json={"name": "West", "site": "CS"}).headers["ETag"]
    body = {"name": "West", "site": "DU", "reason": "registered under the wrong site", "actor": "ada"}
    assert problem(client.put(path, json=body)) == (428, "precondition-required")
    stale = {"If-Match": '"1"'}
    assert problem(client.put(path, json=body, headers=stale)) == (412, "assignment-stale")
    current = {"If-Match": client.get(path).headers["ETag"]}
    assert current["If-Match"] == first
    for missing in ("reason", "actor"):
        part = {name: value for name, value in body.items() if name != missing}
        answer = client.put(path, json=part, headers=current)
        assert (answer.status_code, missing in answer.text) == (422, True)
    assert client.get(path).json()["site"] == "CS"
    changed = client.put(path, json=body, headers=current)
    assert (changed.status_code, changed.json()["site"]) == (200, "DU")
    assert changed.headers["ETag"] != first
    with api.context.database.read() as session:
        query = select(AuditRow).where(AuditRow.hospital == "west", AuditRow.action == "hospital.changed")
        (row,) = session.scalars(query)
    assert row.details == {"site": ["CS", "DU"], "actor": "ada", "reason": "registered under the wrong site"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/hospitals/no spaces", {"name": "N"}),
        ("/hospitals/" + "n" * 65, {"name": "N"}),
        ("/hospitals/n", {}),
        ("/hospitals/n", {"name": " "}),
        ("/hospitals/n", {"name": "N", "sites": "CS"}),
        ("/hospitals/n", {"name": "N" * 201}),
        ("/hospitals/n", {"name": "N\0"}),
        ("/hospitals/n", {"name": "N\nM"}),
        ("/hospitals/n", {"name": "N\u202eM"}),
        ("/hospitals/n", {"name": "N", "site": "C\x1bS"}),
    ],
)
def test_invalid_registration_is_a_422_problem(client: httpx.Client, path: str, body: dict[str, str]) -> None:
    answer = client.put(path, json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/hospitals/n").status_code == 404


def test_stored_hospital_name_that_is_invalid_now_is_still_shown(api: Any) -> None:
    now = datetime.now(UTC)
    with api.context.database.write() as session:
        session.add(Hospital(id="older", name="O\nN", site=None, created_at=now, updated_at=now))
    assert api.client.get("/hospitals/older").json()["name"] == "O\nN"
    assert "O\nN" in [hospital["name"] for hospital in api.client.get("/hospitals").json()["hospitals"]]


def test_concurrent_first_registrations_both_succeed(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, tried = hospitals._put, []

    def second(*asked: Any) -> Any:
        tried.append(asked)
        if len(tried) == 1:
            put(*asked)
            raise IntegrityError("insert", None, Exception("duplicate key"))
        return put(*asked)

    monkeypatch.setattr(hospitals, "_put", second)
    answer = client.put("/hospitals/at-once", json={"name": "At once"})
    assert (answer.status_code, answer.json()["name"], len(tried)) == (200, "At once", 2)


def test_assignment_reason_may_have_several_lines(client: httpx.Client, serving: str) -> None:
    body = {"version": 1, "actor": "ada", "reason": "first\n\tsecond\r\nthird"}
    answer = client.put(serving, json=body, headers={"If-Match": '"0"'})
    assert (answer.status_code, answer.json()["reason"]) == (200, body["reason"])


def test_serving_follows_assignments_and_rollback(client: httpx.Client, serving: str) -> None:
    empty = client.get(serving)
    assert empty.headers["etag"] == '"0"'
    assert (empty.json()["version"], empty.json()["because"]) == (3, "newest")
    assert empty.json()["returns_to"] is None
    first = assign(client, serving, 1, '"0"')
    assert (first.status_code, first.headers["etag"]) == (200, '"2"')
    second = assign(client, serving, 2, '"2"')
    now = client.get(serving)
    assert now.headers["etag"] == second.headers["etag"] == '"3"'
    assert (now.json()["version"], now.json()["because"]) == (2, "assigned")
    assert now.json()["returns_to"] == "bright@1"
    assert now.json()["assignment"]["reason"] == WHO["reason"]
    back = client.post(f"{serving}/rollback", json=WHO, headers={"If-Match": '"3"'})
    assert (back.status_code, back.json()["version"], back.json()["restores"]) == (200, 1, 2)
    assert client.get(serving).json()["version"] == 1
    assert client.get(serving).json()["returns_to"] == "bright@3"
    # What served before the first decision was none, and is returned to all the same.
    first = client.post(f"{serving}/rollback", json=WHO, headers={"If-Match": '"4"'})
    assert (first.status_code, first.json()["version"], first.json()["restores"]) == (200, 3, 1)
    assert (client.get(serving).json()["version"], client.get(serving).json()["because"]) == (3, "assigned")
    entries = client.get(f"{serving}/history").json()["entries"]
    assert [(entry["version"], entry["by_default"]) for entry in entries] == [
        (3, True),
        (1, False),
        (2, False),
        (1, False),
        (3, False),
    ]
    assert (entries[0]["actor"], entries[0]["reason"]) == (
        "service",
        "the newest version; no decision was made",
    )
    assert client.get(serving).json()["returns_to"] is None
    again = client.post(f"{serving}/rollback", json=WHO, headers={"If-Match": '"5"'})
    assert (again.status_code, again.json()["type"]) == (409, "urn:locum:problem:nothing-to-roll-back")


def test_default_that_is_recorded_during_an_assignment_stays(
    api: Any, client: httpx.Client, serving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = serving_routes.serving

    def look_before_another(store: Any, session: Any, hospital: str, *rest: Any) -> Any:
        found = look(store, session, hospital, *rest)
        digest = api.store.open("bright@2").digest
        # It would wait in vain if the store were read under the write lock.
        with api.context.database.write() as other:
            assignments.keep(other, hospital, "bright", version=2, digest=digest)
        return found

    monkeypatch.setattr(serving_routes, "serving", look_before_another)
    assert assign(client, serving, 1, '"0"').status_code == 200
    entries = client.get(f"{serving}/history").json()["entries"]
    assert [(entry["version"], entry["by_default"]) for entry in entries] == [(2, True), (1, False)]


def test_serving_at_an_instant_returns_the_version_in_force(client: httpx.Client, serving: str) -> None:
    times = [datetime.now(UTC)]
    for version, tag in ((1, '"0"'), (2, '"2"')):
        assign(client, serving, version, tag)
        times.append(datetime.now(UTC))
    found = [client.get(serving, params={"at": time.isoformat()}).json() for time in times]
    assert [(answer["version"], answer["because"]) for answer in found] == [
        (3, "newest"),
        (1, "assigned"),
        (2, "assigned"),
    ]
    long_ago = client.get(serving, params={"at": "2001-01-01T00:00:00Z"}).json()
    assert (long_ago["version"], long_ago["because"]) == (None, "nothing")


@pytest.mark.parametrize(
    "at",
    [
        "2001-01-01T00:00:00",
        "yesterday",
        "9999-01-01T00:00:00Z",
        "9999-12-31T23:59:59-14:00",
        "0001-01-01T00:00:00+14:00",
    ],
)
def test_serving_at_an_invalid_or_future_instant_is_422(client: httpx.Client, serving: str, at: str) -> None:
    assert client.get(serving, params={"at": at}).status_code == 422


def test_serving_before_a_withdrawal_returns_the_newest_of_that_time(own: httpx.Client, root: Path) -> None:
    client, serving = own, register(own)
    before = datetime.now(UTC)
    Store(root).withdraw("bright@3", actor="ada", reason="wrong")
    assert client.get(serving).json()["version"] == 2
    assert client.get(serving, params={"at": before.isoformat()}).json()["version"] == 3


def test_serving_marks_a_withdrawn_assigned_version(own: httpx.Client, root: Path) -> None:
    client, serving = own, register(own)
    assign(client, serving, 3, '"0"')
    before = datetime.now(UTC)
    Store(root).withdraw("bright@3", actor="ada", reason="wrong")
    now = client.get(serving).json()
    assert (now["version"], now["withdrawn"]) == (3, True)
    assert client.get(serving, params={"at": before.isoformat()}).json()["withdrawn"] is False


def test_assignment_without_matching_precondition_is_428_or_412(client: httpx.Client, serving: str) -> None:
    body = {"version": 1, **WHO}
    bare = client.put(serving, json=body)
    assert (bare.status_code, bare.headers["etag"]) == (428, '"0"')
    assert client.put(serving, json=body, headers={"If-None-Match": "*"}).status_code == 200
    late = client.put(serving, json=body, headers={"If-None-Match": "*"})
    assert (late.status_code, late.headers["etag"]) == (412, '"2"')
    assert assign(client, serving, 2, '"0"').status_code == 412
    assert client.post(f"{serving}/rollback", json=WHO).status_code == 428
    assert client.post(f"{serving}/rollback", json=WHO, headers={"If-Match": '"9"'}).status_code == 412
    assert len(client.get(f"{serving}/history").json()["entries"]) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"version": 1, "actor": "ada"},
        {"version": 1, "reason": "why"},
        {"version": 1, "actor": "  ", "reason": "why"},
        {"version": 1, "actor": "a\0da", "reason": "why"},
        {"version": 1, "actor": "ada", "reason": "why\0"},
        {"actor": "ada", "reason": "why"},
        {"version": "newest", "actor": "ada", "reason": "why"},
        {"version": 1, "actor": "ada", "reason": "why", "force": True},
    ],
)
def test_assignment_without_version_actor_or_reason_is_422(
    client: httpx.Client, serving: str, body: dict[str, Any]
) -> None:
    assert client.put(serving, json=body, headers={"If-Match": '"0"'}).status_code == 422
    assert client.get(serving).headers["etag"] == '"0"'


def test_assignment_by_digest_finds_the_version(own: httpx.Client, root: Path) -> None:
    client, serving = own, register(own)
    digest = Store(root).open("bright@2").digest
    assert assign(client, serving, digest, '"0"').json()["version"] == 2
    unknown = assign(client, serving, "sha256:" + "0" * 64, '"1"')
    assert unknown.status_code == 404


def test_assignment_of_an_unservable_version_is_rejected(own: httpx.Client, root: Path) -> None:
    client, serving = own, register(own)
    Store(root).withdraw("bright@1", actor="ada", reason="wrong")
    graph = Store(root).open("bright@2").path / GRAPH
    graph.chmod(0o644)
    graph.write_bytes(b"something else")
    answers = {
        "withdrawn": assign(client, serving, 1, '"0"').status_code,
        "damaged": assign(client, serving, 2, '"0"').status_code,
        "unknown": assign(client, serving, 9, '"0"').status_code,
        "part": client.put(
            serving.replace("bright", "space.part"), json={"version": 1, **WHO}, headers={"If-Match": '"0"'}
        ).status_code,
        "model": client.get(serving.replace("bright", "heart")).status_code,
        "hospital": client.get("/hospitals/west/serving/bright").status_code,
    }
    assert answers == {
        "withdrawn": 410,
        "damaged": 503,
        "unknown": 404,
        "part": 409,
        "model": 404,
        "hospital": 404,
    }
    assert client.get(serving).headers["etag"] == '"0"'


def test_rollback_to_a_withdrawn_version_is_410(own: httpx.Client, root: Path) -> None:
    client, serving = own, register(own)
    assign(client, serving, 1, '"0"')
    assign(client, serving, 2, '"2"')
    Store(root).withdraw("bright@1", actor="ada", reason="wrong")
    assert client.post(f"{serving}/rollback", json=WHO, headers={"If-Match": '"3"'}).status_code == 410
    assert client.get(serving).json()["version"] == 2


def test_concurrent_assignments_have_one_200_and_the_rest_412(client: httpx.Client, serving: str) -> None:
    deciders = 6
    barrier = threading.Barrier(deciders)
    statuses: list[int] = []

    def decide() -> None:
        with httpx.Client(base_url=client.base_url) as mine:
            barrier.wait()
            statuses.append(assign(mine, serving, 1, '"0"').status_code)

    threads = [threading.Thread(target=decide) for _ in range(deciders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [412] * (deciders - 1)


def test_serving_log_is_shared_by_two_apis(start: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    first = start(root, database_url=url).client
    serving = register(first)
    assign(first, serving, 2, '"0"')
    second = start(root, database_url=url).client
    assert second.get(serving).json()["version"] == 2
    # And both see what either does.
    assert assign(second, serving, 1, '"2"').status_code == 200
    assert first.get(serving).headers["etag"] == '"3"'


def test_history_times_are_utc_and_increasing(client: httpx.Client, serving: str) -> None:
    for version, tag in ((1, '"0"'), (2, '"2"'), (3, '"3"')):
        assert assign(client, serving, version, tag).status_code == 200
    times = [
        datetime.fromisoformat(entry["at"]) for entry in client.get(f"{serving}/history").json()["entries"]
    ]
    assert times == sorted(set(times))
    assert {time.utcoffset() for time in times} == {timedelta(0)}
