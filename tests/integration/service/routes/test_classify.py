"""`POST /classify`: what it answers, against probabilities worked out by hand from the mean intensity."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.model_store.dicom_files import series, zipped

AFFINE = np.array([[0.0, 0, 2.0, -5], [-1.5, 0, 0, 7], [0, 3.0, 0, 1], [0, 0, 0, 1]])


def bright(mean: float) -> float:
    """p(bright) as the network `dark` has it."""
    return 1 / (1 + math.exp(-0.1 * (mean - 100)))


def entropy(p: float) -> float:
    return -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, publish_dark: Any) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish_dark(root)
    return root


@pytest.fixture(scope="module")
def api(start: Any, store: Path) -> Any:
    return start(store)


@pytest.fixture(scope="module")
def image() -> NDArray[np.uint8]:
    """[28, 28], the network's own size, so that nothing is resized."""
    return np.random.default_rng(2).integers(60, 130, (28, 28), np.uint8)


@pytest.fixture(scope="module")
def volume() -> NDArray[np.int16]:
    """[28, 5, 28]: with AFFINE, five axial slices along the second axis, ever brighter."""
    noise = np.random.default_rng(4).integers(-3, 4, (28, 5, 28))
    return (noise + np.array([70, 85, 100, 115, 140])[None, :, None]).astype(np.int16)


def test_classify_returns_probabilities_receipt_and_headers(
    api: Any, store: Path, make_png: Callable[..., bytes], image: NDArray[np.uint8]
) -> None:
    scan = make_png(image)
    response = api.classify(scan)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    report, p = response.json(), bright(image.mean())
    assert report["probabilities"] == {"dark": pytest.approx(1 - p), "bright": pytest.approx(p)}
    assert list(report["probabilities"]) == ["dark", "bright"]
    assert report["predicted"] == "dark"
    assert report["entropy"] == pytest.approx(entropy(p), rel=1e-4)
    assert (report["slices"], report["shape"]) == (None, [28, 28])
    assert report["notice"] == "research use only"
    assert {"decode", "prepare", "inference"} <= report["timing_ms"].keys()
    graph = (store / "dark" / "1" / "graph.onnx").read_bytes()
    uuid.UUID(response.headers["locum-request"])
    assert response.headers["locum-model"] == "dark@1"
    assert response.headers["locum-graph"] == "sha256:" + hashlib.sha256(graph).hexdigest()
    assert response.headers["locum-personalization"] == "global"
    assert response.headers["locum-warnings"] == str(len(report["warnings"]))
    assert response.headers["cache-control"] == "no-store"
    assert "inference;dur=" in response.headers["server-timing"]
    receipt = report["receipt"]
    assert receipt["request"] == response.headers["locum-request"]
    assert receipt["input_sha256"] == "sha256:" + hashlib.sha256(scan).hexdigest()
    assert receipt["input_bytes"] == len(scan)
    assert (receipt["model"]["name"], receipt["graph"]) == ("dark@1", response.headers["locum-graph"])
    assert receipt["options"]["personalization"] == "auto"


@pytest.mark.parametrize("shape", [(28, 28), (300, 200), (1024, 1500), (9, 9)])
@pytest.mark.parametrize("colour", [False, True])
def test_classify_accepts_grey_and_colour_images_of_any_size(
    api: Any, make_png: Callable[..., bytes], shape: tuple[int, int], colour: bool
) -> None:
    pixels = np.full((*shape, 3) if colour else shape, 120, np.uint8)
    report = api.classify(make_png(pixels)).json()
    assert report["probabilities"]["bright"] == pytest.approx(bright(120), rel=1e-4)
    assert (report["predicted"], report["shape"]) == ("bright", list(shape))


def test_classify_with_a_colour_task_uses_three_channels_and_rejects_grey(
    start: Any, tmp_path: Path, publish_dark: Any, make_png: Callable[..., bytes]
) -> None:
    task = publish_dark(tmp_path / "aside").manifest.task
    publish_dark(tmp_path / "store", task=task.model_copy(update={"channels": 3, "colour": "refuse"}))
    api = start(tmp_path / "store")
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[..., 0], pixels[..., 2] = 200, 130
    report = api.classify(make_png(pixels)).json()
    assert report["probabilities"]["bright"] == pytest.approx(bright(110), rel=1e-4)
    refused = api.classify(make_png(pixels[..., 0]))
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:scan-mismatch")


