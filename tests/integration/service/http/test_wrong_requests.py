"""What a tired person sends: each answer names what is wrong, what was expected, and what to do."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.service.adapted_store import publish_space

FORM = "application/x-www-form-urlencoded"
COHORT = "0" * 32
NIFTI = nib.Nifti1Image(np.zeros((32, 32, 4), np.int16), np.eye(4)).to_bytes()
WHO = {"actor": "ada", "reason": "validated"}


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Callable[..., Any]
) -> Any:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    publish_bright(root, "space.part", at=60, part_of="space")
    running = start(root)
    assert running.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
    return running


@pytest.fixture
def scan(make_png: Callable[..., bytes], picture: NDArray[np.uint8]) -> bytes:
    return make_png(picture)


def detail(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    said: str = answer.json()["detail"]
    return said


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/hospitals/north", "GET, HEAD, PUT"),
        ("POST", "/hospitals/north/serving/bright", "GET, HEAD, PUT"),
        ("PUT", f"/hospitals/north/cohorts/{COHORT}", "DELETE, GET, HEAD, PATCH"),
        ("POST", f"/hospitals/north/cohorts/{COHORT}/scans/a/mask", "DELETE, GET, HEAD, PUT"),
        ("GET", "/segment", "POST"),
    ],
)
def test_wrong_method_is_405_with_the_allowed_methods(api: Any, method: str, path: str, allowed: str) -> None:
    answer = api.client.request(method, path)
    assert detail(answer, 405).endswith(f"it takes {allowed}.")
    assert answer.headers["allow"] == allowed


def test_path_with_a_trailing_slash_is_a_404_problem(api: Any, scan: bytes) -> None:
    assert "Nothing is served at this path" in detail(api.send("/segment/", scan), 404)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/jobs?hopsital=north", "query.hopsital: not a parameter; there are: after, hospital, limit, state"),
        (
            "/hospitals/north/serving/bright?At=2026-03-01T00:00:00Z",
            "query.At: not a parameter; there are: at",
        ),
        ("/hospitals?site=CS", "query.site: not a parameter; there are: after, limit"),
        ("/models?a%0Ab=1", "query.a\\nb: not a parameter"),
    ],
)
def test_unknown_query_parameter_is_422(api: Any, path: str, said: str) -> None:
    assert said in detail(api.client.get(path), 422)


def test_mask_parameter_on_a_scan_upload_is_422(api: Any, scan: bytes) -> None:
    cohort = api.client.post("/hospitals/north/cohorts").headers["location"]
    answer = api.client.put(f"{cohort}/scans/a.png/Mask?model=bright", content=scan)
    assert "query.model: not a parameter" in detail(answer, 422)
    assert api.client.get(cohort).json()["scans"] == 0


def test_health_and_metrics_accept_unknown_query_parameters(api: Any) -> None:
    assert api.client.get("/health/live?now=1").status_code == 200
    assert api.client.get("/metrics?name[]=a").status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ('{"name": "N"}', FORM, f"Content-Type: application/json, found Content-Type: {FORM}"),
        ('{"name": "N"}', "aplication/json", "found Content-Type: aplication/json"),
        ('["N"]', "application/json", "body: expected a JSON object"),
        ('{"name": "N"', "application/json", "body: not JSON at character 12: Expecting ',' delimiter"),
        ("{'name': 'N'}", "application/json", "body: not JSON at character 1"),
    ],
)
def test_body_that_is_not_a_json_object_is_422(api: Any, content: str, kind: str, said: str) -> None:
    answer = api.client.put("/hospitals/south", content=content, headers={"Content-Type": kind})
    assert said in detail(answer, 422)
    assert api.client.get("/hospitals/south").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "json", "said"),
    [
        ("PUT", "/hospitals/St.Mary", {"name": "N"}, "path.hospital: expected letters, digits, `-` and `_`"),
        ("GET", "/jobs/none", None, "path.job: expected the id that POST answered"),
        ("GET", "/models/bright@1", None, "path.model: expected a model's name"),
        ("PUT", "/hospitals/north/serving/bright", {"version": "newest", **WHO}, "sha256:… or name@3"),
        ("GET", "/hospitals/north/serving/bright?at=2026-03-01", None, "such as 2026-03-01T00:00:00Z"),
        (
            "POST",
            "/hospitals/north/adaptations",
            {"cohorts": COHORT},
            "body.cohorts: not a parameter; there are: model, options, cohort, quantise",
        ),
        (
            "POST",
            "/hospitals/north/quantisations",
            {"cohort": COHORT, "precision": "int4"},
            "body.precision:",
        ),
    ],
)
def test_pattern_mismatch_is_422_with_a_plain_description(
    api: Any, method: str, path: str, json: dict[str, Any] | None, said: str
) -> None:
    answer = api.client.request(method, path, json=json)
    assert said in detail(answer, 422)
    assert "pattern" not in answer.text


def test_unknown_hospital_with_other_capitals_gets_a_hint(api: Any, scan: bytes) -> None:
    said = detail(api.segment(scan, hospital="North"), 404)
    assert said == "no hospital 'North' is registered, but 'north' is: ids tell capitals from small letters"
    assert detail(api.client.get("/hospitals/west"), 404).endswith("PUT /hospitals/west registers it")


def test_unknown_model_is_404_with_the_offered_names(api: Any, scan: bytes) -> None:
    serving = "/hospitals/north/serving/brihgt"
    body, first = {"version": 1, **WHO}, {"If-None-Match": "*"}
    for answer in (
        api.segment(scan, model="brihgt"),
        api.client.get(serving),
        api.client.put(serving, json=body, headers=first),
        api.client.get(f"{serving}/history"),
        api.client.get(f"{serving}/key-usage"),
    ):
        assert detail(answer, 404) == "'brihgt' is not in the store, which offers: bright"


def test_unreadable_scan_of_several_is_named_by_number(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Callable[..., Any], scan: bytes
) -> None:
    publish_space(tmp_path, publish_bright)
    api = start(tmp_path)
    api.client.put("/hospitals/north", json={"name": "North"})
    for files, said in (
        ([scan, b"a letter", scan], "scan 2 of 3: the format is not known"),
        ([b"a letter"], "the format is not known"),
    ):
        sent = [("scans", ("a", file)) for file in files]
        answer = api.client.post("/hospitals/north/adaptations", files=sent, data={"model": "bright"})
        assert detail(answer, 415).startswith(said)


def test_form_in_place_of_a_raw_file_is_415_with_advice(api: Any, scan: bytes) -> None:
    cohort = api.client.post("/hospitals/north/cohorts").headers["location"]
    assert api.client.put(f"{cohort}/scans/a", content=scan).status_code == 201
    for path in ("scans/b", "scans/a/mask"):
        answer = api.client.put(f"{cohort}/{path}", files={"scan": ("a", scan)})
        assert "with curl: -T FILE in place of -F" in detail(answer, 415)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"files": {"image": ("a", b"x")}}, "field 'image' is sent as a file; a file is expected in: scan"),
        ({"files": {"scan": (None, "scan.nii.gz")}}, "takes a file; with curl: -F scan=@FILE"),
        ({"files": {"model": (None, "bright")}}, "the field 'scan' is missing, and takes a file"),
    ],
)
def test_form_without_its_file_is_422_with_advice(api: Any, arguments: dict[str, Any], said: str) -> None:
    found = detail(api.client.post("/segment", **arguments), 422)
    assert said in found
    # It was one.
    assert "expected multipart" not in found


def test_start_with_an_empty_store_logs_a_warning(
    start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path / "stor")
    assert any("no artefact in the store" in record.message for record in caplog.records)


def test_form_that_is_coded_with_gzip_is_answered_and_another_coding_refused(api: Any, scan: bytes) -> None:
    built = api.client.build_request("POST", "/segment", files={"scan": ("a.png", scan)})
    headers = {"Content-Type": built.headers["Content-Type"], "Content-Encoding": "gzip"}
    coded = gzip.compress(built.read())
    assert api.client.post("/segment", content=coded, headers=headers).status_code == 200
    answer = api.client.post("/segment", content=coded, headers={**headers, "Content-Encoding": "br"})
    assert "found 'br'" in detail(answer, 415)
    assert answer.headers["accept-encoding"] == "gzip, identity"
    answer = api.client.post("/segment", content=coded[:-9], headers=headers)
    assert "found one that is cut off" in detail(answer, 422)
    registered = gzip.compress(b'{"name": "North"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert api.client.put("/hospitals/north", content=registered, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("field", "files", "said"),
    [
        ("scan", (NIFTI, NIFTI), "2 files and no DICOM among them; of the first, this is .nii or .nii.gz"),
        ("scan", (NIFTI[:348], NIFTI[352:]), "this is a header (.hdr) of NIfTI or ANALYZE"),
        ("scan", (gzip.compress(NIFTI), b"x"), "this is .nii or .nii.gz"),
        ("scan", (b"NRRD0004", b"raw"), "this is .nrrd"),
        ("scan", (b"NRRD0004\ndata file: a.raw\n", b"raw"), "this is a header (.nhdr) of NRRD"),
        ("scan", (b"ObjectType = Image\nElementDataFile = a.raw\n", b"raw"), "header (.mhd) of MetaImage"),
        ("scan", (b"GIF8", b"GIF8"), "this is GIF"),
        ("scan.T1", (NIFTI, NIFTI), "field 'scan.T1': expected one file"),
    ],
)
def test_several_files_that_are_no_series_are_named(
    api: Any, field: str, files: tuple[bytes, ...], said: str
) -> None:
    sent = [(field, (f"{number}.nii", content)) for number, content in enumerate(files)]
    assert said in detail(api.client.post("/segment", files=sent), 422)
