"""`POST /segment` with a network that sees volumes: every form of the answer, several channels, refusals."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highdicom as hd
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.scans.channels import packed
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.dicom_files import series, zipped
from tests.helpers.service.coded import CODES

PATCH = (16, 16, 8)
AFFINE = np.diag([-1.5, 1.5, 2.0, 1.0])


def graph(channels: int, at: float) -> bytes:
    """Certain of foreground where the sum of the channels is above `at`."""
    import onnx
    from onnx import TensorProto, helper

    values = [0.0] * channels + [1.0] * channels
    nodes = [
        helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1, 1]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    made = helper.make_graph(
        nodes,
        "threshold",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", channels, *PATCH])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", 2, *PATCH])],
        [
            helper.make_tensor("w", TensorProto.FLOAT, [2, channels, 1, 1, 1], values),
            helper.make_tensor("b", TensorProto.FLOAT, [2], [0.0, -at]),
        ],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def publish(root: Path, name: str, channels: tuple[str, ...] = (), **fields: Any) -> Artefact:
    none = {"scope": "volume", "method": "none"}
    content = {
        "name": name,
        "labels": {"bright": [1]},
        "codes": {"bright": CODES},
        "geometry": {"spacing": None, "patch": PATCH},
        **({"channels": [{"name": each, "normalisation": none} for each in channels]} if channels else {}),
        **({} if channels else {"normalisation": none}),
        **fields,
    }
    count = max(1, len(channels))
    manifest = ModelManifest(
        name=name,
        task=Task.model_validate(content),
        network=NetworkSpec(name="threshold", arguments={}),
        lineage=Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
    )
    return Store(root).publish(manifest, {WEIGHTS: b"none", GRAPH: graph(count, 100 * count)})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    publish(root, "volume")
    publish(root, "two", ("T1", "FLAIR"))
    publish(root, "stacked", ("T1", "FLAIR"), stacked=True)
    return root


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], store: Path) -> Any:
    return start(store)


def voxels(seed: int = 5) -> NDArray[np.int16]:
    drawn = np.random.default_rng(seed).integers(0, 200, (32, 27, 21))
    return np.where(abs(drawn - 100) < 5, 0, drawn).astype(np.int16)


def nifti(values: NDArray[np.generic]) -> bytes:
    image = nib.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


def mask_of(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return nib.Nifti1Image.from_bytes(gzip.decompress(response.content))


def test_the_mask_is_on_the_files_own_grid_with_a_receipt(api: Any, store: Path) -> None:
    scan = nifti(voxels())
    mask = mask_of(api.segment(scan, model="volume"))
    np.testing.assert_array_equal(mask.get_fdata(), voxels() > 100)
    np.testing.assert_allclose(mask.affine, AFFINE)
    report = api.segment(scan, model="volume", output="json").json()
    assert report["labels"]["bright"]["voxels"] == (voxels() > 100).sum()
    assert report["labels"]["bright"]["volume_ml"] == pytest.approx((voxels() > 100).sum() * 4.5 / 1000)
    assert 0 < report["uncertainty"] < 1
    receipt, manifest = report["receipt"], Store(store).open("volume").manifest
    assert receipt["input_sha256"] == f"sha256:{hashlib.sha256(scan).hexdigest()}"
    assert receipt["graph"] == manifest.files[GRAPH].sha256
    # The same scan, the same bytes.
    assert api.segment(scan, model="volume").content == api.segment(scan, model="volume").content


def test_uncertainty_and_overlay_are_of_the_volume(api: Any) -> None:
    scan = nifti(voxels())
    percent = mask_of(api.segment(scan, model="volume", voxels="uncertainty")).get_fdata()
    p = 1 / (1 + np.exp(-(voxels().astype(float) - 100)))
    entropy = -(p * np.log(p.clip(1e-7)) + (1 - p) * np.log((1 - p).clip(1e-7))) / np.log(2)
    assert np.abs(percent - 100 * entropy).max() <= 0.51
    picture = api.segment(scan, model="volume", output="overlay")
    assert picture.status_code == 200, picture.text
    assert len(np.unique(np.asarray(Image.open(io.BytesIO(picture.content))))) > 20


def test_a_dicom_series_gets_a_seg(api: Any) -> None:
    cube = voxels().transpose(2, 1, 0)
    response = api.segment(zipped(series(cube)), model="volume", output="dicom-seg")
    assert response.status_code == 200, response.text
    seg = hd.seg.segread(io.BytesIO(response.content))
    found = np.asarray(seg.pixel_array).sum()
    assert found == (cube > 100).sum()


class TestSeveralChannels:
    def expected(self) -> NDArray[np.bool_]:
        return voxels(1).astype(int) + voxels(2) > 200

    def fields(self) -> dict[str, tuple[str, bytes]]:
        return {"scan.FLAIR": ("b.nii", nifti(voxels(2))), "scan.T1": ("a.nii", nifti(voxels(1)))}

    def test_a_field_for_each_a_zip_and_a_4d_file_are_one_scan(self, api: Any) -> None:
        by_field = mask_of(api.client.post("/segment", files=self.fields(), data={"model": "two"}))
        by_zip = mask_of(
            api.segment(packed({"T1": [nifti(voxels(1))], "FLAIR": [nifti(voxels(2))]}), model="two")
        )
        both = np.stack([voxels(1), voxels(2)], axis=-1)
        by_4d = mask_of(api.segment(nifti(both), model="stacked"))
        for mask in (by_field, by_zip, by_4d):
            agree = mask.get_fdata() == self.expected()
            assert agree[voxels(1).astype(int) + voxels(2) != 200].all()
            np.testing.assert_allclose(mask.affine, AFFINE)

    def test_two_dicom_series_in_fields_of_their_own(self, api: Any) -> None:
        files = [
            (f"scan.{name}", (f"{number}.dcm", content))
            for name, seed in (("T1", 1), ("FLAIR", 2))
            for number, content in enumerate(
                series(voxels(seed).transpose(2, 1, 0), SeriesInstanceUID=f"1.2.3.{seed}").values()
            )
        ]
        mask = mask_of(api.client.post("/segment", files=files, data={"model": "two"}))
        found, expected = int(mask.get_fdata().sum()), int(self.expected().sum())
        assert found == expected

    def test_a_viewer_is_shown_one_channel(self, api: Any) -> None:
        content = packed({"T1": [nifti(voxels(1))], "FLAIR": [nifti(voxels(2))]})
        shown = mask_of(api.client.post("/display", files={"scan": ("x.zip", content)}))
        assert shown.shape == (32, 27, 21)
        np.testing.assert_array_equal(shown.get_fdata(), voxels(2))

    def test_the_receipt_has_the_digest_of_both_in_any_order(self, api: Any) -> None:
        digests = set()
        for fields in (self.fields(), dict(reversed(self.fields().items()))):
            response = api.client.post("/segment", files=fields, data={"model": "two", "output": "json"})
            digests.add(response.json()["receipt"]["input_sha256"])
        assert len(digests) == 1

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"scan.T1": nifti(voxels(1))}, "channels T1, FLAIR, and FLAIR is missing"),
            (
                {"scan.T1": nifti(voxels(1)), "scan.FLAIR": nifti(voxels(2)[:, :, :20])},
                "channel T1 is not on the grid of channel FLAIR",
            ),
            ({"scan": nifti(voxels(1))}, r"expects 2 channels \(T1, FLAIR\), found one file with 1"),
            ({"scan": nifti(voxels(1)), "scan.T1": nifti(voxels(1))}, "for each channel, found both"),
            ({"scan.T 1": nifti(voxels(1))}, "expected the name of a channel"),
        ],
    )
    def test_what_does_not_fit_is_said(self, api: Any, fields: dict[str, bytes], says: str) -> None:
        import re

        files = {name: ("x.nii", content) for name, content in fields.items()}
        response = api.client.post("/segment", files=files, data={"model": "two"})
        assert response.status_code == 422, response.text
        assert re.search(says, json.loads(response.content)["detail"])


def test_adapting_a_network_of_volumes_is_refused_with_the_reason(api: Any) -> None:
    response = api.segment(nifti(voxels()), model="volume", personalization="scan")
    assert response.status_code == 422, response.text
    assert "sees volumes" in response.json()["detail"]
    assert api.client.get("/models").json()["models"][0]["adaptable"] is False


def test_an_image_is_refused(api: Any, make_png: Callable[..., bytes]) -> None:
    response = api.segment(make_png(np.zeros((32, 32), np.uint8)), model="volume")
    assert response.status_code == 422
    assert "segments volumes, and the scan is an image" in response.json()["detail"]


def test_a_volume_that_would_take_too_long_is_ended_with_what_to_do(
    start: Callable[..., Any], store: Path
) -> None:
    response = start(store, volume_seconds=1e-6).segment(nifti(voxels()), model="volume")
    assert response.status_code == 503, response.text
    problem = response.json()
    assert problem["type"].endswith("run-too-long")
    assert "LOCUM_VOLUME_SECONDS" in problem["detail"]


def test_a_client_that_leaves_ends_the_work_between_patches(
    start: Callable[..., Any], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    import httpx

    from service.inference.sessions import GraphSession

    runs, run = [], GraphSession.run_alone

    def slow(self: GraphSession, *given: Any) -> Any:
        runs.append(time.monotonic())
        time.sleep(0.3)
        return run(self, *given)

    monkeypatch.setattr(GraphSession, "run_alone", slow)
    api = start(store)
    with pytest.raises(httpx.ReadTimeout):
        api.client.post(
            "/segment", files={"scan": nifti(voxels())}, data={"model": "volume"}, timeout=httpx.Timeout(1.5)
        )
    # 3 x 3 x 5 windows: all would take thirteen seconds.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and time.monotonic() - runs[-1] < 2:
        time.sleep(0.1)
    assert 0 < len(runs) < 30
