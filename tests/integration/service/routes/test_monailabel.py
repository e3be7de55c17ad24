"""The interface of MONAI Label, as the plugins of 3D Slicer and OHIF use it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import highdicom as hd
import httpx
import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from sqlalchemy import select

from model_store.guard import ReferenceStatistics, summarise
from model_store.preprocessing import prepare
from model_store.scan import decode
from model_store.task import Code, LabelCodes, Normalisation, Task
from service.audit import trail
from service.database import Hospital, Job, ViewerScanRow
from service.identity import keys
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import PLANES, series, turned, uid, zipped
from tests.helpers.service.adapted_store import publish_adapted, publish_space
from tests.helpers.service.viewer_clients import Ohif, Slicer, labels_of, parts_as_text, voxels_of
from tests.helpers.waiting import wait_for

THRESHOLD = 100
CODED = Task(
    name="coded",
    labels={"bright": (1,)},
    normalisation=Normalisation(method="none"),
    size=(32, 32),
    colour="luminance",
    codes={
        "bright": LabelCodes(
            category=Code(value="91723000", meaning="Anatomical Structure"),
            type=Code(value="10200004", meaning="Liver"),
        )
    },
)
VOLUME = np.random.default_rng(3).integers(0, 200, (9, 32, 32)).astype(np.int16)
CUBE = np.random.default_rng(4).integers(0, 200, (32, 32, 32)).astype(np.int16)
AFFINE = np.array([[-0.8, 0, 0, 40], [0, 0.7, 0, -20], [0, 0, 2.5, 11], [0, 0, 0, 1.0]])
WEIGHS_MODELS = {"paper", "official", "as-published"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, publish_bright: Any, publish_dark: Any) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish_space(root, publish_bright)
    publish_bright(root, "coded", task=CODED)
    publish_dark(root, "dark")
    return root


@pytest.fixture(scope="module")
def api(start: Any, store: Path) -> Any:
    """Without authentication: one caller, all hospitals."""
    found = start(store, monailabel="root")
    for hospital in ("north", "south"):
        assert found.client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    return found


@pytest.fixture(scope="module")
def guarded(start: Any, store: Path) -> tuple[Any, dict[str, str]]:
    """With keys: the API, and a key of each hospital and of all."""
    found = start(store, monailabel="prefix", auth="keys")
    now = datetime.now(UTC)
    with found.context.database.write() as session:
        for name in ("north", "south"):
            session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
        session.flush()
        made = {name: keys.create(session, name, "reader", name)[1] for name in ("north", "south")}
        made["all"] = keys.create(session, "all", "reader", None)[1]
    return found, made


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """As Slicer saves a volume, under a name that could be a patient's."""
    path = tmp_path / "DOE^JOHN.nii.gz"
    nib.save(nib.Nifti1Image(VOLUME.transpose(2, 1, 0).astype(np.int16), AFFINE), path)
    return path


