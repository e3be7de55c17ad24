"""Bad input over HTTP: each a 4xx problem with a reason. And beside each, the valid neighbour works."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

THRESHOLD = 100
Pixels = NDArray[np.uint8]


@pytest.fixture(scope="module")
def api(start: Any, tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    return start(root)


@dataclass(frozen=True)
class Route:
    """A route for scans, of an API that offers one model for it."""

    path: str
    api: Any

    def send(self, scan: bytes, **fields: str) -> httpx.Response:
        response: httpx.Response = self.api.send(self.path, scan, **fields)
        return response


@pytest.fixture(scope="module", params=["/segment", "/classify"])
def route(request: Any, start: Any, api: Any, tmp_path_factory: Any, publish_dark: Any) -> Route:
    if request.param == "/segment":
        return Route(request.param, api)
    root = tmp_path_factory.mktemp("store")
    publish_dark(root)
    return Route(request.param, start(root))


@pytest.fixture(scope="module")
def bright() -> NDArray[np.bool_]:
    """[32, 32, 3]: what is bright in `voxels`."""
    return np.random.default_rng(1).random((32, 32, 3)) > 0.5


def voxels(bright: NDArray[np.bool_], dtype: str = "i2") -> NDArray[Any]:
    return np.where(bright, 120, 10).astype(dtype)


def png(pixels: NDArray[Any], **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, options.pop("format", "PNG"), **options)
    return stream.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def raw_png(width: int, height: int, data: bytes, *before: bytes, depth: int = 8) -> bytes:
    """A PNG with whatever the header says and whatever the data are."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """`count` zeros, deflated."""
    packer = zlib.compressobj(9)
    block = bytes(2**20)
    return (
        b"".join(packer.compress(block[: min(2**20, count - i)]) for i in range(0, count, 2**20))
        + packer.flush()
    )


def nifti(data: NDArray[Any], kind: Any = nib.Nifti1Image, **header: Any) -> bytes:
    image = kind(data, np.eye(4))
    for name, value in header.items():
        image.header[name] = value
    content: bytes = image.to_bytes()
    return content


def patched(content: bytes, offset: int, layout: str, *values: Any) -> bytes:
    size = struct.calcsize(layout)
    return content[:offset] + struct.pack(layout, *values) + content[offset + size :]


GOOD = nifti(np.full((32, 32, 3), 50, np.int16))
GOOD_PNG = png(np.full((32, 32), 50, np.uint8))
NAN = nifti(np.full((32, 32, 3), np.nan, np.float32))
ONE_NAN = np.zeros((32, 32, 3), np.float32)
ONE_NAN[5, 6, 1] = np.inf

BAD: dict[str, tuple[Callable[[], bytes], set[int]]] = {
    "0 bytes": (lambda: b"", {422}),
    "text": (lambda: b"this is no scan\n" * 100, {415}),
    "JPEG": (lambda: png(np.zeros((32, 32), np.uint8), format="JPEG"), {415}),
    "GIF": (lambda: png(np.zeros((32, 32), np.uint8), format="GIF"), {415}),
    "zip": (lambda: b"PK\x03\x04" + bytes(500), {415}),
    "DICOM": (lambda: bytes(128) + b"DICM" + bytes(500), {415}),
    "HTML": (lambda: b"<html><body>403</body></html>", {415}),
    "gzip of text": (lambda: gzip.compress(b"hello" * 1000), {415}),
    "only a signature": (lambda: b"\x89PNG\r\n\x1a\n", {422}),
    "NIfTI cut in its header": (lambda: GOOD[:200], {422}),
    "NIfTI cut in its data": (lambda: GOOD[:-100], {422}),
    ".nii.gz cut": (lambda: gzip.compress(GOOD)[:-20], {422}),
    ".nii.gz with a flipped bit": (lambda: patched(gzip.compress(GOOD, 0), 400, "B", 255), {422}),
    "PNG cut": (lambda: GOOD_PNG[:-30], {422}),
    "PNG with a flipped bit": (lambda: patched(GOOD_PNG, len(GOOD_PNG) - 20, "B", 7), {422}),
    "TIFF cut": (lambda: png(np.zeros((64, 64), np.uint8), format="TIFF")[:300], {415, 422}),
    "all NaN": (lambda: NAN, {422}),
    "one infinity": (lambda: nifti(ONE_NAN), {422}),
    "4-D": (lambda: nifti(np.zeros((16, 16, 3, 4), np.int16)), {415, 422}),
    "complex": (lambda: nifti(np.zeros((16, 16, 3), np.complex64)), {415, 422}),
    "1 pixel": (lambda: png(np.zeros((1, 1), np.uint8)), {422}),
    "1 voxel": (lambda: nifti(np.zeros((1, 1, 1), np.int16)), {422}),
    "1 x 5000 pixels": (lambda: png(np.zeros((1, 5000), np.uint8)), {422}),
    "20000 x 20000": (lambda: png(np.zeros((20000, 20000), bool)), {413}),
    "20000 x 20000, announced": (lambda: raw_png(20000, 20000, b"x"), {413}),
    "2^31 x 2^31": (lambda: raw_png(2**31 - 1, 2**31 - 1, b"x"), {413, 422}),
    "PNG bomb in the data": (lambda: raw_png(64, 64, zeros(2**28)), {413, 422}),
    "gzip bomb": (lambda: gzip.compress(GOOD + bytes(2**28)), {413, 422}),
    "gzip bomb, announced": (
        lambda: gzip.compress(patched(GOOD, 42, "<3h", 4000, 4000, 4000) + bytes(2**24)),
        {413},
    ),
    "dimensions that lie": (lambda: patched(GOOD, 42, "<3h", 64, 64, 64), {422}),
    "dimensions too small": (lambda: patched(GOOD, 42, "<3h", 16, 16, 1), {422}),
    "negative dimensions": (lambda: patched(GOOD, 42, "<3h", -32, 32, 3), {422}),
    "dim[0] = 9": (lambda: patched(GOOD, 40, "<h", 9), {422, 415}),
    "unknown datatype": (lambda: patched(GOOD, 70, "<h", 77), {415, 422}),
    "data offset beyond the end": (lambda: patched(GOOD, 108, "<f", 1e9), {413, 422}),
    "data offset NaN": (lambda: patched(GOOD, 108, "<f", float("nan")), {422}),
    "affine of NaN": (lambda: patched(GOOD, 280, "<f", float("nan")), {422}),
    "affine of zeros": (lambda: patched(GOOD, 280, "<12f", *[0.0] * 12), {422}),
    "infinite slope": (lambda: patched(GOOD, 112, "<f", float("inf")), {422}),
    "PNG header that lies": (lambda: raw_png(512, 512, zlib.compress(bytes(100))), {422}),
    "ANALYZE": (lambda: patched(GOOD, 344, "4s", b"\0\0\0\0"), {415, 422}),
    ".hdr of a pair": (lambda: patched(GOOD, 344, "4s", b"ni1\0"), {415, 422}),
}


@cache
def bad(name: str) -> bytes:
    return BAD[name][0]()


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_4xx_problem_with_a_reason(route: Route, name: str) -> None:
    _, statuses = BAD[name]
    response = route.send(bad(name))
    assert response.status_code in statuses, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["type"].startswith("urn:locum:problem:")
    assert len(problem["detail"]) > 20
    assert "Traceback" not in response.text


def test_upload_above_the_limit_is_413(start: Any, route: Route) -> None:
    small = start(route.api.settings.store, max_upload_bytes=len(GOOD))
    assert small.send(route.path, GOOD).status_code == 200
    response = small.send(route.path, GOOD + b"\0")
    assert (response.status_code, response.json()["type"]) == (413, "urn:locum:problem:upload-too-large")


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd",
        "/etc/shadow",
        "C:\\Windows\\system32\\x.nii",
        "a\0b.nii",
        "x" * 4000 + ".nii",
        "scan.png",
        "\u202egnp.iin",
        "upload-x; rm -rf",
    ],
)
def test_file_name_of_an_upload_is_ignored(route: Route, name: str) -> None:
    settings = route.api.settings
    before = set(settings.state_dir.rglob("*"))
    assert route.send(GOOD, name=name).status_code == 200
    assert set(settings.state_dir.rglob("*")) == before
    assert not list(Path(settings.spool).iterdir())


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "multipart/form-data; boundary=b", 422),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 422),
        (b"{}", "application/json", 415),
        (GOOD, "application/octet-stream", 415),
        (b"--b\r\n\r\n", "multipart/form-data; boundary=b", 422),
        (b"\r\n" * 5000, "multipart/form-data; boundary=b", 422),
        (b"--b\r\n" + b"A: b\r\n" * 5000, "multipart/form-data; boundary=b", 422),
        (b"x", "multipart/form-data; boundary=" + "y" * 5000, 415),
    ],
)
def test_malformed_form_is_a_problem(route: Route, content: bytes, kind: str, status: int) -> None:
    response = route.api.client.post(route.path, content=content, headers={"content-type": kind})
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("kind", "keyword"), [(b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")]
)
def test_compressed_png_metadata_is_not_inflated(
    api: Any, bright: NDArray[np.bool_], kind: bytes, keyword: bytes
) -> None:
    rows = b"".join(b"\0" + row.tobytes() for row in voxels(bright[..., 0], "u1"))
    content = raw_png(32, 32, zlib.compress(rows), chunk(kind, keyword + zeros(2**28)))
    np.testing.assert_array_equal(mask_of(api.segment(content)), bright[..., 0])


def mask_of(response: httpx.Response) -> NDArray[Any]:
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "image/png":
        return np.asarray(Image.open(io.BytesIO(response.content)))
    return np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(response.content)).dataobj)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_nifti_of_every_type_and_byte_order_gives_the_same_mask(
    api: Any, bright: NDArray[np.bool_], dtype: str, order: str
) -> None:
    data = voxels(bright, dtype)
    image = nib.Nifti1Image(data, np.eye(4), header=nib.Nifti1Header(endianness=order), dtype=dtype)
    np.testing.assert_array_equal(mask_of(api.segment(image.to_bytes())), bright)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_both_nifti_versions_plain_and_gzipped_give_the_same_mask(
    api: Any, bright: NDArray[np.bool_], kind: Any, compress: bool
) -> None:
    content = nifti(voxels(bright), kind)
    response = api.segment(gzip.compress(content) if compress else content)
    np.testing.assert_array_equal(mask_of(response), bright)


def test_nifti_slope_and_intercept_are_applied(api: Any, bright: NDArray[np.bool_]) -> None:
    # Stored as 0 and 1, and read as 10 and 120.
    content = nifti(bright.astype(np.int16))
    scaled = patched(content, 112, "<2f", 110.0, 10.0)
    np.testing.assert_array_equal(mask_of(api.segment(scaled)), bright)


def test_nifti_of_one_slice_is_segmented_as_a_volume(api: Any, bright: NDArray[np.bool_]) -> None:
    for data in (voxels(bright)[:, :, :1], voxels(bright)[:, :, 0]):
        mask = mask_of(api.segment(nifti(data)))
        np.testing.assert_array_equal(mask.reshape(32, 32), bright[:, :, 0])


def test_nifti_singleton_fourth_dimension_is_dropped(api: Any, bright: NDArray[np.bool_]) -> None:
    mask = mask_of(api.segment(nifti(voxels(bright)[..., None])))
    np.testing.assert_array_equal(mask.reshape(bright.shape), bright)


def test_16_bit_png_keeps_its_intensities(api: Any, bright: NDArray[np.bool_]) -> None:
    # Above 255, so that 8 bits would clip or wrap them to the other side of the threshold.
    pixels = np.where(bright[..., 0], 60_000, 90).astype(np.uint16)
    np.testing.assert_array_equal(mask_of(api.segment(png(pixels))), bright[..., 0])
    pixels = np.where(bright[..., 0], 256 + 120, 10).astype(np.uint16)
    np.testing.assert_array_equal(mask_of(api.segment(png(pixels))), bright[..., 0])


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_compressed_tiff_gives_the_same_mask(
    api: Any, bright: NDArray[np.bool_], compression: str | None
) -> None:
    pixels = voxels(bright[..., 0], "u1")
    np.testing.assert_array_equal(
        mask_of(api.segment(png(pixels, format="TIFF", compression=compression))), bright[..., 0]
    )


def test_colour_image_is_converted_when_the_task_says_luminance(api: Any, bright: NDArray[np.bool_]) -> None:
    pixels = np.repeat(voxels(bright[..., 0], "u1")[..., None], 3, axis=2)
    np.testing.assert_array_equal(mask_of(api.segment(png(pixels))), bright[..., 0])


def test_colour_image_is_422_when_the_task_refuses_colour(
    start: Any, tmp_path: Path, publish_bright: Any
) -> None:
    from model_store.task import Normalisation, Task

    task = Task(name="grey", labels={"a": (1,)}, normalisation=Normalisation(method="none"), size=(32, 32))
    publish_bright(tmp_path, task=task)
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    response = start(tmp_path).segment(png(pixels))
    assert (response.status_code, response.json()["type"]) == (422, "urn:locum:problem:scan-mismatch")
