"""To a caller that may see one hospital alone, every other hospital's things do not exist, on any route."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from model_store.artefact import Artefact
from service.database import (
    Assignment,
    Caller,
    CohortMask,
    Correction,
    Hospital,
    Job,
    KeyUsage,
    Observation,
    Shadow,
    Watch,
)
from service.http.dependencies import caller
from service.jobs.files import JobFolder, StoredResult
from service.watch.silence import Arrivals
from tests.helpers.service.adapted_store import FIRST, PASSED, publish_adapted, publish_space, record_job
from tests.helpers.service.queued import queued
from tests.helpers.service.routes import Operation, operations, plain_body

NORTH = Caller("north's key", frozenset({"admin"}), frozenset({"north"}))
WHO = {"actor": "ada", "reason": "because"}


@dataclass(frozen=True)
class Things:
    """What belongs to a hospital: a cohort with a scan and its mask, jobs, and an adapted version."""

    hospital: str
    cohort: str
    job: str
    scan_job: str
    queued: str
    key: str
    viewer_scan: str
    observation: str
    answer: str

    @property
    def model(self) -> str:
        return f"bright.at-{self.hospital}"

    def named(self, text: str) -> str:
        """The text with placeholders for what is this hospital's."""
        for name in ("cohort", "scan_job", "queued", "job", "key", "viewer_scan", "observation", "answer"):
            text = text.replace(getattr(self, name), f"<{name}>")
        return text.replace(self.hospital, "<hospital>")


GHOST = Things(
    "nowhere", "c" * 32, "d" * 32, "e" * 32, "f" * 32, "0" * 12, "1" * 32, "900000000009", "2" * 32
)


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_space(store, publish_bright)
    pacs = tmp_path_factory.mktemp("pacs") / "pacs.yaml"
    server = {"url": "https://pacs.example/rs", "hospitals": ["north", "south"], "store": True}
    pacs.write_text(yaml.safe_dump({"main": server}))
    return start(store, monailabel="prefix", pacs=pacs)


@pytest.fixture(scope="module")
def scan(make_png: Callable[..., bytes], picture: Any) -> bytes:
    return make_png(picture)


@pytest.fixture(scope="module")
def mask(make_png: Callable[..., bytes], picture: Any) -> bytes:
    return make_png((picture > 100).astype(np.uint8))


@pytest.fixture(scope="module")
def south(api: Any, publish_bright: Any, scan: bytes, mask: bytes) -> Things:
    return furnish(api, publish_bright, "south", scan, mask)


@pytest.fixture(scope="module")
def north(api: Any, publish_bright: Any, scan: bytes, mask: bytes) -> Things:
    return furnish(api, publish_bright, "north", scan, mask)


def furnish(api: Any, publish: Callable[..., Artefact], hospital: str, scan: bytes, mask: bytes) -> Things:
    client: httpx.Client = api.client
    assert client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    cohort = client.post(f"/hospitals/{hospital}/cohorts").json()["id"]
    scans = f"/hospitals/{hospital}/cohorts/{cohort}/scans"
    assert client.put(f"{scans}/a.png", content=scan).status_code == 201
    assert client.put(f"{scans}/a.png/mask", content=mask).status_code == 201
    candidate = publish_adapted(api.store.root, publish, api.store.open("bright@1"), hospital, FIRST)
    job = record_job(api.context, candidate, PASSED)
    serving = f"/hospitals/{hospital}/serving/bright"
    for version in (1, f"bright.at-{hospital}@1"):
        state = client.get(serving).headers["etag"]
        decided = client.put(serving, json={"version": version, **WHO}, headers={"If-Match": state})
        assert decided.status_code == 200, decided.text
    space = api.store.open("bright@1")
    with api.context.database.write() as session:
        scan_job, waiting = (
            queued(
                session,
                api.settings,
                kind="scan",
                hospital=hospital,
                model="bright",
                parent=space.digest,
            )
            for _ in range(2)
        )
        scan_job.state = "succeeded"
        day = datetime.now(UTC).date()
        usage = {"model": "bright", "version": 1, "scans": 1, "shares": [0.5, 0.5]}
        session.add(KeyUsage(hospital=hospital, digest=space.digest, day=day, **usage))
        seen = observed(hospital, space.digest)
        session.add(seen)
        session.add(watched(seen))
        session.add(corrected(seen))
        version = {"version": space.digest, "artefact": "bright@1", "every": 10_000}
        about = {"hospital": hospital, "model": "bright", "actor": "ada", "reason": "test"}
        session.add(Shadow(**about, **version, began=datetime.now(UTC)))
    number = str(seen.id)
    JobFolder(api.settings.open_files(), scan_job.id).write_result(StoredResult(b"mask", "image/png", {}))
    JobFolder(api.settings.open_files(), job).write(JobFolder.PREVIEW, b"a picture")
    key = client.post("/keys", json={"name": f"of {hospital}", "role": "reader", "hospital": hospital})
    # It belongs to the caller that sends it: to north's key, and else to the client without one.
    with acting(api, NORTH) if hospital == "north" else nullcontext(client) as sender:
        sent = sender.put("/monailabel/session/", files={"files": ("s.png", scan)})
    own = (key.json()["id"], sent.json()["session_id"], number, seen.request)
    return Things(hospital, cohort, job, scan_job.id, waiting.id, *own)