def test_classify_of_a_volume_returns_the_mean_and_each_slice(
    api: Any, make_nifti: Callable[..., bytes], volume: NDArray[np.int16]
) -> None:
    report = api.classify(make_nifti(volume, AFFINE)).json()
    expected = [bright(volume[:, i].mean()) for i in range(5)]
    found = [each["probabilities"]["bright"] for each in report["slices"]]
    assert found == pytest.approx(expected, rel=1e-4)
    assert [each["predicted"] for each in report["slices"]] == [
        "bright" if p > 0.5 else "dark" for p in expected
    ]
    assert report["probabilities"]["bright"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert report["entropy"] == pytest.approx(entropy(float(np.mean(expected))), rel=1e-4)
    assert report["shape"] == [28, 5, 28]


def test_classify_of_a_study_takes_the_chosen_series(api: Any, volume: NDArray[np.int16]) -> None:
    slices = volume.transpose(1, 2, 0)
    study = zipped(
        {
            f"{number}/{name}": content
            for number in (3, 4)
            for name, content in series(
                slices - 10 * number, SeriesNumber=number, SeriesInstanceUID=f"1.2.{number}"
            ).items()
        }
    )
    assert api.classify(study).status_code == 415
    for number in (3, 4):
        report = api.classify(study, series=str(number)).json()
        expected = np.mean([bright(each.mean() - 10 * number) for each in slices])
        assert report["probabilities"]["bright"] == pytest.approx(expected, rel=1e-4)


def test_classify_of_a_reoriented_volume_gives_the_same_slices(
    api: Any, make_nifti: Callable[..., bytes], volume: NDArray[np.int16]
) -> None:
    first = api.classify(make_nifti(volume, AFFINE)).json()
    turned = nib.Nifti1Image(volume, AFFINE).as_reoriented(np.array([[2, -1], [0, 1], [1, -1]]))
    second = api.classify(make_nifti(np.asarray(turned.dataobj), turned.affine)).json()
    assert first["slices"] == second["slices"]
    assert first["shape"] != second["shape"]


def test_classify_of_more_slices_than_one_batch_returns_all(
    api: Any, make_nifti: Callable[..., bytes]
) -> None:
    values = np.linspace(60, 140, 21).round()
    voxels = np.broadcast_to(values[None, None], (28, 28, 21)).astype(np.int16)
    report = api.classify(make_nifti(voxels)).json()
    found = [each["probabilities"]["bright"] for each in report["slices"]]
    assert found == pytest.approx([bright(value) for value in values], rel=1e-4)


def test_classify_of_equal_requests_is_deterministic(
    api: Any, start: Any, store: Path, make_png: Callable[..., bytes], image: NDArray[np.uint8]
) -> None:
    def told(each: Any) -> str:
        report = each.classify(make_png(image)).json()
        return json.dumps([report[name] for name in ("predicted", "probabilities", "entropy", "warnings")])

    assert told(api) == told(api) == told(start(store))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"personalization": "whose"}, "personalization"),
        ({"guard": "shrug"}, "guard"),
        ({"output": "json"}, "not a parameter"),
        ({"hospital": "../../etc"}, "hospital"),
        ({"site": "CS"}, "personalization=member"),
        ({"personalization": "member"}, "site"),
    ],
)
def test_classify_with_wrong_parameters_is_422_by_name(
    api: Any, make_png: Callable[..., bytes], image: NDArray[np.uint8], fields: dict[str, str], expected: str
) -> None:
    response = api.classify(make_png(image), **fields)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert expected in response.json()["detail"]


def test_classify_with_guard_refuse_rejects_an_unusual_scan(api: Any, make_png: Callable[..., bytes]) -> None:
    flat = make_png(np.full((28, 28), 90, np.uint8))
    answered = api.classify(flat)
    assert (answered.status_code, answered.headers["locum-warnings"]) == (200, "1")
    refused = api.classify(flat, guard="refuse")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:scan-unlike-task")
    assert refused.json()["warnings"] == answered.json()["warnings"]


@pytest.mark.parametrize(
    ("route", "model", "other"), [("/segment", "dark", "/classify"), ("/classify", "bright", "/segment")]
)
def test_model_of_another_task_kind_is_422_with_the_other_route(
    start: Any,
    tmp_path: Path,
    publish_dark: Any,
    publish_bright: Any,
    make_png: Callable[..., bytes],
    image: NDArray[np.uint8],
    route: str,
    model: str,
    other: str,
) -> None:
    publish_dark(tmp_path)
    publish_bright(tmp_path)
    api = start(tmp_path)
    refused = api.send(route, make_png(image), model=model)
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:another-kind-of-task")
    assert refused.json()["route"] == other
    assert f"POST {other}" in refused.json()["detail"]
    assert api.send(other, make_png(image), model=model).status_code == 200


@pytest.mark.parametrize("shape", ["maps", "three classes"])
def test_classify_with_a_graph_of_wrong_output_is_503(
    start: Any,
    tmp_path: Path,
    publish_dark: Any,
    threshold_graph: Callable[..., bytes],
    mean_graph: Callable[..., bytes],
    make_png: Callable[..., bytes],
    image: NDArray[np.uint8],
    shape: str,
) -> None:
    from model_store.manifest import GRAPH, WEIGHTS
    from model_store.store import Store

    manifest = publish_dark(tmp_path / "aside").manifest
    names = manifest.task.class_names if shape == "maps" else ("dark", "grey", "bright")
    manifest = manifest.model_copy(
        update={"task": manifest.task.model_copy(update={"class_names": names}), "files": {}}
    )
    graph = threshold_graph() if shape == "maps" else mean_graph()
    Store(tmp_path / "store").publish(manifest, {WEIGHTS: b"none", GRAPH: graph})
    response = start(tmp_path / "store").classify(make_png(image))
    assert (response.status_code, response.json()["type"]) == (503, "urn:locum:problem:artefact-damaged")
    assert "[S, 2]" in response.json()["detail"] or "[S, 3]" in response.json()["detail"]
