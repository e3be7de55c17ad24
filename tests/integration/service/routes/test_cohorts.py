"""Cohorts over HTTP: scans come one at a time, resumably, and what cannot be a scan is refused at once."""

from __future__ import annotations

import base64
import hashlib
import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

MAX_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("store")
    running = start(store, max_upload_bytes=MAX_BYTES, cohort_quota_bytes=4 * MAX_BYTES, max_cohort_scans=3)
    for name in ("north", "south"):
        assert running.client.put(f"/hospitals/{name}", json={"name": name}).status_code == 201
    return running


@pytest.fixture
def cohort(api: Any) -> Iterator[str]:
    """The path of a new cohort of `north`."""
    made = api.client.post("/hospitals/north/cohorts", json={"note": "from the new scanner"})
    assert made.status_code == 201, made.text
    yield made.headers["location"]
    assert api.client.delete(made.headers["location"]).status_code == 204


@pytest.fixture
def scan(make_png: Callable[..., bytes], picture: NDArray[np.uint8]) -> bytes:
    return make_png(picture)


def files(api: Any) -> list[Path]:
    return [path for path in (api.settings.state_dir / "cohorts").rglob("*") if path.is_file()]


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


def noise(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 255, (size, size), np.uint8)


def test_new_cohort_is_empty_and_listed_for_its_hospital(api: Any, cohort: str) -> None:
    found = api.client.get(cohort).json()
    assert (found["scans"], found["bytes"], found["note"]) == (0, 0, "from the new scanner")
    assert found["created_at"] < found["expires_at"]
    assert found["deleted_at"] is None
    listed = api.client.get("/hospitals/north/cohorts").json()["cohorts"]
    assert [one["id"] for one in listed] == [found["id"]]
    assert api.client.get("/hospitals/south/cohorts").json() == {"cohorts": [], "next": None}
    assert problem(api.client.get(cohort.replace("north", "south"))) == (404, "cohort-unknown")
    assert problem(api.client.post("/hospitals/nowhere/cohorts")) == (404, "hospital-unknown")


def test_cohort_gets_a_name_and_keeps_what_is_not_sent(api: Any, cohort: str) -> None:
    assert api.client.get(cohort).json()["name"] is None
    named = api.client.patch(cohort, json={"name": "Stroke, new scanner"})
    assert named.status_code == 200, named.text
    assert (named.json()["name"], named.json()["note"]) == ("Stroke, new scanner", "from the new scanner")
    assert api.client.patch(cohort, json={"note": None}).json()["note"] is None
    assert api.client.get(cohort).json()["name"] == "Stroke, new scanner"
    assert problem(api.client.patch(cohort, json={"title": "x"}))[0] == 422
    assert problem(api.client.patch(cohort.replace("north", "south"), json={})) == (404, "cohort-unknown")


def test_cohort_is_created_without_a_body(api: Any) -> None:
    made = api.client.post("/hospitals/north/cohorts")
    assert (made.status_code, made.json()["note"]) == (201, None)
    assert api.client.delete(made.headers["location"]).status_code == 204


def test_interrupted_client_uploads_only_missing_scans(
    api: Any, cohort: str, make_png: Callable[..., bytes]
) -> None:
    scans = {f"case-{size}.png": make_png(noise(size)) for size in (16, 17, 18)}
    first = next(iter(scans))
    assert api.client.put(f"{cohort}/scans/{first}", content=scans[first]).status_code == 201
    arrived = {s["name"]: s["sha256"] for s in api.client.get(f"{cohort}/scans").json()["scans"]}
    assert arrived == {first: f"sha256:{hashlib.sha256(scans[first]).hexdigest()}"}
    for name, content in scans.items():
        # Even without looking: what is there already is not taken twice.
        expected = 200 if name == first else 201
        assert api.client.put(f"{cohort}/scans/{name}", content=content).status_code == expected
    found = api.client.get(cohort).json()
    assert (found["scans"], found["bytes"]) == (3, sum(map(len, scans.values())))


def test_uploaded_scan_is_described_with_size_format_and_digest(api: Any, cohort: str, scan: bytes) -> None:
    answer = api.client.put(f"{cohort}/scans/a", content=scan).json()
    assert (answer["name"], answer["bytes"], answer["format"]) == ("a", len(scan), "png")
    assert answer["sha256"] == f"sha256:{hashlib.sha256(scan).hexdigest()}"