def watched(answer: Observation) -> Watch:
    """The watch that begins with an answer."""
    return Watch(
        hospital=answer.hospital,
        model=answer.model,
        scanner="",
        state="routine",
        version=answer.version,
        software="",
        locum="0",
        began=answer.at,
        answers=1,
        last_at=answer.at,
        day=answer.at.date(),
        today=1,
        arrivals=asdict(Arrivals()),
        streams={},
        usual=b"",
    )


def corrected(answer: Observation) -> Correction:
    """That an answer was right."""
    return Correction(
        observation=answer.id,
        hospital=answer.hospital,
        model=answer.model,
        version=answer.version,
        request=answer.request,
        answered_at=answer.at,
        at=answer.at,
        way="http",
        actor="anonymous",
        accepted=True,
        state="measured",
    )


def observed(hospital: str, version: str) -> Observation:
    """An answer for a hospital, with a number that occurs nowhere else."""
    return Observation(
        id=900_000_000_001 + len(hospital) + (hospital == "north"),
        at=datetime.now(UTC),
        hospital=hospital,
        model="bright",
        version=version,
        graph=version,
        request=f"answer-of-{hospital}",
        way="http",
        actor="anonymous",
        scan="0" * 64,
        size=[32, 32],
        unlike=0,
        seconds=0.1,
        warnings=[],
        precision="float32",
        provider="CPU",
        locum="0",
        usual=True,
    )


@contextmanager
def acting(api: Any, who: Caller) -> Iterator[httpx.Client]:
    """A client for which the one dependency says who it is."""
    api.app.dependency_overrides[caller] = lambda: who
    try:
        yield api.client
    finally:
        del api.app.dependency_overrides[caller]


