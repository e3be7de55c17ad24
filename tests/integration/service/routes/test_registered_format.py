"""A scan format that only the test registers works over HTTP: a zip of slices is one scan."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.scan import encode_nifti
from model_store.scans import formats
from model_store.task import Task
from service.cohorts.patients import numbered
from tests.helpers.model_store.png_stack import PNG_STACK, slices, zipped

MAX_VOXELS = 32 * 32 * 6


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], publish_bright: Callable[..., Any], tmp_path_factory: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_bright(store)
    running = start(store, max_voxels=MAX_VOXELS, max_decompressed_bytes=20_000)
    assert running.client.put("/hospitals/north", json={"name": "north"}).status_code == 201
    return running


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, PNG_STACK))


@pytest.fixture
def volume() -> NDArray[np.uint8]:
    """[32, 32, 5], half of it brighter than the model's threshold of 100."""
    drawn = np.random.default_rng(7).integers(0, 2, (32, 32, 5))
    return np.where(drawn == 1, 180, 30).astype(np.uint8)


def type_of(answer: Any) -> str:
    return str(answer.json()["type"]).removeprefix("urn:locum:problem:")


def test_an_unregistered_zip_is_rejected(api: Any, volume: NDArray[np.uint8]) -> None:
    answer = api.segment(zipped(slices(volume)))
    assert (answer.status_code, type_of(answer)) == (415, "unsupported-scan")
    assert "Locum reads PNG, TIFF, .nii, .nii.gz" in answer.json()["detail"]


@pytest.mark.usefixtures("_registered")
class TestRegistered:
    def test_segment_of_a_zip_returns_a_mask_on_the_volume_grid(
        self, api: Any, volume: NDArray[np.uint8]
    ) -> None:
        # The name is that of another format: only the bytes decide.
        answer = api.segment(zipped(slices(volume)), name="scan.nii.gz")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/gzip")
        mask = nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))
        np.testing.assert_array_equal(np.asarray(mask.dataobj), volume == 180)
        np.testing.assert_array_equal(mask.affine, np.eye(4))
        assert answer.content == api.segment(encode_nifti(volume, np.eye(4))).content

    def test_segment_of_a_zip_with_png_output_is_422(self, api: Any, volume: NDArray[np.uint8]) -> None:
        answer = api.segment(zipped(slices(volume)), output="png")
        assert (answer.status_code, type_of(answer)) == (422, "output-mismatch")

    def test_cohort_stores_a_zip_as_one_scan_with_one_digest(
        self, api: Any, volume: NDArray[np.uint8]
    ) -> None:
        content = zipped(slices(volume))
        digest = hashlib.sha256(content)
        cohort = api.client.post("/hospitals/north/cohorts").headers["location"]
        announced = {"repr-digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"}
        added = api.client.put(f"{cohort}/scans/p1.zip", content=content, headers=announced)
        assert added.status_code == 201, added.text
        found = added.json()
        assert (found["format"], found["bytes"]) == ("png-stack", len(content))
        assert found["sha256"] == f"sha256:{digest.hexdigest()}"
        drawn = encode_nifti((volume == 180).astype(np.uint8), np.eye(4))
        mask = api.client.put(f"{cohort}/scans/p1.zip/mask", content=drawn)
        assert (mask.status_code, mask.json()["format"], mask.json()["values"]) == (201, "nifti", [0, 1])
        other = api.client.put(
            f"{cohort}/scans/p1.zip/mask", content=encode_nifti(np.zeros((32, 32, 4), np.uint8), np.eye(4))
        )
        assert other.status_code == 422
        assert api.client.delete(cohort).status_code == 204

    def test_service_limits_apply_to_a_registered_format(self, api: Any, volume: NDArray[np.uint8]) -> None:
        many = np.concatenate([volume, volume], axis=2)
        for content in (zipped(slices(many)), zipped({"0.png": bytes(30_000)})):
            answer = api.segment(content)
            assert (answer.status_code, type_of(answer)) == (413, "scan-too-large")
        assert many.size > MAX_VOXELS
        cohort = api.client.post("/hospitals/north/cohorts").headers["location"]
        refused = api.client.put(f"{cohort}/scans/p1.zip", content=zipped(slices(many)))
        assert (refused.status_code, type_of(refused)) == (413, "scan-too-large")
        assert api.client.delete(cohort).status_code == 204

    def test_patient_is_parsed_from_the_name_without_the_format_suffix(self) -> None:
        task = Task(name="t", labels={"x": (1,)}, size=(32, 32), patient="^(?P<patient>p[0-9]+)$")
        assert numbered(["p1.zip", "p1.nii.gz", "p2.zip"], task) == [0, 0, 1]