def url(api: Any, mount: str = "/monailabel") -> str:
    return str(api.client.base_url).rstrip("/") + mount


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def slug(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


def infer(api: Any, model: str = "coded", params: Any = None, **query: str) -> httpx.Response:
    body = {"params": (None, params if isinstance(params, str) else json.dumps(params or {}))}
    answer: httpx.Response = api.client.post(f"/monailabel/infer/{model}", params=query, files=body)
    return answer


@pytest.fixture
def no_scans(api: Any) -> None:
    """No scan of an earlier test is left to look at."""
    for name in api.client.get("/monailabel/datastore/", params={"output": "all"}).json()["objects"]:
        assert api.client.delete("/monailabel/datastore/", params={"id": name}).status_code == 200


def kept_in(api: Any) -> Path:
    folder: Path = api.settings.state_dir / "viewers"
    return folder


def row_of(api: Any, session: str) -> ViewerScanRow:
    with api.context.database.read() as asking:
        row: ViewerScanRow = asking.get_one(ViewerScanRow, session)
        return row


def age(api: Any, seconds: float) -> datetime:
    """Let every scan have been used last so long ago, and return when that was."""
    then = datetime.now(UTC) - timedelta(seconds=seconds)
    with api.context.database.write() as session:
        for row in session.scalars(select(ViewerScanRow)):
            row.used_at, row.expires_at = then, then + (row.expires_at - row.used_at)
    return then


# --- 3D Slicer


@pytest.mark.parametrize("mount", ["/monailabel", ""])
def test_slicer_connects_and_segments_voxel_for_voxel(
    api: Any, mount: str, scan: Path, tmp_path: Path
) -> None:
    slicer = Slicer(url(api, mount), tmp_path)
    assert slicer.connect() is False
    session = slicer.create_session(scan)
    saved, names, params = slicer.segment("coded", "DOE JOHN", session)
    assert saved.name.endswith(".nrrd")
    mask, source = sitk.ReadImage(str(saved)), sitk.ReadImage(str(scan))
    assert mask.GetPixelID() == sitk.sitkUInt8
    np.testing.assert_array_equal(sitk.GetArrayFromImage(mask), sitk.GetArrayFromImage(source) > THRESHOLD)
    for asked in ("GetSize", "GetOrigin", "GetSpacing", "GetDirection"):
        np.testing.assert_allclose(getattr(mask, asked)(), getattr(source, asked)(), atol=1e-5)
    assert names == ["bright"]
    assert params["receipt"]["model"]["name"] == "coded@1"
    assert params["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())
    assert params["notice"] == "research use only"
    report = api.segment(scan.read_bytes(), model="coded", output="json").json()
    own = params["labels"]["bright"]["confidence"]
    assert own == report["labels"]["bright"]["confidence"] > 0
    assert slicer.json("DELETE", f"/session/{session}")["session_id"] == session
    status, _, _ = slicer.send("GET", f"/session/{session}")
    assert status == 404


def test_slicer_sends_a_chosen_hospital_and_personalization(api: Any, scan: Path, tmp_path: Path) -> None:
    slicer = Slicer(url(api), tmp_path)
    slicer.connect()
    slicer.choose("bright", "personalization", "global")
    slicer.choose("bright", "hospital", "north")
    _, _, params = slicer.segment("bright", "x", slicer.create_session(scan))
    options = params["receipt"]["options"]
    assert (options["hospital"], options["personalization"], options["preset"]) == ("north", "global", None)


def test_slicer_reads_the_warnings_of_a_scan_that_is_unlike_the_task(
    start: Any, publish_bright: Any, make_png: Callable[..., bytes], scan: Path, tmp_path: Path
) -> None:
    picture = decode(make_png(np.random.default_rng(0).integers(0, 200, (32, 32), np.uint8)))
    reference = ReferenceStatistics.of(summarise(picture, prepare(picture, CODED)))
    publish_bright(tmp_path / "store", "coded", task=CODED, statistics=reference)
    found = start(tmp_path / "store", monailabel="prefix")
    slicer = Slicer(url(found), tmp_path)
    slicer.connect()
    _, _, params = slicer.segment("coded", "x", slicer.create_session(scan), guard="warn")
    report = found.segment(scan.read_bytes(), model="coded", output="json", guard="warn").json()
    assert params["warnings"] == report["warnings"] != []


def test_slicer_uploads_an_image_and_segments_it_by_its_name(api: Any, scan: Path, tmp_path: Path) -> None:
    slicer = Slicer(url(api), tmp_path)
    slicer.connect()
    fields = {"params": json.dumps({"client_id": "user-xyz"})}
    status, _, body = slicer.multipart("PUT", "/datastore/?image=3%3A+T1+AX", fields, {"file": scan})
    assert (status, json.loads(body)) == (200, {"image": "3: T1 AX"})
    saved, _, _ = slicer.segment("coded", "3: T1 AX", None)
    assert sitk.GetArrayFromImage(sitk.ReadImage(str(saved))).sum() == (VOLUME > THRESHOLD).sum()
    listed = slicer.json("GET", "/datastore/?output=all")["objects"]
    assert listed["3: T1 AX"]["labels"] == {}
    assert slicer.json("GET", "/info/")["datastore"]["total"] >= 1
    assert slicer.json("DELETE", "/datastore/?id=3%3A+T1+AX") == {}
    assert "3: T1 AX" not in slicer.json("GET", "/datastore/?output=all")["objects"]


def test_slicer_is_refused_with_the_reason_where_it_asks_for_more(
    api: Any, scan: Path, tmp_path: Path
) -> None:
    slicer = Slicer(url(api), tmp_path)
    asked = {
        ("GET", "/auth/"): "No one signs in",
        ("GET", "/train/?check_if_running=true"): "No training runs",
        ("DELETE", "/train/"): "No training runs",
        ("POST", "/train/coded"): "No training runs",
        ("GET", "/datastore/label?label=a&tag=original"): "cohort of corrections",
        ("PUT", "/model/coded"): "published into the store",
        ("POST", "/batch/infer/coded"): "one scan per request",
        ("POST", "/reload"): "Nothing is served",
        ("GET", "/proxy/dicom/qido/studies"): "Nothing is served",
        ("GET", "/ohif/"): "Nothing is served",
    }
    for (method, selector), reason in asked.items():
        status, _, body = slicer.send(method, selector, b"{}" if method == "POST" else None)
        assert status == 404, selector
        assert reason in json.loads(body)["detail"]


def test_slicer_submits_a_label_of_its_own_numbers_to_the_scan_that_was_answered(
    api: Any, no_scans: None, scan: Path, tmp_path: Path
) -> None:
    slicer = Slicer(url(api), tmp_path)
    slicer.connect()
    # Slicer takes a sample without an id for "load your own image".
    assert slicer.json("POST", "/activelearning/doubtful", {"client_id": "user-xyz"}) == {}
    saved, _, _ = slicer.segment("coded", "Volume", slicer.create_session(scan), hospital="north")
    drawn = sitk.GetArrayFromImage(sitk.ReadImage(str(saved))).astype(np.int16)
    corrected = drawn.copy()
    corrected[0, :4, :4] = 1
    sample = slicer.json("POST", "/activelearning/doubtful", {"client_id": "user-xyz"})
    status, _, content = slicer.send("GET", f"/datastore/image?image={sample['id']}")
    assert (status, content) == (200, scan.read_bytes())
    assert sample["checksum"] == f"SHA256:{hashlib.sha256(content).hexdigest()}"
    # The plugin sends the scan again, from its memory, then the mask with values of its own.
    again = tmp_path / "again.nii.gz"
    again.write_bytes(gzip.compress(gzip.decompress(scan.read_bytes()), 1))
    assert again.read_bytes() != scan.read_bytes()
    status, _, _ = slicer.multipart("PUT", "/datastore/?image=Volume", {"params": "{}"}, {"file": again})
    assert status == 200
    label = sitk.GetImageFromArray(corrected * 3)
    label.CopyInformation(sitk.ReadImage(str(saved)))
    sitk.WriteImage(label, str(tmp_path / "label.nii.gz"))
    params = {"label_info": [{"name": "bright", "idx": 3}], "model": "coded", "client_id": "user-xyz"}

    def submit(image: str, **more: Any) -> tuple[int, Any]:
        fields = {"params": json.dumps({**params, **more})}
        files = {"label": tmp_path / "label.nii.gz"}
        status, _, body = slicer.multipart("PUT", f"/datastore/label?image={image}&tag=final", fields, files)
        return status, json.loads(body)

    status, stored = submit("Volume")
    assert (status, stored["image"]) == (200, "Volume"), stored
    found = api.client.get(f"/hospitals/north/corrections/{stored['label']}").json()
    assert (found["way"], found["accepted"], found["state"]) == ("viewer", False, "waiting")
    with api.context.database.read() as session:
        job = session.scalars(select(Job.id).where(Job.kind == "correction", Job.state == "queued")).one()
    run_job(job, api.settings)
    found = api.client.get(f"/hospitals/north/corrections/{stored['label']}").json()
    change = found["labels"]["bright"]
    added = int(((corrected > 0) & (drawn == 0)).sum())
    assert (found["exact"], change["added_voxels"], change["removed_voxels"]) == (True, added, 0)
    assert slicer.json("POST", "/activelearning/doubtful", {"client_id": "user-xyz"}) == {}
    assert submit("another")[0] == 404
    status, refused = submit("Volume", label_info=[{"name": "spleen", "idx": 3}])
    assert (status, "spleen" in refused["detail"]) == (422, True)


# --- OHIF


@pytest.mark.parametrize("plane", [*PLANES.values(), turned(8)], ids=[*PLANES, "oblique"])
def test_ohif_lays_the_voxels_over_the_series_as_it_holds_them(api: Any, plane: Any) -> None:
    # As large along each axis as the network's input, so that no orientation is resampled.
    files = series(CUBE, plane)
    name = uid("series")
    sent = api.client.put("/datastore/", params={"image": name}, files={"file": ("s.zip", zipped(files))})
    assert sent.json() == {"image": name}
    answer = Ohif(url(api, "/")).infer("coded", name)
    assert answer.status_code == 200, answer.text
    datasets = [pydicom.dcmread(io.BytesIO(content)) for content in files.values()]
    normal = np.cross(plane[:3], plane[3:])
    # Cornerstone sorts the images by their distance along the normal of the first, and appends their pixels.
    datasets.sort(key=lambda one: float(np.dot(one.ImagePositionPatient, normal)))
    held = np.concatenate([(one.pixel_array > THRESHOLD).ravel() for one in datasets])
    np.testing.assert_array_equal(voxels_of(answer.content), held)


def test_ohif_connects_under_the_prefix_and_maps_labels_from_1(api: Any, no_scans: None) -> None:
    ohif = Ohif(url(api, "/monailabel/"))
    info = ohif.info()
    assert labels_of(info, "coded") == {"bright": 1}
    assert "background" not in info["labels"]
    assert ohif.is_training() is False
    assert ohif.next_sample() == {}


def test_ohif_finds_a_series_that_was_sent_as_a_session(api: Any) -> None:
    files = series(VOLUME)
    sent = api.client.put(
        "/monailabel/session/", files=[("files", (name, content)) for name, content in files.items()]
    )
    assert sent.json()["session_info"]["meta"]["series"] == uid("series")
    answer = Ohif(url(api, "/monailabel/")).infer("coded", uid("series"))
    assert voxels_of(answer.content).sum() == (VOLUME > THRESHOLD).sum()


def test_ohif_reads_report_and_raw_mask_out_of_text(api: Any) -> None:
    files = series(VOLUME)
    api.client.put("/datastore/", params={"image": "t"}, files={"file": ("s.zip", zipped(files))})
    params, nrrd = parts_as_text(Ohif(url(api, "/")).infer("coded", "t", output="all"))
    inside = VOLUME.transpose(2, 1, 0) > THRESHOLD
    np.testing.assert_array_equal(voxels_of(nrrd), inside.ravel(order="F"))
    assert params["centroids"] == {"bright": [1, *np.round(np.argwhere(inside).mean(axis=0)).astype(int)]}
    assert params["label_names"] == {"bright": 1}


def test_page_of_an_allowed_origin_may_call(start: Any, store: Path) -> None:
    api = start(store, monailabel="prefix", allowed_origins=("https://viewer.example",))
    origin = {"Origin": "https://viewer.example"}
    asked = {
        **origin,
        "Access-Control-Request-Method": "PUT",
        "Access-Control-Request-Headers": "content-type",
    }
    preflight = api.client.options("/monailabel/session/", headers=asked)
    assert preflight.status_code == 200
    answer = api.client.get("/monailabel/info/", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://viewer.example"
    strange = api.client.post(
        "/monailabel/activelearning/random", headers={"Origin": "https://other.example"}
    )
    assert slug(strange) == (403, "cross-site")


# --- what may be chosen


def test_info_offers_the_options_of_each_model(api: Any) -> None:
    info = api.client.get("/monailabel/info/").json()
    assert "config" not in info
    assert info["labels"] == ["bright"]
    assert set(info["models"]) == {"bright", "coded"}, "a classifier gives no mask"
    space, plain = info["models"]["bright"], info["models"]["coded"]
    assert (plain["type"], plain["labels"], plain["dimension"]) == ("segmentation", {"bright": 1}, 3)
    assert plain["config"] == {
        "personalization": ["auto", "hospital", "global", "scan"],
        "hospital": ["", "north", "south"],
        # What weighs the models of members is of the space alone.
        "preset": [name for name in space["config"]["preset"] if name not in WEIGHS_MODELS],
    }
    assert set(space["config"]["preset"]) > WEIGHS_MODELS
    assert space["config"]["personalization"] == ["auto", "hospital", "member", "global", "scan"]
    assert space["config"]["preset"][:2] == ["", "ladder"]
    for unavailable in ("strategies", "trainers", "scoring", "train_stats"):
        assert info[unavailable] == {}


def test_info_offers_a_hospitals_caller_its_own_hospital_first(guarded: tuple[Any, dict[str, str]]) -> None:
    api, made = guarded
    for key, expected in (("north", ["north", ""]), ("all", ["", "north", "south"])):
        info = api.client.get("/monailabel/info/", headers=bearer(made[key])).json()
        assert info["models"]["coded"]["config"]["hospital"] == expected


def test_every_offered_choice_is_an_option_that_infer_takes(
    start: Any, tmp_path: Path, publish_bright: Any, scan: Path
) -> None:
    root, publish = tmp_path / "store", partial(publish_bright, task=CODED)
    publish_adapted(root, publish, publish(root, "coded"), "north", 120)
    api = start(root, monailabel="prefix")
    session = Slicer(url(api), scan.parent).create_session(scan)
    served = {"version": "coded.at-north@1", "actor": "ada", "reason": "no job made it", "override": True}
    for hospital in ("north", "south"):
        assert api.client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    tag = {"If-None-Match": "*"}
    assigned = api.client.put("/hospitals/north/serving/coded", json=served, headers=tag)
    assert assigned.status_code == 200, assigned.text
    config = api.client.get("/monailabel/info/").json()["models"]["coded"]["config"]
    for name, values in config.items():
        # A job of a worker adapts to a scan.
        for value in (each for each in values if name != "preset" and each != "scan"):
            # An adapted version is one hospital's.
            about = {"hospital": "north"} if value == "hospital" else {}
            answer = infer(api, params={name: value, **about}, session_id=session, output="json")
            assert answer.status_code == 200, (name, value, answer.text)
            adapted = "north" in (value, *about.values())
            expected = "coded.at-north@1" if adapted else "coded@1"
            assert answer.json()["receipt"]["model"]["name"] == expected, (name, value)
    # Without a hospital, or one that has no such version, the answer says what to do.
    for about, status in (({}, (422, "contradiction")), ({"hospital": "south"}, (404, "no-adapted-version"))):
        answer = infer(api, params={"personalization": "hospital", **about}, session_id=session)
        assert slug(answer) == status
        assert "hospital" in answer.json()["detail"]


# --- requests that are wrong, or try to be more


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ("[]", "body.params"),
        ("[" * 4000, "body.params"),
        ("{", "body.params"),
        ({"hopsital": "north"}, "body.params"),
        ({"hospital": 5}, "hospital"),
        ({"personalization": "best"}, "personalization"),
        ({"result_dtype": "uint16"}, "body.params.result_dtype"),
        ({"result_extension": ".nii.gz"}, "body.params.result_extension"),
        ({"result_compress": "perhaps"}, "compress"),
    ],
)
def test_wrong_params_are_422_and_name_the_field(api: Any, scan: Path, params: Any, field: str) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    answer = infer(api, params=params, session_id=session)
    assert slug(answer) == (422, "invalid-request")
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_params_do_not_replace_what_the_route_says(api: Any, scan: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    params = {
        "model": "dark",
        "output": "overlay",
        "image": "/etc/passwd",
        "session": {"image": "/etc/passwd"},
        "session_id": "0" * 32,
        "device": "cuda",
        "foreground": [[1, 2, 3]],
        "largest_cc": True,
    }
    answer = infer(api, params=params, session_id=session, output="json")
    assert answer.status_code == 200, answer.text
    assert answer.json()["receipt"]["model"]["name"] == "coded@1"


def test_image_is_never_a_path(api: Any, scan: Path) -> None:
    for image in (str(scan), "/etc/passwd", "../../locum.db", str(kept_in(api)), "*", "%"):
        answer = infer(api, image=image)
        assert slug(answer) == (404, "viewer-scan-unknown")
        assert image not in answer.text or len(image) < 2
        for method, path in (("GET", "/monailabel/session/"), ("DELETE", "/monailabel/session/")):
            refused = api.client.request(method, path + httpx.URL(f"/{image}").path.lstrip("/"))
            assert refused.status_code in (404, 405)
    as_text = api.client.post("/monailabel/infer/coded", data={"file": str(scan)}, files={"x": (None, "y")})
    assert slug(as_text) == (422, "malformed-form")
    assert slug(infer(api)) == (422, "invalid-request")


def test_file_in_the_form_is_segmented_and_not_kept(api: Any, scan: Path) -> None:
    before = list(kept_in(api).rglob("scan"))
    with scan.open("rb") as file:
        answer = api.client.post("/monailabel/infer/coded", files={"file": ("a.nii.gz", file)})
    assert answer.status_code == 200
    assert list(kept_in(api).rglob("scan")) == before


def test_damaged_requests_are_4xx(api: Any, scan: Path) -> None:
    draw, content = random.Random(7), scan.read_bytes()
    session = Slicer(url(api), scan.parent).create_session(scan)
    names = ["personalization", "hospital", "preset", "shape_weight", "result_compress", "x" * 200]
    values = [None, True, -1, 1e300, "", "member", "\x00", "../..", [], {"a": [1] * 50}, "north" * 50]
    form = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n%s\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    found = set()
    for _ in range(60):
        params = {draw.choice(names): draw.choice(values) for _ in range(3)}
        output = draw.choice(["all", "image", "json", "dicom_seg", "x", ""])
        found.add(infer(api, params=params, session_id=session, output=output).status_code)
        body = bytearray(form % content)
        for _ in range(draw.choice((1, 3, 20))):
            place = draw.randrange(len(body))
            body[place : place + draw.choice((0, 1, 500))] = draw.randbytes(draw.randrange(4))
        expiry = draw.choice(["0", "-5", "9" * 20, "x"])
        answer = api.client.put("/session/", params={"expiry": expiry}, content=bytes(body), headers=kind)
        found.add(answer.status_code)
        odd = draw.choice(["%00", "..%2f", "*", "%ff", "f" * 32, "x" * 3000])
        found.add(api.client.delete(f"/monailabel/datastore/?id={odd}").status_code)
        found.add(api.client.get(f"/monailabel/session/{odd}").status_code)
    assert found <= {200, 404, 413, 415, 422}
    assert api.client.get(f"/monailabel/session/{session}").status_code == 200


def test_scribbles_are_refused(api: Any, scan: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    answer = api.client.post(
        "/monailabel/infer/coded", params={"session_id": session}, files={"label": ("label.bin", b"\0")}
    )
    assert slug(answer) == (422, "invalid-request")


def test_unknown_or_classifying_model_is_named(api: Any, scan: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    assert slug(infer(api, "nothing", session_id=session)) == (404, "artefact-not-found")
    assert infer(api, "dark", session_id=session).status_code == 422


@pytest.mark.parametrize("path", ["/monailabel/session/", "/monailabel/datastore/"])
def test_upload_that_is_no_scan_or_too_large_is_refused_and_not_kept(
    start: Any, store: Path, path: str
) -> None:
    api = start(store, monailabel="prefix", max_upload_bytes=200_000, max_decompressed_bytes=300_000)
    field = "files" if path.endswith("session/") else "file"
    bomb = gzip.compress(nib.Nifti1Image(np.zeros((128, 128, 64), np.uint8), np.eye(4)).to_bytes())
    assert len(bomb) < 10_000
    refused = {
        b"": (422, "damaged-scan"),
        b"no scan at all": (415, "unsupported-scan"),
        bomb: (413, "scan-too-large"),
        bytes(200_001): (413, "upload-too-large"),
    }
    for content, expected in refused.items():
        answer = api.client.put(path, files={field: ("x", content)})
        assert slug(answer) == expected
    assert slug(api.client.put(path, files={"other": ("x", b"y")})) == (422, "malformed-form")
    assert list(kept_in(api).rglob("scan")) == []


# --- sessions


def test_session_belongs_to_its_caller(guarded: tuple[Any, dict[str, str]], scan: Path) -> None:
    api, made = guarded
    session = Slicer(url(api), scan.parent, made["south"]).create_session(scan)
    with scan.open("rb") as file:
        named = api.client.put(
            "/monailabel/datastore/",
            params={"image": "mine"},
            files={"file": ("x", file)},
            headers=bearer(made["south"]),
        )
    assert named.status_code == 200

    def asked(key: str, session: str, image: str) -> list[tuple[int, Any]]:
        client, headers, body = api.client, bearer(key), {"params": (None, "{}")}
        answers = [
            client.get(f"/monailabel/session/{session}", headers=headers),
            client.post(f"/monailabel/infer/coded?session_id={session}", headers=headers, files=body),
            client.post(f"/monailabel/infer/coded?image={image}", headers=headers, files=body),
            client.post(f"/monailabel/infer/coded?image={session}", headers=headers, files=body),
            client.delete(f"/monailabel/datastore/?id={image}", headers=headers),
            client.delete(f"/monailabel/session/{session}", headers=headers),
        ]
        return [(one.status_code, one.json()["detail"]) for one in answers]

    never = asked(made["north"], "f" * 32, "never")
    assert {status for status, _ in never} == {404}
    for other in ("north", "all"):
        assert asked(made[other], session, "mine") == never
        listed = api.client.get("/monailabel/datastore/?output=all", headers=bearer(made[other])).json()
        assert listed["objects"] == {}
    own = bearer(made["south"])
    assert set(api.client.get("/monailabel/datastore/?output=all", headers=own).json()["objects"]) == {
        "mine",
        session,
    }
    answer = api.client.post(
        f"/monailabel/infer/coded?session_id={session}", headers=own, files={"params": (None, "{}")}
    )
    assert answer.status_code == 200


def test_scan_of_a_hospital_is_not_segmented_for_another(
    guarded: tuple[Any, dict[str, str]], scan: Path
) -> None:
    api, made = guarded
    session = Slicer(url(api), scan.parent, made["south"]).create_session(scan)
    for hospital in ("north", "nowhere"):
        answer = api.client.post(
            f"/monailabel/infer/coded?session_id={session}",
            headers=bearer(made["south"]),
            files={"params": (None, json.dumps({"hospital": hospital}))},
        )
        assert slug(answer) == (404, "hospital-unknown")


def test_expired_session_is_404_and_its_scan_is_deleted(start: Any, store: Path, scan: Path) -> None:
    api = start(store, monailabel="prefix", viewer_scan_minutes=1)
    session = Slicer(url(api), scan.parent).create_session(scan)
    age(api, 61)
    for answer in (
        api.client.get(f"/monailabel/session/{session}"),
        infer(api, session_id=session),
        api.client.delete(f"/monailabel/session/{session}"),
    ):
        assert slug(answer) == (404, "viewer-scan-unknown")
    Slicer(url(api), scan.parent).create_session(scan)
    assert len(list(kept_in(api).rglob("scan"))) == 1


def test_use_puts_the_expiry_off_and_a_look_does_not(start: Any, store: Path, scan: Path) -> None:
    api = start(store, monailabel="prefix", viewer_scan_minutes=1)
    session = Slicer(url(api), scan.parent).create_session(scan)
    for query, later in (("", False), ("?update_ts=true", True)):
        before = age(api, 30)
        api.client.get(f"/monailabel/session/{session}{query}")
        assert (row_of(api, session).used_at > before) is later
    before = age(api, 30)
    assert infer(api, session_id=session, output="json").status_code == 200
    assert row_of(api, session).used_at > before


def test_api_processes_share_a_scan_by_database_and_bucket_alone(
    start: Any, store: Path, scan: Path, tmp_path: Path, bucket_url: str
) -> None:
    shared = {"database_url": f"sqlite:///{tmp_path / 'shared.db'}", "files": bucket_url}
    one, other = (start(store, monailabel="prefix", max_viewer_scans=2, **shared) for _ in range(2))
    session = Slicer(url(one), scan.parent).create_session(scan)
    answer = infer(other, session_id=session, output="json")
    assert answer.status_code == 200, answer.text
    sent = one.client.get(f"/monailabel/session/{session}").json()["session_info"]["meta"]["sha256"]
    assert answer.json()["receipt"]["input_sha256"] == sent
    # The limits count what the other process keeps.
    later = [Slicer(url(api), scan.parent).create_session(scan) for api in (one, other)]
    listed = one.client.get("/monailabel/datastore/?output=all").json()["objects"]
    assert sorted(listed) == sorted(later)
    assert one.client.delete(f"/monailabel/session/{later[1]}").status_code == 200
    assert slug(infer(other, session_id=later[1])) == (404, "viewer-scan-unknown")
    assert one.settings.open_files().names("viewers") == [f"{later[0]}/scan"]
    for api in (one, other):
        assert not kept_in(api).exists()


def test_client_gives_neither_path_nor_name_of_its_file_back(api: Any, scan: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    shown = api.client.get(f"/monailabel/session/{session}").text
    assert "DOE" not in shown
    assert str(api.settings.state_dir) not in shown
    assert row_of(api, session).image is None
    assert not any("DOE" in str(path) for path in kept_in(api).rglob("*"))


def test_image_of_two_dimensions_has_a_report_and_a_png_and_no_nrrd(
    api: Any, make_png: Callable[..., bytes], picture: Any
) -> None:
    sent = api.client.put("/monailabel/session/", files={"files": ("a.png", make_png(picture))})
    session = sent.json()["session_id"]
    assert infer(api, session_id=session, output="json").status_code == 200
    assert slug(infer(api, session_id=session, output="image")) == (422, "output-mismatch")
    both = infer(api, session_id=session)
    _, disposition, png = both.content.split(b"\r\n--")[1].split(b"\r\n", 2)
    assert disposition == b'Content-Disposition: form-data; name="image"; filename="mask.png"'
    alone = api.segment(make_png(picture), model="bright", output="png")
    assert png == b"Content-Type: image/png\r\n\r\n" + alone.content


# --- outputs


def test_dicom_seg_is_that_of_segment(api: Any) -> None:
    content = zipped(series(VOLUME))
    session = api.client.put("/session/", files={"files": ("s.zip", content)}).json()["session_id"]
    answer = infer(api, params={"label_info": [{"name": "x"}]}, session_id=session, output="dicom_seg")
    assert answer.headers["content-type"] == "application/dicom"
    assert answer.content == api.segment(content, model="coded", output="dicom-seg").content
    seg = hd.seg.segread(io.BytesIO(answer.content))
    assert seg.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0].CodeValue == "10200004"


def test_rtstruct_is_that_of_segment(api: Any) -> None:
    content = zipped(series(VOLUME))
    session = api.client.put("/session/", files={"files": ("s.zip", content)}).json()["session_id"]
    answer = infer(api, params={"tolerance_mm": 1}, session_id=session, output="dicom_rtstruct")
    assert answer.headers["content-type"] == "application/dicom"
    expected = api.segment(content, model="coded", output="dicom-rtstruct", tolerance_mm="1")
    assert answer.content == expected.content


def test_dicom_seg_of_a_nifti_is_refused(api: Any, scan: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    assert slug(infer(api, session_id=session, output="dicom_seg")) == (422, "output-mismatch")


def test_mask_is_compressed_unless_the_viewer_says_not(api: Any, scan: Path, tmp_path: Path) -> None:
    session = Slicer(url(api), scan.parent).create_session(scan)
    found = []
    for params in ({}, {"result_compress": True}, {"result_compress": False}):
        path = tmp_path / "mask.nrrd"
        path.write_bytes(infer(api, params=params, session_id=session, output="image").content)
        found.append(sitk.GetArrayFromImage(sitk.ReadImage(str(path))))
        assert (b"encoding: gzip" in path.read_bytes()) is (params.get("result_compress") is not False)
    np.testing.assert_array_equal(found[0], found[2])


def test_viewer_that_leaves_cancels_its_job(start: Any, store: Path, scan: Path) -> None:
    api = start(store, monailabel="prefix")
    session = Slicer(url(api), scan.parent).create_session(scan)
    body = {"params": (None, '{"personalization": "scan", "preset": "paper"}')}
    with httpx.Client(base_url=url(api)) as leaving:
        asked = leaving.build_request("POST", f"/infer/bright?session_id={session}", files=body)
        connection = HTTPConnection(api.client.base_url.host, api.client.base_url.port)
        connection.request("POST", asked.url.raw_path.decode(), asked.read(), dict(asked.headers))
        wait_for(lambda: api.client.get("/jobs?state=queued").json()["jobs"])
        connection.close()
    wait_for(lambda: api.client.get("/jobs?state=cancelled").json()["jobs"])
    assert api.client.get(f"/monailabel/session/{session}").status_code == 200


def test_job_that_takes_too_long_is_cancelled_with_504(start: Any, store: Path, scan: Path) -> None:
    api = start(store, monailabel="prefix", viewer_wait_seconds=1)
    session = Slicer(url(api), scan.parent).create_session(scan)
    answer = infer(api, "bright", params={"personalization": "scan", "preset": "paper"}, session_id=session)
    assert slug(answer) == (504, "job-too-slow")
    (job,) = api.client.get("/jobs").json()["jobs"]
    assert job["state"] == "cancelled"
    kept_until = api.client.get(f"/jobs/{job['id']}").json()["files_expire_at"]
    assert datetime.fromisoformat(kept_until) <= datetime.now(UTC)
    assert not any((api.settings.state_dir / "jobs").glob("*"))


# --- the service around it


def test_interface_is_off_by_default(start: Any, store: Path) -> None:
    api = start(store)
    for path in ("/monailabel/info/", "/info/", "/monailabel/auth/", "/auth/", "/train/"):
        assert api.client.get(path).status_code == 404
    assert not any(path.startswith("/monailabel") for path in api.client.get("/openapi.json").json()["paths"])


def test_own_paths_of_locum_stay_at_the_root(api: Any) -> None:
    assert api.client.get("/session").json()["actor"] == "anonymous"
    assert api.client.get("/models/coded").json()["name"] == "coded"
    assert api.client.get("/info/").json() == api.client.get("/monailabel/info/").json()


@pytest.mark.parametrize(("monailabel", "mount"), [("prefix", "/monailabel"), ("root", "")])
def test_every_path_needs_a_credential_but_the_404_for_signing_in(
    start: Any, store: Path, monailabel: str, mount: str
) -> None:
    api = start(store, monailabel=monailabel, auth="keys")
    assert slug(api.client.get(f"{mount}/auth/")) == (404, "not-found")
    for path in ("/info/", "/train/", "/session/x", "/auth/token", "/auth/x/../../info/"):
        assert slug(api.client.get(f"{mount}{path}")) == (401, "credential-missing")


def test_each_access_to_a_scan_leaves_a_row(guarded: tuple[Any, dict[str, str]], scan: Path) -> None:
    api, made = guarded
    headers = bearer(made["north"])
    with api.context.database.read() as session:
        before = trail.head(session).number
    created = Slicer(url(api), scan.parent, made["north"]).create_session(scan)
    for output in ("json", "image"):
        api.client.post(
            f"/monailabel/infer/coded?session_id={created}&output={output}&image=DOE",
            headers=headers,
            files={"params": (None, '{"hospital": "north"}')},
        )
    api.client.get("/monailabel/datastore/?output=all", headers=headers)
    api.client.delete(f"/monailabel/session/{created}", headers=headers)
    api.client.get(f"/monailabel/session/{created}", headers=headers)
    with api.context.database.snapshot() as session:
        rows = list(trail.rows(session, before + 1))
        trail.verify(session)
    assert [(row["action"], row["outcome"]) for row in rows] == [
        ("scan.stored", 200),
        ("version.kept", 200),
        ("scan.segmented", 200),
        ("scan.segmented", 200),
        ("scan.listed", 200),
        ("scan.deleted", 200),
    ]
    assert {row["scan"] for row in rows} == {rows[0]["scan"], None}
    assert [row["hospital"] for row in rows if row["action"] == "scan.segmented"] == ["north", "north"]
    assert "DOE" not in str(rows)
