"""Every operation of openapi.yaml, crossed with every kind of credential."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import yaml
from sqlalchemy import select

from service.audit import trail
from service.database import ApiKey, AuditRow, Caller, Hospital, Role
from service.identity import authentication, keys
from tests.helpers.service.adapted_store import FIRST, PASSED, publish_adapted, publish_space, record_job
from tests.helpers.service.issuer import AUDIENCE, running_issuer
from tests.helpers.service.queued import queued
from tests.helpers.service.routes import Operation, operations, plain_body

REPOSITORY = Path(__file__).resolve().parents[4]

COHORT = "/hospitals/{hospital}/cohorts/{cohort}"
SCAN = f"{COHORT}/scans/{{name}}"
SERVING = "/hospitals/{hospital}/serving/{model}"

# The least role of a hospital that an operation takes, written down again: it is a decision, and a test that
# asked the routes would agree with any mistake. One that is not named here takes an operator.
STATED: dict[Operation, Role | None] = {
    ("GET", "/health/live"): None,
    ("GET", "/health/ready"): None,
    ("GET", "/metrics"): "reader",
    ("POST", "/segment"): "reader",
    ("POST", "/classify"): "reader",
    ("POST", "/display"): "reader",
    ("GET", "/models"): "reader",
    ("GET", "/models/{model}"): "reader",
    ("GET", "/models/{model}/versions/{version}"): "reader",
    ("GET", "/models/{model}/versions/{version}/card"): "reader",
    ("GET", "/models/{model}/versions/{version}/card.html"): "reader",
    ("GET", "/lineage"): "reader",
    ("GET", "/hospitals"): "reader",
    ("GET", "/hospitals/{hospital}"): "reader",
    ("PUT", "/hospitals/{hospital}"): "admin",
    ("GET", SERVING): "reader",
    ("PUT", SERVING): "approver",
    ("POST", f"{SERVING}/rollback"): "approver",
    ("GET", f"{SERVING}/history"): "reader",
    ("GET", f"{SERVING}/key-usage"): "reader",
    ("GET", f"{SERVING}/plan"): "reader",
    ("PUT", f"{SERVING}/plan"): "approver",
    ("GET", f"{SERVING}/shadow"): "reader",
    ("PUT", f"{SERVING}/shadow"): "approver",
    ("POST", f"{SERVING}/shadow/end"): "approver",
    ("GET", "/watch"): "reader",
    ("GET", "/hospitals/{hospital}/watch/{model}"): "reader",
    ("PUT", "/hospitals/{hospital}/watch/{model}"): "approver",
    ("GET", "/hospitals/{hospital}/observations"): "reader",
    ("GET", "/hospitals/{hospital}/observations.csv"): "reader",
    ("DELETE", "/hospitals/{hospital}/observations"): "admin",
    ("PUT", "/hospitals/{hospital}/observations/{observation}/looked"): "reader",
    ("GET", "/hospitals/{hospital}/answers"): "reader",
    ("GET", "/hospitals/{hospital}/report"): "reader",
    ("GET", "/hospitals/{hospital}/report.html"): "reader",
    ("GET", "/hospitals/{hospital}/corrections"): "reader",
    ("GET", "/hospitals/{hospital}/corrections/summary"): "reader",
    ("GET", "/hospitals/{hospital}/corrections/{request}"): "reader",
    ("PUT", "/hospitals/{hospital}/corrections/{request}"): "reader",
    ("DELETE", "/hospitals/{hospital}/corrections/{request}"): "operator",
    ("GET", "/hospitals/{hospital}/kept-answers"): "reader",
    ("PUT", "/hospitals/{hospital}/kept-answers"): "approver",
    ("GET", "/jobs"): "reader",
    ("GET", "/jobs/{job}"): "reader",
    ("GET", "/jobs/{job}/events"): "reader",
    ("GET", "/jobs/{job}/result"): "reader",
    ("DELETE", "/jobs/{job}"): "reader",
    ("DELETE", "/jobs/{job}/files"): "reader",
    ("GET", "/jobs/{job}/checks"): "reader",
    ("GET", "/jobs/{job}/acceptance"): "reader",
    ("POST", "/jobs/{job}/acceptance"): "approver",
    ("GET", "/hospitals/{hospital}/acceptances"): "reader",
    ("PUT", "/hospitals/{hospital}/acceptances"): "approver",
    ("GET", "/session"): "reader",
    ("POST", "/session"): "reader",
    ("DELETE", "/session"): "reader",
    ("GET", "/monailabel/info/"): "reader",
    ("PUT", "/monailabel/session/"): "reader",
    ("GET", "/monailabel/session/{session}"): "reader",
    ("DELETE", "/monailabel/session/{session}"): "reader",
    ("GET", "/monailabel/datastore/"): "reader",
    ("PUT", "/monailabel/datastore/"): "reader",
    ("PUT", "/monailabel/datastore/image"): "reader",
    ("DELETE", "/monailabel/datastore/"): "reader",
    ("DELETE", "/monailabel/datastore/image"): "reader",
    ("POST", "/monailabel/activelearning/{strategy}"): "reader",
    ("GET", "/monailabel/datastore/image"): "reader",
    ("PUT", "/monailabel/datastore/label"): "reader",
    ("POST", "/monailabel/infer/{model}"): "reader",
    ("GET", "/keys"): "admin",
    ("POST", "/keys"): "admin",
    ("POST", "/keys/{key}/rotate"): "admin",
    ("DELETE", "/keys/{key}"): "admin",
}
LEAST: dict[Operation, Role | None] = {
    operation: STATED.get(operation, "operator") for operation in operations()
}
# A federation operator has no role of a hospital: it sees what is published, and no patient's data. A card of
# a version says what hospitals made of it.
FEDERATION = {
    operation
    for operation in LEAST
    if operation[1].startswith(("/models", "/lineage", "/session")) and "/card" not in operation[1]
}
LADDER: tuple[Role, ...] = ("reader", "operator", "approver", "admin")

# A body where the plain one is not valid, or asks for nothing.
BODIES: dict[Operation, Any] = {
    ("PUT", f"{SERVING}/plan"): {"plan": None, "reason": "because"},
    ("POST", "/hospitals/{hospital}/adaptations"): {"cohort": "c" * 32},
    ("POST", "/hospitals/{hospital}/acceptances"): {"cohort": "c" * 32},
    ("PATCH", COHORT): {"name": "named"},
    ("POST", f"{COHORT}/pacs"): {"pacs": "main", "query": {"Modality": "CT"}},
    ("POST", "/hospitals/{hospital}/corrections/pacs"): {"pacs": "main", "query": {"StudyDate": "2026"}},
    ("POST", "/keys"): {"name": "k", "role": "reader", "hospital": "north"},
}


@cache
def described() -> dict[Operation, dict[str, Any]]:
    paths = yaml.safe_load((REPOSITORY / "openapi.yaml").read_text())["paths"]
    return {(method.upper(), path): one for path, methods in paths.items() for method, one in methods.items()}


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_bright(store)
    found = start(store, auth="keys", monailabel="prefix")
    now = datetime.now(UTC)
    with found.context.database.write() as session:
        for name in ("north", "south"):
            session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
    return found


@pytest.fixture(scope="module")
def credentials(api: Any) -> dict[str, str]:
    """One key per role at `north`, one of another hospital, one expired, one revoked."""
    made = {}
    with api.context.database.write() as session:
        for role in get_args(Role):
            hospital = None if role == "federation" else "north"
            made[role] = keys.create(session, role, role, hospital)[1]
        made["other"] = keys.create(session, "other", "admin", "south")[1]
        past = datetime.now(UTC) - timedelta(hours=1)
        made["expired"] = keys.create(session, "expired", "admin", None, past)[1]
        row, made["revoked"] = keys.create(session, "revoked", "admin", None)
        keys.revoke(session, row.id)
    return made


def ask(
    api: Any, operation: Operation, key: str | None, hospital: str = "north", **headers: str
) -> httpx.Response:
    names = {"cohort": "c" * 32, "job": "d" * 32, "key": "0" * 12, "name": "a.png", "model": "bright"}
    names |= {"session": "e" * 32, "strategy": "random", "pacs": "main", "check": "f" * 32}
    names |= {"hospital": hospital, "version": "1", "observation": "1"}
    path = operation[1].format_map(defaultdict(lambda: "a", names))
    sent = dict(headers) if key is None else {"Authorization": f"Bearer {key}", **headers}
    # That of a session.
    api.client.cookies.clear()
    body = BODIES[operation] if operation in BODIES else plain_body(operations()[operation])
    return api.client.request(operation[0], path, json=body, headers=sent)  # type: ignore[no-any-return]


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


def test_description_has_the_operations_of_the_routes_and_no_other_is_stated() -> None:
    assert set(described()) == set(operations()) >= {*STATED, *BODIES}


@pytest.mark.parametrize("operation", list(LEAST), ids=" ".join)
def test_description_names_the_roles_of_the_matrix(operation: Operation) -> None:
    found = described()[operation]
    if LEAST[operation] is None:
        assert "security" not in found
        return
    roles = [LEAST[operation], *(["federation"] if operation in FEDERATION else [])]
    assert found["security"] == [{"bearer": roles}]
    assert {"401", "403"} <= set(found["responses"])


@pytest.mark.parametrize("operation", [one for one, least in LEAST.items() if least], ids=" ".join)
def test_request_without_a_valid_credential_is_401(
    api: Any, credentials: dict[str, str], operation: Operation
) -> None:
    unknown = credentials["admin"][:-1] + ("A" if credentials["admin"][-1] != "A" else "B")
    expected = {
        None: "credential-missing",
        "eyJhbGciOiJub25lIn0.e30.": "credential-missing",
        unknown: "key-not-valid",
        credentials["expired"]: "key-not-valid",
        credentials["revoked"]: "key-not-valid",
    }
    for key, slug in expected.items():
        answer = ask(api, operation, key)
        assert kind(answer) == (401, slug)
        assert answer.headers["www-authenticate"] == 'Bearer realm="locum"'
    basic = ask(api, operation, None, Authorization=f"Basic {credentials['admin']}")
    assert kind(basic) == (401, "credential-missing")


@pytest.mark.parametrize("operation", [one for one, least in LEAST.items() if least], ids=" ".join)
def test_role_below_the_least_is_403_and_the_least_is_not(
    api: Any, credentials: dict[str, str], operation: Operation
) -> None:
    least = LEAST[operation]
    assert least is not None
    allowed = {*LADDER[LADDER.index(least) :], *(["federation"] if operation in FEDERATION else [])}
    for role in get_args(Role):
        answer = ask(api, operation, credentials[role])
        if role in allowed:
            assert answer.status_code not in (401, 403), (role, answer.text)
        else:
            assert kind(answer) == (403, "role-missing"), role


@pytest.mark.parametrize("operation", [one for one in LEAST if "{hospital}" in one[1]], ids=" ".join)
def test_another_hospital_is_answered_as_one_that_does_not_exist(
    api: Any, credentials: dict[str, str], operation: Operation
) -> None:
    def seen(hospital: str) -> tuple[int, Any]:
        answer = ask(api, operation, credentials["other"], hospital, **{"If-Match": '"0"'})
        body = answer.json()
        del body["instance"]
        return answer.status_code, {name: str(text).replace(hospital, "-") for name, text in body.items()}

    assert seen("north") == seen("nowhere")
    assert seen("north")[0] == 404


def test_actor_of_a_decision_is_the_caller(api: Any, credentials: dict[str, str]) -> None:
    def decide(sequence: int, **body: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {credentials['approver']}", "If-Match": f'"{sequence}"'}
        content = {"version": 1, "reason": "because", **body}
        answer = api.client.put("/hospitals/north/serving/bright", json=content, headers=headers)
        return answer  # type: ignore[no-any-return]

    first = decide(0)
    assert (first.status_code, first.json()["actor"]) == (200, "key:approver@north")
    second = decide(first.json()["sequence"], actor="key:approver@north")
    assert second.json()["actor"] == "key:approver@north"
    forged = decide(second.json()["sequence"], actor="Prof. Dr. Chief")
    assert kind(forged) == (422, "invalid-request")
    assert "key:approver@north" in forged.json()["detail"]


def test_reader_cancels_and_deletes_only_the_jobs_of_its_own_scans(
    api: Any, credentials: dict[str, str]
) -> None:
    def made(kind: str, key: str) -> str:
        caller = Caller(f"key:{key}@north", frozenset({"reader"}), frozenset({"north"}))
        fields = {"hospital": "north", "model": "bright", "parent": "", "cohort": None, "options": {}}
        with api.context.for_caller(caller).database.write() as session:
            return str(queued(session, api.settings, kind=kind, **fields).id)

    def delete(job: str, role: str, files: str = "") -> httpx.Response:
        headers = {"Authorization": f"Bearer {credentials[role]}"}
        return api.client.delete(f"/jobs/{job}{files}", headers=headers)  # type: ignore[no-any-return]

    own, others, adaptation = made("segment", "reader"), made("segment", "ada"), made("adaptation", "reader")
    assert kind(delete(own, "reader", "/files")) == (409, "job-not-over")
    assert (delete(own, "reader").status_code, delete(own, "reader", "/files").status_code) == (200, 204)
    for job in (others, adaptation):
        assert kind(delete(job, "reader")) == kind(delete(job, "reader", "/files")) == (403, "role-missing")
        assert delete(job, "operator").status_code == 200


def test_two_person_rule_rejects_the_caller_that_adapted(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Any
) -> None:
    publish_space(tmp_path, publish_bright)
    api = start(tmp_path, auth="keys", two_person_rule=True)
    now = datetime.now(UTC)
    secrets = {}
    with api.context.database.write() as session:
        session.add(Hospital(id="north", name="north", site=None, created_at=now, updated_at=now))
        session.flush()
        for name in ("ada", "ben"):
            row, secrets[name] = keys.create(session, name, "approver", "north")
            caller = keys.caller_with(row)
            assert caller.actor == f"key:{name}@north"
    adapting = Caller("key:ada@north", frozenset({"approver"}), frozenset({"north"}))
    candidate = publish_adapted(tmp_path, publish_bright, api.store.open("bright@1"), "north", FIRST)
    record_job(api.context.for_caller(adapting), candidate, PASSED)

    def assign(name: str, **more: bool) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secrets[name]}", "If-Match": '"0"'}
        body = {"version": "bright.at-north@1", "reason": "because", **more}
        return api.client.put("/hospitals/north/serving/bright", json=body, headers=headers)  # type: ignore[no-any-return]

    assert kind(assign("ada")) == (403, "second-person-needed")
    assert kind(assign("ada", override=True)) == (403, "second-person-needed")
    assert assign("ben").json()["actor"] == "key:ben@north"


def test_two_person_rule_rejects_a_second_key_of_one_admin_and_a_version_without_a_job(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Any
) -> None:
    publish_space(tmp_path, publish_bright)
    api = start(tmp_path, auth="keys", two_person_rule=True)
    now = datetime.now(UTC)
    with api.context.database.write() as session:
        session.add(Hospital(id="north", name="north", site=None, created_at=now, updated_at=now))
        session.flush()
        row, boss = keys.create(session, "boss", "admin", "north")
        ben = keys.create(session, "ben", "approver", "north")[1]
    adapting = api.context.for_caller(keys.caller_with(row))
    parent = api.store.open("bright@1")
    record_job(adapting, publish_adapted(tmp_path, publish_bright, parent, "north", FIRST), PASSED)

    def send(method: str, path: str, secret: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}", **more.pop("headers", {})}
        return api.client.request(method, path, headers=headers, **more)  # type: ignore[no-any-return]

    def assign(secret: str, version: int, **more: bool) -> httpx.Response:
        body = {"version": f"bright.at-north@{version}", "reason": "because", **more}
        serving = "/hospitals/north/serving/bright"
        return send("PUT", serving, secret, json=body, headers={"If-Match": '"0"'})

    made = {}
    for name in ("second-me", "third-me"):
        body = {"name": name, "role": "approver", "hospital": "north"}
        made[name] = send("POST", "/keys", boss, json=body).json()
    rotated = send("POST", f"/keys/{made['third-me']['id']}/rotate", boss).json()
    for secret in (boss, made["second-me"]["key"], rotated["key"]):
        assert kind(assign(secret, 1)) == (403, "second-person-needed")
        assert kind(assign(secret, 1, override=True)) == (403, "second-person-needed")
    # As after a restored database.
    publish_adapted(tmp_path, publish_bright, parent, "north", FIRST + 1)
    refused = assign(ben, 2, override=True)
    assert kind(refused) == (403, "second-person-needed")
    assert "nothing records who adapted" in refused.json()["detail"]
    assert assign(ben, 1).status_code == 200


def test_name_of_another_hospital_s_key_is_free(api: Any, credentials: dict[str, str]) -> None:
    """`other` is a key of south. The same answer as for a name that no key has."""
    admin = {"Authorization": f"Bearer {credentials['admin']}"}
    for name, status in (("other", 201), ("unused", 201), ("reader", 409), ("federation", 201)):
        body = {"name": name, "role": "reader", "hospital": "north"}
        assert api.client.post("/keys", json=body, headers=admin).status_code == status


def test_key_is_noted_when_used_and_rejected_once_revoked(api: Any, credentials: dict[str, str]) -> None:
    admin = {"Authorization": f"Bearer {credentials['admin']}"}
    made = api.client.post(
        "/keys", json={"name": "pacs", "role": "reader", "hospital": "north"}, headers=admin
    )
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    own = {"Authorization": f"Bearer {made.json()['key']}"}
    assert api.client.get("/models", headers=own).status_code == 200
    (shown,) = (
        one for one in api.client.get("/keys", headers=admin).json()["keys"] if one["id"] == made.json()["id"]
    )
    assert shown["last_used_at"] is not None
    assert shown["created_by"] == "key:admin@north"
    assert "key" not in shown
    rotated = api.client.post(f"/keys/{shown['id']}/rotate", headers=admin).json()
    assert api.client.delete(f"/keys/{shown['id']}", headers=admin).json()["valid"] is False
    assert kind(api.client.get("/models", headers=own)) == (401, "key-not-valid")
    successor = {"Authorization": f"Bearer {rotated['key']}"}
    assert api.client.get("/models", headers=successor).status_code == 200


def test_name_of_a_key_leaves_room_for_its_actor(api: Any, credentials: dict[str, str]) -> None:
    admin = {"Authorization": f"Bearer {credentials['admin']}"}
    for length, status in ((130, 201), (131, 422)):
        body = {"name": "n" * length, "role": "reader", "hospital": "north"}
        assert api.client.post("/keys", json=body, headers=admin).status_code == status


def test_token_of_the_provider_and_key_are_taken_together(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Any
) -> None:
    publish_bright(tmp_path)
    with running_issuer() as issuer:
        api = start(tmp_path, auth="both", oidc_issuer=issuer.url, oidc_audience=AUDIENCE)
        now = datetime.now(UTC)
        with api.context.database.write() as session:
            for name in ("north", "south"):
                session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
            session.flush()
            key = keys.create(session, "pacs", "reader", "south")[1]

        def get(path: str, bearer: str) -> httpx.Response:
            return api.client.get(path, headers={"Authorization": f"Bearer {bearer}"})  # type: ignore[no-any-return]

        token = issuer.token()
        assert get("/hospitals/north/cohorts", token).status_code == 200
        assert kind(get("/hospitals/south/cohorts", token)) == (404, "hospital-unknown")
        assert kind(get("/keys", token)) == (403, "role-missing")
        assert kind(get("/models", issuer.token(aud="mail"))) == (401, "token-not-valid")
        assert get("/hospitals/south", key).status_code == 200
        created = api.client.post("/hospitals/north/cohorts", headers={"Authorization": f"Bearer {token}"})
        assert created.status_code == 201
        with api.context.database.snapshot() as session:
            assert list(trail.rows(session))[-1]["actor"] == "oidc:ada"
    down = start(tmp_path, auth="oidc", oidc_issuer="http://127.0.0.1:1", oidc_audience=AUDIENCE)
    answer = down.client.get("/models", headers={"Authorization": f"Bearer {token}"})
    assert kind(answer) == (503, "provider-unavailable")
    assert answer.headers["retry-after"] == "10"
    assert kind(down.client.get("/models", headers={"Authorization": f"Bearer {key}"})) == (
        401,
        "credential-missing",
    )


def test_broken_body_without_a_credential_is_401(api: Any) -> None:
    answer = api.client.put("/hospitals/north", content=b"{", headers={"Content-Type": "application/json"})
    assert kind(answer) == (401, "credential-missing")
    assert kind(api.client.get("/no/such/path")) == (401, "credential-missing")


def test_no_key_is_stored_or_logged(api: Any, credentials: dict[str, str]) -> None:
    content = b"".join(path.read_bytes() for path in api.settings.state_dir.glob("locum.db*"))
    with api.context.database.read() as session:
        assert session.query(ApiKey).count() >= len(credentials)
    for key in credentials.values():
        assert key.split("_", 2)[2].encode() not in content


def test_details_of_readiness_are_for_an_admin_of_every_hospital(
    api: Any, credentials: dict[str, str]
) -> None:
    with api.context.database.write() as session:
        every = keys.create(session, "health", "admin", None)[1]

    def ready(key: str | None) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = api.client.get("/health/ready", headers=headers)
        # The tests' Redis does not answer.
        assert answer.status_code == 503
        return answer.json()["parts"]

    found = ready(every)
    assert (found["queue"]["ok"], "Redis does not answer" in found["queue"]["detail"]) == (False, True)
    for key in (None, "locum_unknown", credentials["admin"], credentials["reader"]):
        shown = ready(key)
        assert {name: part["ok"] for name, part in shown.items()} == {
            name: part["ok"] for name, part in found.items()
        }
        assert {part["detail"] for part in shown.values()} == {
            "works",
            "does not work: the service's log says why",
        }


def test_service_without_authentication_answers_loopback_only(api: Any, start: Callable[..., Any]) -> None:
    open_api = start(api.settings.store)
    app = open_api.app

    async def over(server: tuple[str, int] | None) -> int:
        sent: list[Any] = []
        headers = [(b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/models",
            "raw_path": b"/models",
            "headers": headers,
        }
        scope |= {"query_string": b"", "scheme": "http", "server": server, "client": None, "root_path": ""}
        scope |= {"http_version": "1.1", "asgi": {"version": "3.0"}}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return int(sent[0]["status"])

    def status(server: tuple[str, int] | None) -> int:
        return asyncio.run_coroutine_threadsafe(over(server), open_api.loop).result(30)

    assert [status(("127.0.0.1", 80)), status(("::1", 80)), status(None)] == [200, 200, 200]
    assert [status(("192.0.2.7", 80)), status(("2001:db8::1", 80))] == [403, 403]


@pytest.mark.process
def test_caller_above_the_rate_limit_is_rejected(api: Any, start: Callable[..., Any]) -> None:
    # With an embedded Redis.
    limited = start(api.settings.store, auth="keys", rate_limit="2/hour", redis_url=None)
    with limited.context.database.write() as session:
        secret = keys.create(session, "limited", "reader", None)[1]
        other = keys.create(session, "unlimited", "reader", None)[1]
    for secret_of, status in ((secret, 200), (secret, 200), (secret, 429), (other, 200)):
        answer = limited.client.get("/models", headers={"Authorization": f"Bearer {secret_of}"})
        assert answer.status_code == status
        if status == 429:
            assert answer.json()["type"] == "urn:locum:problem:too-many-requests"
            assert int(answer.headers["Retry-After"]) >= 1
    # Health needs no credential, and is not counted.
    assert limited.client.get("/health/live").status_code == 200


def test_key_that_another_process_revoked_is_rejected_within_the_remembered_time(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "REMEMBERED_SECONDS", 0.3)
    with api.context.database.write() as session:
        row, secret = keys.create(session, "elsewhere", "reader", None)
    sent = {"Authorization": f"Bearer {secret}"}
    assert api.client.get("/models", headers=sent).status_code == 200
    with api.context.database.write() as session:
        keys.revoke(session, row.id)
    time.sleep(0.35)
    assert kind(api.client.get("/models", headers=sent)) == (401, "key-not-valid")


def test_hospitals_admin_shares_its_model_and_does_not_choose_its_site(
    api: Any, credentials: dict[str, str]
) -> None:
    def put(path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {credentials['admin']}", "If-Match": "*"}
        answer: httpx.Response = api.client.put(path, json={"name": "north", **body}, headers=headers)
        return answer

    for site in ("CS", "birch"):
        refused = put("/hospitals/north", site=site, reason="a better model")
        assert kind(refused) == (403, "grant-refused")
    assert put("/hospitals/north", shares_model=True).json()["shares_model"] is True
    # Left out, it stays.
    assert put("/hospitals/north").json()["shares_model"] is True
    with api.context.database.read() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.hospital == "north")).all()
    assert [row.details for row in rows if "shares_model" in (row.details or {})] == [
        {"shares_model": [False, True]}
    ]
    assert put("/hospitals/north", shares_model=False).json()["shares_model"] is False
