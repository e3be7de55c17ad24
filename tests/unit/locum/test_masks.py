"""Masks as the service encodes them, against an independent reader of NRRD."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from locum.errors import AnswerInvalid
from locum.masks import read_nrrd, segmentation
from model_store.scan import encode_nrrd

AFFINE = np.array([[0.0, -0.7, 0.1, 12.5], [0.8, 0.0, 0.0, -31.0], [0.0, 0.1, 2.5, 40.0], [0, 0, 0, 1]])


@pytest.mark.parametrize("compress", [True, False])
def test_mask_is_where_itk_reads_it(tmp_path: Path, compress: bool) -> None:
    labels = np.random.default_rng(0).integers(0, 3, (4, 5, 6), np.uint8)
    content = encode_nrrd(labels, AFFINE, compress=compress)
    voxels, affine = read_nrrd(content)
    assert np.array_equal(voxels, labels)
    assert np.allclose(affine, AFFINE)
    (tmp_path / "mask.nrrd").write_bytes(content)
    image = sitk.ReadImage(str(tmp_path / "mask.nrrd"))
    for index in ((0, 0, 0), (3, 4, 5), (1, 2, 3)):
        lps = image.TransformIndexToPhysicalPoint(index)
        assert np.allclose(nib.affines.apply_affine(affine, index), (-lps[0], -lps[1], lps[2]))
        assert image[index] == voxels[index]


@pytest.mark.parametrize(
    "change",
    [
        (b"uint8", b"int16"),
        (b"left-posterior-superior", b"right-anterior-superior"),
        (b"sizes: 4 5 6", b"sizes: 4 5 7"),
        (b"space origin", b"no origin"),
    ],
)
def test_nrrd_of_another_kind_is_rejected(change: tuple[bytes, bytes]) -> None:
    content = encode_nrrd(np.zeros((4, 5, 6), np.uint8), AFFINE)
    with pytest.raises(AnswerInvalid, match="NRRD"):
        read_nrrd(content.replace(*change))


def _multipart(image: bytes) -> tuple[bytes, str]:
    receipt = dict.fromkeys(("request", "input_sha256", "graph", "personalization", "why", "provider"), "")
    artefact = {"name": "m", "digest": "sha256:0"}
    receipt |= {"input_bytes": 1, "options": {}, "model": artefact, "network": artefact}
    report = {"labels": {}, "warnings": [], "shape": [1], "label_names": {}}
    report |= {"receipt": receipt}
    parts = {"params": json.dumps(report).encode(), "image": image}
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\nContent-Type: application/octet-stream\r\n'
        b"Content-Transfer-Encoding: base64\r\n\r\n%s\r\n" % (name.encode(), base64.b64encode(content))
        for name, content in parts.items()
    )
    return body + b"--x--\r\n", "multipart/form-data; boundary=x"


def _nrrd(**changed: bytes) -> bytes:
    content = encode_nrrd(np.zeros((4, 5, 6), np.uint8), AFFINE)
    head, _, data = content.partition(b"\n\n")
    fields = dict(line.split(b": ", 1) for line in head.splitlines()[1:] if b": " in line)
    fields |= {name.replace("_", " ").encode(): value for name, value in changed.items() if name != "data"}
    lines = [head.splitlines()[0], *(name + b": " + value for name, value in fields.items())]
    return b"\n".join(lines) + b"\n\n" + changed.get("data", data)


def _png_of(side: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    content = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + content


@pytest.mark.parametrize(
    "image",
    [
        b"no image",
        _png_of(100_000),
        _png_of(16),
        _nrrd(data=gzip.compress(bytes(1 << 24))),
        _nrrd(sizes=b"99999 99999 99999", data=gzip.compress(bytes(1 << 10))),
        _nrrd(sizes=b"-4 -5 6"),
        _nrrd(space_directions=b"(nan,0,0) (0,nan,0) (0,0,nan)"),
        _nrrd(space_directions=b"(0,0,0) (0,0,0) (0,0,0)"),
        _nrrd(space_directions=b"(1,0) (0,1)"),
    ],
    ids=lambda image: repr(image[:20]),
)
def test_mask_that_is_broken_or_expands_is_one_sentence(image: bytes) -> None:
    assert segmentation(*_multipart(encode_nrrd(np.zeros((4, 5, 6), np.uint8), AFFINE))).is_volume
    with pytest.raises(AnswerInvalid, match=r"^image: "):
        segmentation(*_multipart(image))


def test_answer_that_is_no_form_is_rejected() -> None:
    with pytest.raises(AnswerInvalid, match="params and image"):
        segmentation(b"{}", "application/json")