def requests(things: Things, scan: bytes, mask: bytes) -> list[tuple[Operation, dict[str, Any]]]:
    """Every operation that concerns what is a hospital's, with what differs from the plain request to it.

    An operation that this module does not name is sent the plain request.
    """
    hospital, cohort = "/hospitals/{hospital}", "/hospitals/{hospital}/cohorts/{cohort}"
    serving, first = "/hospitals/{hospital}/serving/{model}", {"If-Match": '"0"'}
    # After the two assignments of `furnish`.
    present = {"If-Match": '"2"'}
    file = {"scan": ("s.png", scan)}
    viewers, infer = "/monailabel", "/monailabel/infer/{model}"
    form = {"params": (None, json.dumps({"hospital": things.hospital}))}
    named = {"version": f"{things.model}@1", **WHO}
    series = {"study": "1.2", "series": "1.3"}
    given: list[tuple[Operation, dict[str, Any]]] = [
        (("PUT", hospital), {"json": {"name": "renamed"}}),
        (("PATCH", cohort), {"json": {"name": "named"}}),
        (("PUT", f"{cohort}/scans/{{name}}"), {"content": scan}),
        (("PUT", f"{cohort}/scans/{{name}}/mask"), {"content": mask}),
        (("PUT", f"{hospital}/corrections/{{request}}"), {"files": {"mask": ("m.png", mask)}}),
        (("POST", f"{hospital}/adaptations"), {"json": {"cohort": things.cohort}}),
        (("POST", f"{hospital}/adaptations"), {"files": {"scans": ("s.png", scan)}}),
        (("POST", f"{hospital}/quantisations"), {"json": {"cohort": things.cohort}}),
        (("POST", f"{hospital}/acceptances"), {"json": {"cohort": things.cohort}}),
        (("GET", f"{hospital}/answers"), {"params": {"request": things.answer}}),
        (("GET", f"{hospital}/report"), {"params": {"from": "2026-01-01", "to": "2026-01-31"}}),
        (("GET", f"{hospital}/report.html"), {"params": {"from": "2026-01-01", "to": "2026-01-31"}}),
        (("GET", serving), {}),
        (("GET", serving), {"params": {"at": "2026-01-01T00:00:00Z"}}),
        (("PUT", serving), {"json": {"version": 1, **WHO}, "headers": present}),
        (("PUT", serving), {"json": named, "headers": present}),
        (("PUT", serving), {"json": named, "headers": first}),
        (("POST", f"{serving}/rollback"), {"json": WHO, "headers": present}),
        (("PUT", f"{serving}/plan"), {"json": {"plan": None, **WHO}}),
        (("PUT", f"{serving}/shadow"), {"json": {"version": 1, **WHO}}),
        (("POST", f"{serving}/shadow/end"), {"json": WHO}),
        (("GET", "/jobs"), {"params": {"hospital": things.hospital}}),
        (("GET", "/watch"), {"params": {"hospital": things.hospital}}),
        (("GET", "/jobs/{job}"), {}),
        (("GET", "/jobs/{job}"), {"job": things.scan_job}),
        (("DELETE", "/jobs/{job}"), {"job": things.queued}),
        (("GET", "/jobs/{job}/result"), {"job": things.scan_job}),
        (("DELETE", "/jobs/{job}/files"), {"job": things.scan_job}),
        (("POST", "/jobs/{job}/checks"), {"json": {}}),
        (("POST", f"{cohort}/pacs"), {"json": {"pacs": "main", "query": {"Modality": "CT"}}}),
        (
            ("POST", f"{hospital}/corrections/pacs"),
            {"json": {"pacs": "main", "query": {"StudyDate": "2026"}}},
        ),
        (("POST", "/pacs/{pacs}/segment"), {"json": {"hospital": things.hospital, **series}}),
        (("POST", "/pacs/{pacs}/follow-up"), {"json": {"hospital": things.hospital, **series}}),
        (("GET", "/models/{model}"), {"model": things.model}),
        (("GET", "/models/{model}/versions/{version}"), {"model": things.model}),
        (("GET", "/models/{model}/versions/{version}/report"), {"model": things.model}),
        (("GET", "/models/{model}/versions/{version}/card"), {"model": things.model}),
        (
            ("GET", "/models/{model}/versions/{version}/card.html"),
            {"model": things.model, "params": {"hospital": things.hospital}},
        ),
        (("POST", "/segment"), {"files": file, "data": {"hospital": things.hospital}}),
        (("POST", "/segment"), {"files": file, "data": {"model": f"{things.model}@1"}}),
        (("POST", "/segment"), {"files": file, "data": {"model": things.model}}),
        (("POST", "/segment"), {"files": file, "data": {"model": f"{things.model}@1", "hospital": "north"}}),
        (
            ("POST", "/segment"),
            {"files": file, "data": {"hospital": things.hospital, "personalization": "scan"}},
        ),
        (("POST", "/classify"), {"files": file, "data": {"hospital": things.hospital}}),
        (("POST", "/classify"), {"files": file, "data": {"model": f"{things.model}@1"}}),
        (("GET", f"{viewers}/datastore/image"), {"params": {"image": things.viewer_scan}}),
        (("DELETE", f"{viewers}/datastore/"), {"params": {"id": things.viewer_scan}}),
        (("DELETE", f"{viewers}/datastore/image"), {"params": {"id": things.viewer_scan}}),
        (("POST", infer), {"params": {"session_id": things.viewer_scan}, "files": form}),
        (("POST", infer), {"params": {"image": things.viewer_scan}, "files": form}),
        (("POST", infer), {"files": {"file": ("s.png", scan), **form}}),
        (("POST", infer), {"files": {"file": ("s.png", scan)}, "model": f"{things.model}@1"}),
        (("POST", "/keys"), {"json": {"name": "k", "role": "reader", "hospital": things.hospital}}),
    ]
    named_apart = {operation for operation, _ in given} | LISTINGS | OF_NO_HOSPITAL
    plain = {each: plain_body(route) for each, route in operations().items() if each not in named_apart}
    return given + [(operation, {} if body is None else {"json": body}) for operation, body in plain.items()]