def test_scan_with_other_bytes_under_a_used_name_is_409(
    api: Any, cohort: str, scan: bytes, make_png: Callable[..., bytes]
) -> None:
    api.client.put(f"{cohort}/scans/a", content=scan)
    other = make_png(noise(20))
    assert problem(api.client.put(f"{cohort}/scans/a", content=other)) == (409, "scan-name-taken")
    assert api.client.delete(f"{cohort}/scans/a").status_code == 204
    assert api.client.put(f"{cohort}/scans/a", content=other).status_code == 201
    assert problem(api.client.delete(f"{cohort}/scans/b")) == (404, "cohort-unknown")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"this is no scan", (415, "unsupported-scan")),
        (b"", (422, "damaged-scan")),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, (422, "damaged-scan")),
        (b"\0" * 128 + b"DICM" + b"\0" * 64, (415, "unsupported-scan")),
        (b"x" * (MAX_BYTES + 1), (413, "upload-too-large")),
    ],
)
def test_invalid_scan_is_rejected_and_leaves_no_file(
    api: Any, cohort: str, content: bytes, expected: tuple[int, str]
) -> None:
    assert problem(api.client.put(f"{cohort}/scans/a", content=content)) == expected
    assert api.client.get(cohort).json()["scans"] == 0
    assert files(api) == []


def test_stream_without_a_length_is_413_above_the_limit(api: Any, cohort: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 8192

    assert problem(api.client.put(f"{cohort}/scans/a", content=endless())) == (413, "upload-too-large")


def test_truncated_scan_is_422(api: Any, cohort: str, scan: bytes) -> None:
    assert problem(api.client.put(f"{cohort}/scans/a", content=scan[:-20])) == (422, "damaged-scan")


def test_scan_with_another_or_unreadable_repr_digest_is_422(api: Any, cohort: str, scan: bytes) -> None:
    def announced(content: bytes) -> dict[str, str]:
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        return {"Repr-Digest": f"sha-512=:AAAA:, sha-256=:{digest}:"}

    refused = api.client.put(f"{cohort}/scans/a", content=scan, headers=announced(scan + b"!"))
    assert problem(refused) == (422, "digest-mismatch")
    assert api.client.put(f"{cohort}/scans/a", content=scan, headers=announced(scan)).status_code == 201
    for unreadable in ("sha-256=:AAAA:", "sha-256=abc", "SHA-256=" + announced(scan)["Repr-Digest"][22:]):
        answer = api.client.put(f"{cohort}/scans/b", content=scan, headers={"Repr-Digest": unreadable})
        assert problem(answer) == (422, "digest-unreadable")
    others = {"Repr-Digest": "sha-512=:AAAA:"}
    assert api.client.put(f"{cohort}/scans/b", content=scan, headers=others).status_code == 201


def test_scan_below_the_name_of_another_scan_is_409(api: Any, cohort: str, scan: bytes) -> None:
    api.client.put(f"{cohort}/scans/ward/7.png", content=scan)
    for below in ("masks", "x/mask.png"):
        refused = api.client.put(f"{cohort}/scans/ward/7.png/{below}", content=scan)
        assert problem(refused) == (409, "scan-name-taken")
        assert "its mask goes to …/ward/7.png/mask" in refused.json()["detail"]
    assert api.client.put(f"{cohort}/scans/ward/8.png", content=scan).status_code == 201
    assert api.client.get(cohort).json()["scans"] == 2


def test_scan_above_the_cohort_limit_is_507(api: Any, cohort: str, make_png: Callable[..., bytes]) -> None:
    for number in range(3):
        content = make_png(noise(16 + number))
        assert api.client.put(f"{cohort}/scans/{number}", content=content).status_code == 201
    refused = api.client.put(f"{cohort}/scans/3", content=make_png(noise(30)))
    assert problem(refused) == (507, "cohort-full")
    assert len(files(api)) == 3


def test_scan_above_the_quota_is_507_before_its_bytes_are_sent(
    api: Any, cohort: str, make_png: Callable[..., bytes]
) -> None:
    owners = ("north", "south", "south")
    others = [api.client.post(f"/hospitals/{owner}/cohorts").headers["location"] for owner in owners]
    try:
        content = make_png(noise(250))
        assert MAX_BYTES * 0.9 < len(content) <= MAX_BYTES
        for place in (cohort, *others):
            assert api.client.put(f"{place}/scans/a", content=content).status_code == 201
        # Only announced: the server answers, and has not taken a byte.
        connection = http.client.HTTPConnection(api.client.base_url.host, api.client.base_url.port)
        connection.putrequest("PUT", f"{cohort}/scans/b")
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 507
        connection.close()
        assert problem(api.client.put(f"{cohort}/scans/b", content=make_png(noise(249)))) == (
            507,
            "cohort-full",
        )
    finally:
        for place in others:
            assert api.client.delete(place).status_code == 204


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "..", "a/../../b", "%2e%2e", "C:%5Cx", "x" * 200],
)
def test_scan_name_that_looks_like_a_path_is_stored_as_a_name(
    api: Any, cohort: str, scan: bytes, name: str
) -> None:
    # Not through httpx, which would tidy the path up first.
    connection = http.client.HTTPConnection(api.client.base_url.host, api.client.base_url.port)
    connection.request("PUT", f"{cohort}/scans/{name}", body=scan)
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
    (path,) = files(api)
    folder = api.settings.state_dir / "cohorts" / cohort.rpartition("/")[2]
    assert path == folder / hashlib.sha256(scan).hexdigest()
    (listed,) = api.client.get(f"{cohort}/scans").json()["scans"]
    assert listed["name"] == unquote(name)


