"""The service with a worker and a real Orthanc: what a client sees, and what no one else must."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from locum.demo.service_process import free_port, running_service
from model_store.digest import sha256
from tests.helpers.model_store.dicom_files import uid
from tests.helpers.service.coded import SERIES, STUDY, coded_series, publish_coded
from tests.helpers.service.orthanc import Orthanc, configure

UIDS = [STUDY, SERIES, uid("other series"), uid("frame of reference")]
PLANTED = [value.encode().lower() for value in ("planted", "19610203", *UIDS)]
ASKED = {"hospital": "dune", "study": STUDY, "series": SERIES, "model": "coded"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("service")
    publish_coded(root / "store", publish_bright)
    return root / "store", root / "state"


@pytest.fixture(scope="module")
def client(folders: tuple[Path, Path], orthanc: Orthanc) -> Iterator[httpx.Client]:
    orthanc.add(coded_series())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCUM_PACS", str(configure(folders[1].parent / "pacs.yaml", orthanc.url)))
        patch.setenv("LOCUM_LOG_LEVEL", "DEBUG")
        with running_service(*folders, free_port()) as client:
            client.put("/hospitals/dune", json={"name": "Dune"}).raise_for_status()
            yield client


def finished(client: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 202, answer.text
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        job: dict[str, Any] = client.get(answer.headers["location"]).json()
        if job["state"] in ("succeeded", "failed", "cancelled"):
            return job
        time.sleep(0.1)
    raise AssertionError(f"the job is not over: {job}")


def test_pacs_is_listed_without_its_address(client: httpx.Client) -> None:
    answer = client.get("/pacs")
    assert answer.json() == {"pacs": [{"name": "main", "hospitals": ["dune"], "store": True}]}


def test_series_is_segmented_and_stored_without_a_trace_of_the_patient(
    client: httpx.Client, orthanc: Orthanc, folders: tuple[Path, Path]
) -> None:
    answers = [client.post("/pacs/main/segment", json={**ASKED, "store": store}) for store in (True, False)]
    missing = client.post("/pacs/main/segment", json={**ASKED, "series": uid("other series")})
    cohort = client.post("/hospitals/dune/cohorts").headers["location"]
    query = {"PatientID": "PLANTED-ID", "SeriesInstanceUID": SERIES}
    filling = client.post(f"{cohort}/pacs", json={"pacs": "main", "query": query})
    jobs = [finished(client, answer) for answer in (*answers, missing, filling)]
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded", "failed", "succeeded"], jobs
    assert jobs[3]["result"]["added"] == 1
    (stored,) = orthanc.instances("SEG")
    results = [client.get(f"/jobs/{job['id']}/result") for job in jobs]
    assert results[0].json()["SOPInstanceUID"] == stored.SOPInstanceUID
    # The same as of the same files, sent by a client.
    parts = [("scan", ("x", content)) for content in coded_series().values()]
    sent = client.post("/segment", files=parts, data={"model": "coded", "output": "dicom-seg"})
    assert sha256(sent.content) == sha256(results[1].content)
    assert results[2].json()["type"] == "urn:locum:problem:job-without-result"

    seen = [
        *answers,
        missing,
        filling,
        *results[2:],
        client.get(f"{cohort}/scans"),
        client.get("/metrics"),
        client.get("/jobs"),
    ]
    for job in jobs:
        seen += [client.get(f"/jobs/{job['id']}{path}") for path in ("", "/card", "/events")]
    for answer in seen:
        shown = (answer.content + repr(answer.headers.raw).encode()).lower()
        assert not [value for value in PLANTED if value in shown], answer.text[:500]
    kept = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in kept if path.parent.parent.name != "jobs" or not path.name.startswith("result")]
    assert any(path.name == "service.log" for path in kept)
    for path in kept:
        content = path.read_bytes().lower()
        assert not [value for value in PLANTED if value in content], path


def test_repeated_idempotency_key_is_one_job(client: httpx.Client) -> None:
    key = {"Idempotency-Key": "once"}
    first, again = (client.post("/pacs/main/segment", json=ASKED, headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["idempotency-replayed"] == "true"
    other = client.post("/pacs/main/segment", json={**ASKED, "series": "1.2"}, headers=key)
    assert other.json()["type"] == "urn:locum:problem:idempotency-key-reused"
    finished(client, first)


@pytest.mark.parametrize(
    ("path", "fields", "status", "said"),
    [
        ("main", {"study": "http://169.254.169.254/"}, 422, "a DICOM UID"),
        ("main", {"series": "1.2/../../../etc"}, 422, "a DICOM UID"),
        ("main", {"series": "1" * 65}, 422, "64"),
        ("main", {"url": "http://evil"}, 422, "url"),
        ("main", {"hospital": None}, 422, "hospital"),
        ("main", {"hospital": "other"}, 404, "no hospital"),
        ("none", {}, 404, "no PACS 'none'"),
        ("main", {"model": "plain"}, 422, "codes"),
        ("main", {"model": "absent"}, 404, "absent"),
        ("main", {"store": True, "output": "json"}, 422, "output=dicom-seg"),
        ("main", {"preset": "tent"}, 422, "routing-space"),
        ("main", {"personalization": "scan"}, 422, "POST /segment"),
    ],
)  # fmt: skip
def test_request_that_cannot_be_answered_is_rejected_at_once(
    client: httpx.Client, path: str, fields: dict[str, Any], status: int, said: str
) -> None:
    answer = client.post(f"/pacs/{path}/segment", json={**ASKED, **fields})
    assert answer.status_code == status, answer.text
    assert said in answer.text
    assert STUDY not in answer.text