# Two lists that no route declares. These name no hospital, and list what belongs to all.
LISTINGS = {
    ("GET", "/hospitals"),
    ("GET", "/jobs"),
    ("GET", "/watch"),
    ("GET", "/models"),
    ("GET", "/lineage"),
    ("GET", "/metrics"),
    ("GET", "/keys"),
    ("GET", "/pacs"),
    ("GET", "/monailabel/info/"),
}
# These tell nothing of any hospital.
OF_NO_HOSPITAL = {
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    *((method, "/session") for method in ("GET", "POST", "DELETE")),
    ("POST", "/display"),
    # These concern the scans of the caller alone.
    ("PUT", "/monailabel/session/"),
    ("GET", "/monailabel/datastore/"),
    ("PUT", "/monailabel/datastore/"),
    ("PUT", "/monailabel/datastore/image"),
    ("POST", "/monailabel/activelearning/{strategy}"),
    ("PUT", "/monailabel/datastore/label"),
}


def ask(client: httpx.Client, things: Things, operation: Operation, about: dict[str, Any]) -> httpx.Response:
    sent = dict(about)
    path = operation[1].format(
        hospital=things.hospital,
        cohort=things.cohort,
        name="a.png",
        job=sent.pop("job", things.job),
        observation=things.observation,
        request=things.answer,
        check=things.queued,
        model=sent.pop("model", "bright"),
        version=1,
        key=things.key,
        session=things.viewer_scan,
        pacs="main",
    )
    return client.request(operation[0], path, **sent)


def seen(answer: httpx.Response, things: Things) -> tuple[int, dict[str, str], Any]:
    """The whole of an answer but what differs from request to request."""
    passing = {"date", "locum-request", "server-timing", "content-length"}
    headers = {name: value for name, value in answer.headers.items() if name not in passing}
    body = answer.json()
    body.pop("instance", None)
    return answer.status_code, headers, yaml.safe_load(things.named(yaml.safe_dump(body)))


def test_requests_name_only_operations_of_the_api(scan: bytes, mask: bytes) -> None:
    tried = {operation for operation, _ in requests(GHOST, scan, mask)}
    assert tried | LISTINGS | OF_NO_HOSPITAL == set(operations())


def test_another_hospital_resource_is_answered_like_an_absent_one(
    api: Any, north: Things, south: Things, scan: bytes, mask: bytes
) -> None:
    before = kept(api, south)
    hidden, absent = requests(south, scan, mask), requests(GHOST, scan, mask)
    for (operation, about), (_, of_ghost) in zip(hidden, absent, strict=True):
        with acting(api, NORTH) as client:
            found = seen(ask(client, south, operation, about), south)
            never = seen(ask(client, GHOST, operation, of_ghost), GHOST)
        assert found == never, operation
        listing = operation == ("GET", "/jobs")
        assert found[0] == (200 if listing else 404), (operation, found)
        if operation != ("PUT", "/hospitals/{hospital}"):
            # Nor does a caller that may see every hospital get another answer for what never existed.
            unknown = seen(ask(api.client, GHOST, operation, of_ghost), GHOST)
            assert (unknown[0], unknown[2].get("type")) == (found[0], found[2].get("type")), operation
    assert kept(api, south) == before