@pytest.mark.parametrize("name", ["x" * 201, "a%00b", "a%1Fb"])
def test_invalid_scan_name_is_422(api: Any, cohort: str, scan: bytes, name: str) -> None:
    assert problem(api.client.put(f"{cohort}/scans/{name}", content=scan)) == (422, "invalid-request")


def test_deleted_cohort_loses_its_files_and_is_410(api: Any, scan: bytes) -> None:
    place = api.client.post("/hospitals/north/cohorts").headers["location"]
    api.client.put(f"{place}/scans/a", content=scan)
    assert len(files(api)) == 1
    assert api.client.delete(place).status_code == 204
    assert files(api) == []
    assert api.client.get(place).json()["deleted_at"] is not None
    assert problem(api.client.get(f"{place}/scans")) == (410, "cohort-gone")
    assert problem(api.client.put(f"{place}/scans/a", content=scan)) == (410, "cohort-gone")
    assert problem(api.client.put(f"{place[:-1]}/scans/a", content=scan)) == (422, "invalid-request")
    unknown = place[:-32] + "0" * 32
    assert problem(api.client.put(f"{unknown}/scans/a", content=scan)) == (404, "cohort-unknown")
    assert problem(api.client.delete(unknown)) == (404, "cohort-unknown")


def test_mask_is_uploaded_listed_and_deleted_with_its_scan(
    api: Any, cohort: str, scan: bytes, picture: NDArray[np.uint8], make_png: Callable[..., bytes]
) -> None:
    drawn = np.zeros(picture.shape[:2], np.uint8)
    drawn[4:9, 4:9] = 2
    mask, where = make_png(drawn), f"{cohort}/scans/ward/7.png/mask"
    assert problem(api.client.put(where, content=mask)) == (404, "cohort-unknown")
    assert api.client.put(f"{cohort}/scans/ward/7.png", content=scan).json()["mask"] is None
    made = api.client.put(where, content=mask)
    assert (made.status_code, made.json()["values"], made.json()["format"]) == (201, [0, 2], "png")
    again = api.client.put(where, content=mask)
    assert (again.status_code, again.json()) == (200, made.json())
    (listed,) = api.client.get(f"{cohort}/scans").json()["scans"]
    assert (listed["name"], listed["mask"]) == ("ward/7.png", made.json())
    assert api.client.get(cohort).json()["bytes"] == len(scan) + len(mask)
    assert problem(api.client.put(where, content=make_png(drawn // 2))) == (409, "mask-taken")
    assert api.client.delete(where).status_code == 204
    assert problem(api.client.delete(where)) == (404, "cohort-unknown")
    assert [path.read_bytes() for path in files(api)] == [scan]


def test_invalid_mask_is_rejected_and_leaves_no_file(
    api: Any,
    cohort: str,
    scan: bytes,
    picture: NDArray[np.uint8],
    make_png: Callable[..., bytes],
    publish_dark: Any,
) -> None:
    api.client.put(f"{cohort}/scans/a", content=scan)
    where = f"{cohort}/scans/a/mask"
    height, width = picture.shape[:2]
    colours = np.zeros((height, width, 3), np.uint8)
    colours[3, 3, 0] = 255
    for content, expected in (
        (b"no picture", (415, "unsupported-scan")),
        (make_png(np.zeros((height + 1, width), np.uint8)), (422, "mask-mismatch")),
        (make_png(colours), (422, "mask-mismatch")),
        (b"x" * (MAX_BYTES + 1), (413, "upload-too-large")),
    ):
        assert problem(api.client.put(where, content=content)) == expected
    drawn = make_png(np.zeros((height, width), np.uint8))
    assert problem(api.client.put(f"{where}?model=none", content=drawn)) == (404, "artefact-not-found")
    # Its classes have numbers too, which no mask means.
    publish_dark(api.settings.store)
    classifier = api.client.put(f"{where}?model=dark", content=drawn)
    assert problem(classifier) == (422, "another-kind-of-task")
    assert [path.read_bytes() for path in files(api)] == [scan]
