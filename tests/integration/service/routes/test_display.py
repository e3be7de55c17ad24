"""Scans and masks as a viewer shows them, over HTTP, read back by nibabel and Pillow."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.scan import decode
from tests.helpers.model_store.dicom_files import image, series, turned, zipped
from tests.helpers.model_store.scan_files import nifti1, tiff

VOLUME = np.random.default_rng(7).integers(0, 200, (9, 10, 11)).astype(np.int16)
OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = nib.eulerangles.euler2mat(0.4, -0.3, 0.2) @ np.diag([-2.0, 3.0, 4.0])
OBLIQUE[:3, 3] = (30, -20, 10)


@pytest.fixture
def scans(cohort: str) -> str:
    return f"{cohort}/scans"


def display(api: Any, *files: bytes) -> httpx.Response:
    answer: httpx.Response = api.client.post("/display", files=[("scan", ("x", part)) for part in files])
    return answer


def volume(answer: httpx.Response) -> Any:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/gzip"), answer.text
    return nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))


def pixels(answer: httpx.Response) -> NDArray[Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png"), answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


# In the second, other readers would take the qform, which is mirrored; the third is in metres.
@pytest.mark.parametrize(
    ("fields", "affine"),
    [
        ({"srow": OBLIQUE[:3]}, OBLIQUE),
        ({"srow": OBLIQUE[:3], "sform_code": 1, "qform_code": 2}, OBLIQUE),
        ({"srow": OBLIQUE[:3] / 1000, "units": 1}, OBLIQUE),
    ],
    ids=["oblique", "other qform", "metres"],
)
def test_volume_is_displayed_on_its_own_grid_in_millimetres(
    api: Any, fields: dict[str, Any], affine: NDArray[np.float64]
) -> None:
    scan = nifti1(VOLUME, **fields)
    found = volume(display(api, scan))
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), VOLUME)
    np.testing.assert_allclose(found.affine, affine, atol=1e-4)
    # By either form of the header.
    np.testing.assert_allclose(found.get_qform(), affine, atol=1e-4)
    mask = api.segment(scan, model="bright", output="nrrd")
    assert mask.status_code == 200


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i4", "f4", "f8", "i8"])
def test_voxels_of_every_type_are_displayed(api: Any, dtype: str) -> None:
    voxels = (VOLUME // 2).astype(dtype)
    np.testing.assert_array_equal(np.asanyarray(volume(display(api, nifti1(voxels))).dataobj), voxels)


def test_colour_volume_is_displayed_in_colour(api: Any) -> None:
    colours = np.random.default_rng(1).integers(0, 256, (9, 10, 3, 3), np.uint8)
    packed = np.ascontiguousarray(colours).view([("R", "u1"), ("G", "u1"), ("B", "u1")])[..., 0]
    found = volume(display(api, nib.Nifti1Image(packed, np.eye(4)).to_bytes()))
    samples = np.ascontiguousarray(found.dataobj).view("u1").reshape(colours.shape)
    np.testing.assert_array_equal(samples, colours)


def test_dicom_series_is_displayed_on_the_grid_of_its_mask(api: Any) -> None:
    files = series(VOLUME.transpose(2, 1, 0).repeat(2, axis=1).repeat(2, axis=2), turned(8))
    mask = nib.Nifti1Image.from_bytes(
        gzip.decompress(api.segment(zipped(files), model="bright", output="nifti").content)
    )
    for sent in ([zipped(files)], list(files.values())):
        found = volume(display(api, *sent))
        np.testing.assert_allclose(found.affine, mask.affine, atol=1e-6)
        assert found.shape == mask.shape
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), decode(zipped(files)).voxels[..., 0])


def test_image_of_eight_bits_is_displayed_unchanged_and_of_more_within_its_usual_range(
    api: Any, picture: NDArray[np.uint8], make_png: Callable[..., bytes]
) -> None:
    np.testing.assert_array_equal(pixels(display(api, make_png(picture))), picture)
    colours = np.stack([picture, 255 - picture, picture // 2], axis=-1)
    np.testing.assert_array_equal(pixels(display(api, make_png(colours))), colours)
    ramp = np.arange(1024, dtype=np.uint16).reshape(32, 32) * 50 + 1000
    low, high = np.percentile(ramp, (0.5, 99.5))
    expected = np.clip(np.rint((ramp - low) * 255 / (high - low)), 0, 255)
    for content in (tiff(ramp), image(ramp)):
        assert np.abs(pixels(display(api, content)).astype(int) - expected).max() <= 1


def test_form_without_a_scan_with_a_field_or_with_another_file_is_rejected(api: Any) -> None:
    assert kind(api.client.post("/display", files={"mask": ("x", b"")})) == (422, "malformed-form")
    fields = {"files": {"scan": ("x", nifti1(VOLUME))}, "data": {"model": "bright"}}
    assert kind(api.client.post("/display", **fields)) == (422, "invalid-request")
    assert kind(display(api, b"no scan")) == (415, "unsupported-scan")


def test_scan_of_a_cohort_is_read_as_stored_and_as_displayed(api: Any, scans: str) -> None:
    stored = nifti1(VOLUME, srow=OBLIQUE[:3])
    assert api.client.put(f"{scans}/ward/7.nii", content=stored).status_code == 201
    answer = api.client.get(f"{scans}/ward/7.nii")
    assert (answer.content, answer.headers["content-type"]) == (stored, "application/octet-stream")
    found = volume(api.client.get(f"{scans}/ward/7.nii", params={"output": "display"}))
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), VOLUME)
    np.testing.assert_allclose(found.affine, OBLIQUE, atol=1e-4)
    assert kind(api.client.get(f"{scans}/ward/8.nii")) == (404, "cohort-unknown")
    assert kind(api.client.get(f"{scans}/ward/7.nii/mask")) == (404, "cohort-unknown")
    assert kind(api.client.get(f"{scans}/ward/7.nii", params={"output": "other"})) == (422, "invalid-request")


def test_mask_on_turned_axes_is_displayed_on_the_grid_of_its_scan(api: Any, scans: str) -> None:
    drawn = (VOLUME > 100).astype(np.uint8) * 4
    api.client.put(f"{scans}/a", content=nifti1(VOLUME, srow=OBLIQUE[:3]))
    turned_over = nib.as_closest_canonical(nib.Nifti1Image(drawn, OBLIQUE))
    assert turned_over.affine[0, 0] > 0 > OBLIQUE[0, 0]
    made = api.client.put(f"{scans}/a/mask", content=turned_over.to_bytes())
    assert made.status_code == 201, made.text
    answer = api.client.get(f"{scans}/a/mask", params={"output": "display"})
    assert answer.headers["etag"] == f'"{made.json()["sha256"]}"'
    found = volume(answer)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), drawn)
    np.testing.assert_allclose(found.affine, OBLIQUE, atol=1e-4)


def test_displayed_scan_and_mask_of_a_scan_in_metres_are_stored_again_in_its_place(
    api: Any, scans: str
) -> None:
    api.client.put(f"{scans}/a", content=nifti1(VOLUME, srow=OBLIQUE[:3] / 1000, units=1))
    shown = volume(api.client.get(f"{scans}/a", params={"output": "display"}))
    drawn = (VOLUME > 100).astype(np.uint8)
    made = api.client.put(f"{scans}/a/mask", content=nib.Nifti1Image(drawn, shown.affine).to_bytes())
    assert made.status_code == 201, made.text
    stored = decode(api.client.get(f"{scans}/a/mask").content)
    np.testing.assert_array_equal(stored.voxels[..., 0], drawn)
    np.testing.assert_allclose(stored.affine, np.diag([0.001] * 3 + [1]) @ OBLIQUE, atol=1e-6)


def test_mask_beyond_255_is_not_displayed(api: Any, scans: str) -> None:
    api.client.put(f"{scans}/a", content=nifti1(VOLUME))
    assert api.client.put(f"{scans}/a/mask", content=nifti1(VOLUME * 2)).status_code == 201
    assert kind(api.client.get(f"{scans}/a/mask", params={"output": "display"})) == (422, "mask-mismatch")
    assert api.client.get(f"{scans}/a/mask").content == nifti1(VOLUME * 2)


def test_mask_is_replaced_only_while_it_is_the_one_of_if_match(
    api: Any, scans: str, picture: NDArray[np.uint8], make_png: Callable[..., bytes]
) -> None:
    masks = [make_png(np.full_like(picture, value)) for value in range(4)]
    where = f"{scans}/a/mask"

    def put(number: int, seen: str | None) -> httpx.Response:
        headers = {} if seen is None else {"If-Match": seen}
        answer: httpx.Response = api.client.put(where, content=masks[number], headers=headers)
        return answer

    api.client.put(f"{scans}/a", content=make_png(picture))
    assert kind(put(0, '"sha256:0"')) == (412, "mask-stale")
    assert put(0, None).status_code == 201
    first = api.client.get(where).headers["etag"]
    assert kind(put(1, None)) == (409, "mask-taken")
    replaced = put(1, first)
    assert (replaced.status_code, replaced.json()["values"]) == (200, [1])
    # A repeated request, of which the answer was lost.
    assert put(1, first).json() == replaced.json()
    assert kind(put(2, first)) == (412, "mask-stale")
    assert kind(put(2, "sha256:0")) == (400, "malformed-precondition")
    assert api.client.get(where).content == masks[1]
    assert put(3, "*").status_code == 200
    assert api.client.get(where).content == masks[3]
    kept = [path.read_bytes() for path in (api.settings.state_dir / "cohorts").rglob("*") if path.is_file()]
    assert sorted(kept) == sorted([make_png(picture), masks[3]])
    (listed,) = api.client.get(scans).json()["scans"]
    assert api.client.get(where).headers["etag"] == f'"{listed["mask"]["sha256"]}"'