def test_caller_reaches_its_own_resources(
    api: Any, north: Things, south: Things, scan: bytes, mask: bytes
) -> None:
    for things, who in ((north, NORTH), (south, None)):
        for operation, about in requests(things, scan, mask):
            # A hospital's version was made by a job, and has no report of a federation; nor is it accepted.
            if operation[0] != "GET" or operation[1].endswith("/report") or "/acceptance" in operation[1]:
                continue
            if who is None:
                answer = ask(api.client, things, operation, about)
            else:
                with acting(api, who) as client:
                    answer = ask(client, things, operation, about)
            assert answer.status_code == 200, (operation, answer.text)
            assert operation != ("GET", "/jobs") or len(answer.json()["jobs"]) == 3
    with acting(api, NORTH) as client:
        for model in ("", f"{north.model}@1"):
            fields = {"hospital": "north"} | ({"model": model} if model else {})
            answer = client.post("/segment", files={"scan": ("s.png", scan)}, data=fields)
            assert answer.headers["locum-model"] == f"{north.model}@1"


def test_another_hospital_resource_in_an_own_request_is_404(
    api: Any, north: Things, south: Things, scan: bytes, mask: bytes
) -> None:
    mask_of = f"/hospitals/north/cohorts/{north.cohort}/scans/a.png/mask"
    for things in (south, GHOST):
        model = f"{things.model}@1"
        with acting(api, NORTH) as client:
            answers = [
                client.put(
                    "/hospitals/north/serving/bright",
                    json={"version": model, **WHO},
                    headers={"If-Match": '"2"'},
                ),
                client.put(mask_of, content=mask, params={"model": model}),
                client.post("/hospitals/north/adaptations", json={"cohort": north.cohort, "model": model}),
                client.post("/hospitals/north/adaptations", json={"cohort": things.cohort}),
                client.get(f"/hospitals/north/cohorts/{things.cohort}"),
            ]
        answered = [seen(answer, things) for answer in answers]
        assert [status for status, _, _ in answered] == [404] * 5, answered
        if things is south:
            expected = answered
    assert answered == expected


def test_listings_leave_out_other_hospitals(api: Any, north: Things, south: Things, scan: bytes) -> None:
    # A metric that is labelled with an adapted version's name.
    answer = api.client.post("/segment", files={"scan": ("s.png", scan)}, data={"model": f"{south.model}@1"})
    assert answer.status_code == 200
    everything = {path: api.client.get(path).text for _, path in LISTINGS}
    with acting(api, NORTH) as client:
        listed = {path: client.get(path) for _, path in LISTINGS}
    for path, found in listed.items():
        assert found.status_code == 200
        assert "south" in everything[path], path
        assert "south" not in found.text, path
    assert [one["id"] for one in listed["/hospitals"].json()["hospitals"]] == ["north"]
    names = {one["name"] for one in listed["/models"].json()["models"]}
    assert names == {"bright", north.model}
    assert {one["hospital"] for one in listed["/jobs"].json()["jobs"]} == {"north"}
    assert "locum_inference_slots" in listed["/metrics"].text
    with acting(api, NORTH) as client:
        version = client.get("/models/bright/versions/1").json()
    assert f"{north.model}@1" in version["descendants"]
    assert f"{south.model}@1" not in version["descendants"]


def kept(api: Any, things: Things) -> list[Any]:
    """What the database and the disk hold of a hospital."""
    with api.context.database.read() as session:
        hospital = session.get(Hospital, things.hospital)
        jobs = [session.get(Job, job) for job in (things.job, things.scan_job, things.queued)]
        rows = [
            hospital.name,
            *((job.state, job.expires_at) for job in jobs),
            session.query(Assignment).filter_by(hospital=things.hospital).count(),
            session.query(CohortMask).filter_by(cohort=things.cohort).count(),
            session.query(Job).count(),
            session.query(Hospital).count(),
        ]
    folders = (f"cohorts/{things.cohort}", f"jobs/{things.scan_job}")
    return [*rows, *(api.settings.open_files().names(folder) for folder in folders)]
