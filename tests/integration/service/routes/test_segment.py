"""`POST /segment`: the forms of the answer, its headers and its report, against masks worked out by hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from anyio import to_thread
from numpy.typing import NDArray
from PIL import Image

from model_store.manifest import Lineage

THRESHOLD = 100
AFFINE = np.array([[0.0, 0, 2.0, -5], [-1.5, 0, 0, 7], [0, 3.0, 0, 1], [0, 0, 0, 1]])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    return root


@pytest.fixture(scope="module")
def api(start: Any, store: Path) -> Any:
    return start(store)


@pytest.fixture(scope="module")
def volume() -> NDArray[np.int16]:
    """[32, 5, 32]: with AFFINE, five axial slices of 32 x 32 along the second axis."""
    voxels = np.random.default_rng(5).integers(0, 200, (32, 5, 32))
    return np.where(abs(voxels - THRESHOLD) < 5, 0, voxels).astype(np.int16)


def mask_of(response: Any) -> NDArray[np.uint8]:
    image = Image.open(io.BytesIO(response.content))
    assert (image.format, image.mode) == ("PNG", "L")
    return np.asarray(image)


def volume_of(response: Any) -> Any:
    return nib.Nifti1Image.from_bytes(gzip.decompress(response.content))


def test_segment_of_an_image_returns_a_png_mask_and_headers(
    api: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    response = api.segment(make_png(picture))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/png"
    np.testing.assert_array_equal(mask_of(response), picture > THRESHOLD)
    graph = (store / "bright" / "1" / "graph.onnx").read_bytes()
    uuid.UUID(response.headers["locum-request"])
    assert response.headers["locum-model"] == "bright@1"
    assert response.headers["locum-graph"] == "sha256:" + hashlib.sha256(graph).hexdigest()
    assert response.headers["locum-personalization"] == "global"
    assert json.loads(response.headers["locum-labels"]) == {"1": ["bright"]}
    assert int(response.headers["locum-warnings"]) >= 0
    assert "inference;dur=" in response.headers["server-timing"]


def test_small_scan_is_handed_to_a_thread_three_times(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = make_png(picture)
    assert api.segment(scan).status_code == 200
    handed: list[Any] = []
    run = to_thread.run_sync

    async def counted(work: Any, *arguments: Any, **options: Any) -> Any:
        handed.append(work)
        return await run(work, *arguments, **options)

    monkeypatch.setattr(to_thread, "run_sync", counted)
    for _ in range(4):
        assert api.segment(scan).status_code == 200
    # The network is chosen, it answers, and the audit's row is committed.
    assert len(handed) == 4 * 3, handed


def test_mask_of_a_larger_image_has_the_size_of_the_image(api: Any, make_png: Callable[..., bytes]) -> None:
    pixels = np.zeros((96, 64), np.uint8)
    pixels[24:72, 16:48] = 255
    mask = mask_of(api.segment(make_png(pixels)))
    assert mask.shape == pixels.shape
    wrong = mask != (pixels > THRESHOLD)
    assert not wrong[27:69, 19:45].any()
    assert wrong.mean() < 0.02


def test_json_report_has_measures_and_receipt(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    scan = make_png(picture)
    response = api.segment(scan, output="json", personalization="global")
    report = response.json()
    bright = int((picture > THRESHOLD).sum())
    label = report["labels"]["bright"]
    size = {"classes": [1], "voxels": bright, "fraction": bright / picture.size, "volume_ml": None}
    assert {name: label[name] for name in size} == size
    assert 0 < label["confidence"] <= 1
    assert report["shape"] == [32, 32]
    assert report["notice"] == "research use only"
    receipt = report["receipt"]
    assert receipt["request"] == response.headers["locum-request"]
    assert receipt["input_sha256"] == "sha256:" + hashlib.sha256(scan).hexdigest()
    assert receipt["input_bytes"] == len(scan)
    assert receipt["graph"] == response.headers["locum-graph"]
    assert receipt["model"]["name"] == "bright@1"
    assert receipt["provider"] == "CPUExecutionProvider"
    assert receipt["options"]["output"] == "json"
    assert receipt["notice"] == "research use only"
    assert {"decode", "prepare", "inference", "restore"} <= report["timing_ms"].keys()


def test_islands_of_slices_are_taken_off_by_the_volume(
    start: Any, tmp_path: Path, publish_bright: Any, make_nifti: Callable[..., bytes]
) -> None:
    one = publish_bright(tmp_path).manifest.task.model_copy(update={"keep_largest": ("bright",)})
    publish_bright(tmp_path, "one", task=one)
    voxels = np.zeros((32, 32, 5), np.int16)
    # Two pieces of 32 voxels, of which one goes on in the next slice.
    voxels[4:8, 4:12, 1] = voxels[20:24, 20:28, 1] = voxels[24:26, 28:30, 2] = 200
    api = start(tmp_path)
    answer = api.segment(make_nifti(voxels), model="one")
    assert answer.status_code == 200, answer.text
    found = volume_of(answer).get_fdata()
    assert volume_of(api.segment(make_nifti(voxels), model="bright")).get_fdata().sum() == 68
    assert (found.sum(), found[20:26].sum()) == (36, 36)


def test_reported_confidence_matches_the_documented_formula(api: Any, make_png: Callable[..., bytes]) -> None:
    # Half of the pixels lie 2 above the threshold, half far below: p = sigmoid(0.5 * 2) and almost 0.
    pixels = np.zeros((32, 32), np.uint8)
    pixels[:16] = THRESHOLD + 2
    p = 1 / (1 + math.exp(-1.0))
    label = api.segment(make_png(pixels), output="json").json()["labels"]["bright"]
    assert label["confidence"] == pytest.approx(2 * p / (p + 1), rel=1e-4)
    assert (label["parts"], label["at_border"]) == (1, True)


def test_mask_of_a_volume_has_its_grid_and_affine(
    api: Any, make_nifti: Callable[..., bytes], volume: NDArray[np.int16]
) -> None:
    response = api.segment(make_nifti(volume, AFFINE))
    assert response.headers["content-type"] == "application/gzip"
    mask = volume_of(response)
    np.testing.assert_array_equal(np.asarray(mask.dataobj), volume > THRESHOLD)
    np.testing.assert_allclose(mask.affine, AFFINE, atol=1e-6)
    assert mask.get_data_dtype() == np.uint8


def test_report_of_a_volume_measures_labels_in_ml(
    api: Any, make_nifti: Callable[..., bytes], volume: NDArray[np.int16]
) -> None:
    report = api.segment(gzip.compress(make_nifti(volume, AFFINE)), output="json").json()
    bright = int((volume > THRESHOLD).sum())
    assert report["labels"]["bright"]["voxels"] == bright
    assert report["labels"]["bright"]["volume_ml"] == pytest.approx(bright * 2.0 * 1.5 * 3.0 / 1000)
    assert report["shape"] == [32, 5, 32]


def test_overlay_of_images_and_volumes_is_a_png(
    api: Any,
    make_png: Callable[..., bytes],
    make_nifti: Callable[..., bytes],
    picture: NDArray[np.uint8],
    volume: NDArray[np.int16],
) -> None:
    for scan in (make_png(picture), make_nifti(volume, AFFINE)):
        response = api.segment(scan, output="overlay")
        assert response.headers["content-type"] == "image/png"
        pixels = np.asarray(Image.open(io.BytesIO(response.content)))
        assert (pixels == (230, 159, 0)).all(axis=-1).sum() > 100


@pytest.mark.parametrize("output", ["png", "nifti"])
def test_output_that_does_not_fit_the_scan_is_422(
    api: Any,
    make_png: Callable[..., bytes],
    make_nifti: Callable[..., bytes],
    picture: NDArray[np.uint8],
    volume: NDArray[np.int16],
    output: str,
) -> None:
    scan = make_nifti(volume, AFFINE) if output == "png" else make_png(picture)
    response = api.segment(scan, output=output)
    assert (response.status_code, response.json()["type"]) == (422, "urn:locum:problem:output-mismatch")


def test_segment_of_equal_requests_is_bit_identical_across_apis(
    api: Any,
    start: Any,
    store: Path,
    make_png: Callable[..., bytes],
    make_nifti: Callable[..., bytes],
    picture: NDArray[np.uint8],
    volume: NDArray[np.int16],
) -> None:
    other = start(store)
    for scan in (make_png(picture), make_nifti(volume, AFFINE)):
        answers = {each.segment(scan).content for each in (api, api, other)}
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"output": "dicom"}, "output"),
        ({"personalization": "whose"}, "personalization"),
        ({"personalization": "scan", "preset": "paper"}, "is one model"),
        ({"guard": "shrug"}, "guard"),
        ({"personalisation": "auto"}, "not a parameter"),
        ({"hospital": "../../etc"}, "hospital"),
        ({"model": "x" * 300}, "model"),
        ({"model": "a/../b"}, "expected name"),
        ({"site": "CS"}, "personalization=member"),
        ({"personalization": "member"}, "site"),
    ],
)
def test_segment_with_wrong_parameters_is_422_by_name(
    api: Any,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
    fields: dict[str, str],
    expected: str,
) -> None:
    response = api.segment(make_png(picture), **fields)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert expected in response.json()["detail"]


def test_empty_form_fields_count_as_absent(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    assert api.segment(make_png(picture), model="", hospital="", output="", site="").status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"model": "other"}, 404), ({"model": "bright@7"}, 404), ({"hospital": "nobody"}, 404)],
)
def test_segment_with_absent_model_or_hospital_is_rejected(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8], fields: dict[str, str], status: int
) -> None:
    assert api.segment(make_png(picture), **fields).status_code == status


def test_segment_with_withdrawn_version_is_410_and_damaged_is_503(
    start: Any,
    publish_bright: Any,
    tmp_path: Path,
    make_png: Callable[..., bytes],
    picture: NDArray[np.uint8],
) -> None:
    for at in (50, 60, 70):
        publish_bright(tmp_path, at=at)
    api = start(tmp_path)
    api.store.withdraw("bright@1", actor="dr", reason="wrong labels")
    gone = api.segment(make_png(picture), model="bright@1")
    assert gone.status_code == 410
    assert "wrong labels" in gone.json()["detail"]
    graph = tmp_path / "bright" / "2" / "graph.onnx"
    content = bytearray(graph.read_bytes())
    content[-1] ^= 1
    graph.chmod(0o644)
    graph.write_bytes(content)
    damaged = api.segment(make_png(picture), model="bright@2")
    assert damaged.status_code == 503
    assert "graph.onnx" in damaged.json()["detail"]
    assert api.segment(make_png(picture)).headers["locum-model"] == "bright@3"


def test_segment_guard_warns_or_rejects_an_unusual_scan(
    start: Any,
    publish_bright: Any,
    tmp_path: Path,
    make_png: Callable[..., bytes],
    make_nifti: Callable[..., bytes],
) -> None:
    from model_store.guard import ReferenceStatistics, summarise
    from model_store.preprocessing import prepare
    from model_store.scan import decode

    task = publish_bright(tmp_path / "aside").manifest.task
    chance = np.random.default_rng(0)
    training = [make_png(chance.integers(0, 200, (32, 32), np.uint8)) for _ in range(12)]
    reference = None
    for data in training:
        scan = decode(data)
        one = ReferenceStatistics.of(summarise(scan, prepare(scan, task)))
        reference = one if reference is None else reference.merge(one)
    publish_bright(tmp_path / "store", statistics=reference)
    api = start(tmp_path / "store")

    usual = api.segment(make_png(chance.integers(0, 200, (32, 32), np.uint8)), guard="refuse")
    assert (usual.status_code, usual.headers["locum-warnings"]) == (200, "0")
    assert "locum-warning-names" not in usual.headers
    odd = make_nifti(np.full((32, 32, 40), 9000, np.int16) + np.arange(40, dtype=np.int16))
    # A volume for a network of images was most likely sent to the wrong model.
    default = api.segment(odd)
    assert (default.status_code, default.json()["type"]) == (422, "urn:locum:problem:scan-unlike-task")
    assert [("volume" in reason) for reason in default.json()["warnings"]] == [True]
    mild = api.segment(make_png(chance.integers(0, 200, (64, 64), np.uint8)), output="json")
    assert (mild.status_code, mild.headers["locum-warning-names"]) == (200, "scan-unlike-task")
    answered = api.segment(odd, output="json", guard="warn")
    assert answered.status_code == 200
    warnings = answered.json()["warnings"]
    assert any("volume" in warning for warning in warnings)
    assert answered.headers["locum-warnings"] == str(len(warnings))
    assert answered.headers["locum-warning-names"] == "scan-unlike-task"
    refused = api.segment(odd, guard="refuse")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:scan-unlike-task")
    assert refused.json()["warnings"] == warnings


def test_segment_for_a_member_uses_its_own_network(
    start: Any, publish_bright: Any, tmp_path: Path, make_png: Callable[..., bytes]
) -> None:
    from model_store.manifest import NetworkSpec, RoutingSpaceManifest
    from model_store.store import Store

    network = NetworkSpec(name="threshold", arguments={})
    parts = {"part_of": "brain", "network": network}
    whole = publish_bright(tmp_path, "brain.global", at=50, **parts)
    inside = publish_bright(tmp_path, "brain.CS", at=150, role="inside", site="CS", **parts)
    manifest = RoutingSpaceManifest(
        name="brain",
        task=whole.manifest.task,
        lineage=whole.manifest.lineage,
        global_model=whole.digest,
        inside={"CS": inside.digest},
        metrics={"CS.val_dice": 0.8, "CS.val_dice_global": 0.7},
    )
    Store(tmp_path).publish(manifest, {})
    api = start(tmp_path)
    api.client.put("/hospitals/charite", json={"name": "Charite", "site": "CS"}).raise_for_status()
    scan = make_png(np.full((32, 32), 100, np.uint8))
    for fields, expected, value, part in (
        ({}, "global", 1, whole),
        ({"hospital": "charite"}, "member; site=CS", 0, inside),
        ({"hospital": "charite", "personalization": "global"}, "global", 1, whole),
        ({"personalization": "member", "site": "CS"}, "member; site=CS", 0, inside),
    ):
        response = api.segment(scan, **fields)
        assert response.headers["locum-personalization"] == expected
        assert response.headers["locum-model"] == "brain@1"
        assert response.headers["locum-graph"] == part.manifest.files["graph.onnx"].sha256
        assert (mask_of(response) == value).all()


def test_hospital_of_a_site_that_took_no_part_is_answered_with_a_warning(
    start: Any, tmp_path: Path, publish_bright: Any, make_png: Callable[..., bytes], picture: Any
) -> None:
    trained = Lineage(method="fedavg", run="test", sites=("CS", "DU"), rounds=1, seed=0)
    publish_bright(tmp_path, lineage=trained)
    api = start(tmp_path)
    scan = make_png(picture)
    for hospital, site, names in (("known", "CS", None), ("unknown", "nowhere", "site-unknown")):
        api.client.put(f"/hospitals/{hospital}", json={"name": hospital, "site": site}).raise_for_status()
        answer = api.segment(scan, hospital=hospital, personalization="auto")
        assert answer.headers["locum-personalization"] == "global"
        assert answer.headers.get("locum-warning-names") == names
    assert "nowhere" in api.segment(scan, hospital="unknown", output="json").text


def entropy_percent(voxels: NDArray[Any]) -> NDArray[Any]:
    """Of p = sigmoid((x - 100) / 2), by the definition."""
    p = 1 / (1 + np.exp(-0.5 * (voxels.astype(float) - THRESHOLD)))
    q = np.clip(np.stack([p, 1 - p]), 1e-12, 1)
    return -100 * (q * np.log2(q)).sum(axis=0)


def test_uncertainty_of_each_voxel_is_its_entropy_on_the_scan_s_own_grid(
    api: Any, make_nifti: Callable[..., bytes]
) -> None:
    voxels = np.random.default_rng(9).integers(92, 108, (32, 5, 32)).astype(np.int16)
    found = volume_of(api.segment(make_nifti(voxels, AFFINE), voxels="uncertainty"))
    assert found.get_data_dtype() == np.uint8
    np.testing.assert_allclose(found.affine, AFFINE)
    np.testing.assert_allclose(np.asanyarray(found.dataobj), entropy_percent(voxels), atol=0.6)


def test_uncertainty_of_a_tilted_volume_is_on_its_grid(api: Any, make_nifti: Callable[..., bytes]) -> None:
    turn = np.eye(4)
    turn[1:3, 1:3] = [[math.cos(0.5), -math.sin(0.5)], [math.sin(0.5), math.cos(0.5)]]
    voxels = np.full((20, 22, 12), 101, np.int16)
    found = volume_of(api.segment(make_nifti(voxels, turn @ AFFINE), voxels="uncertainty"))
    np.testing.assert_allclose(found.affine, turn @ AFFINE, atol=1e-6)
    np.testing.assert_allclose(
        np.asanyarray(found.dataobj)[8:12, 8:12, 5:7], entropy_percent(np.array(101)), atol=1
    )


def test_uncertainty_of_an_image_is_a_png(api: Any, make_png: Callable[..., bytes]) -> None:
    pixels = np.random.default_rng(9).integers(92, 108, (32, 32), np.uint8)
    found = mask_of(api.segment(make_png(pixels), voxels="uncertainty"))
    np.testing.assert_allclose(found, entropy_percent(pixels), atol=0.6)


def test_uncertainty_of_voxels_is_rejected_where_the_answer_has_no_voxels(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    answer = api.segment(make_png(picture), voxels="uncertainty", output="json")
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:locum:problem:contradiction")
    assert "nifti" in answer.json()["detail"]
