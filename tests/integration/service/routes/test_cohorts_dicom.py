"""DICOM in cohorts: a series becomes one scan without its patient, and a SEG becomes its mask."""

from __future__ import annotations

import io
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from pydicom.uid import CTImageStorage

from model_store.scan import decode
from tests.helpers.model_store.dicom_files import (
    header,
    image,
    rtstruct,
    seg,
    series,
    squares,
    turned,
    uid,
    written,
    zipped,
)

VOLUME = np.random.default_rng(5).integers(0, 200, (6, 16, 16)).astype(np.int16)
PLANTED = ("planted", "19610203", "20110405", uid("study"), uid("series"), uid("frame of reference"))


def stored(api: Any) -> dict[str, bytes]:
    """Every file that the service keeps, the database included."""
    state = api.settings.state_dir
    return {str(p.relative_to(state)): p.read_bytes() for p in state.rglob("*") if p.is_file()}


def detail(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


@pytest.mark.parametrize(
    "content",
    [zipped(series(VOLUME, turned(8))), image(VOLUME[0].astype(np.uint16))],
    ids=["series", "single image"],
)
def test_scan_is_stored_without_its_patient(api: Any, cohort: str, content: bytes) -> None:
    made = api.client.put(f"{cohort}/scans/ward/1", content=content)
    assert made.status_code == 201, made.text
    assert made.json()["format"] == "dicom"
    again = api.client.put(f"{cohort}/scans/ward/1", content=content)
    assert (again.status_code, again.json()) == (200, made.json())
    files = stored(api)
    (kept,) = [data for name, data in files.items() if name.startswith("cohorts/")]
    np.testing.assert_array_equal(decode(kept).voxels, decode(content).voxels)
    for name, data in files.items():
        for planted in PLANTED:
            assert planted.encode() not in data.lower(), (name, planted)
    assert not any(planted in made.text.lower() for planted in PLANTED)


def test_series_of_a_study_is_stored_without_the_others(api: Any, cohort: str) -> None:
    other = {f"other/{n}": c for n, c in series(VOLUME // 2, SeriesNumber=7, SeriesInstanceUID="1.7").items()}
    study = zipped({**series(VOLUME), **other})
    refused = api.client.put(f"{cohort}/scans/1", content=study)
    assert "found 2: number 1 (CT, axial, 6 images of 16 x 16), number 7 (CT, " in detail(refused, 415)
    wrong = api.client.put(f"{cohort}/scans/1", params={"series": "2"}, content=study)
    assert "found 0 among 2: number 1" in detail(wrong, 415)
    invalid = api.client.put(f"{cohort}/scans/1", params={"series": "a/b"}, content=study)
    assert invalid.status_code == 422
    for _ in range(2):
        made = api.client.put(f"{cohort}/scans/1", params={"series": "7"}, content=study)
        assert made.status_code in (200, 201), made.text
    (kept,) = [data for name, data in stored(api).items() if name.startswith("cohorts/")]
    np.testing.assert_array_equal(decode(kept).voxels, decode(zipped(other)).voxels)
    another = api.client.put(f"{cohort}/scans/1", params={"series": "1"}, content=study)
    assert another.status_code == 409


def test_key_of_uids_is_readable_by_its_owner_alone(api: Any, cohort: str) -> None:
    api.client.put(f"{cohort}/scans/1", content=zipped(series(VOLUME)))
    path = api.settings.state_dir / "dicom-uid.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 32


def test_damaged_key_of_uids_is_rejected_and_not_used(api: Any, cohort: str) -> None:
    path, content = api.settings.state_dir / "dicom-uid.key", zipped(series(VOLUME))
    api.client.put(f"{cohort}/scans/1", content=content)
    key = path.read_bytes()
    path.write_bytes(b"")
    try:
        answer = api.client.put(f"{cohort}/scans/2", content=content)
        assert "dicom-uid.key: expected 32 bytes, found 0" in detail(answer, 503)
    finally:
        path.write_bytes(key)
    assert api.client.put(f"{cohort}/scans/2", content=content).status_code == 201


def test_zip_of_a_series_with_a_gap_is_rejected_and_leaves_no_file(api: Any, cohort: str) -> None:
    files = series(VOLUME)
    files.pop("0002.dcm")
    assert "1 slices are missing" in detail(api.client.put(f"{cohort}/scans/1", content=zipped(files)), 415)
    assert not [name for name in stored(api) if name.startswith("cohorts/")]


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_seg_is_stored_as_the_mask_of_its_series(api: Any, cohort: str, kind: str) -> None:
    files = series(VOLUME, turned(8))
    drawn = np.zeros(VOLUME.shape, np.uint8)
    drawn[2:4] = VOLUME[2:4] > 100
    assert api.client.put(f"{cohort}/scans/1", content=zipped(files)).status_code == 201
    sent = seg(files, drawn, kind)
    made = api.client.put(f"{cohort}/scans/1/mask", content=sent)
    assert made.status_code == 201, made.text
    assert (made.json()["format"], made.json()["values"]) == ("nifti", [0, 1])
    assert api.client.put(f"{cohort}/scans/1/mask", content=sent).status_code == 200
    masks = [data for data in stored(api).values() if data[:2] == b"\x1f\x8b"]
    (mask,) = [decode(data) for data in masks]
    np.testing.assert_array_equal(mask.voxels[..., 0], drawn.transpose(2, 1, 0))
    assert not any(planted.encode() in data.lower() for data in stored(api).values() for planted in PLANTED)


def test_rtstruct_is_stored_as_the_mask_of_its_series_without_the_patient(api: Any, cohort: str) -> None:
    """The scan has other UIDs by then, since it was stored without its patient."""
    files, drawn = series(VOLUME, turned(8)), VOLUME > 150
    assert api.client.put(f"{cohort}/scans/1", content=zipped(files)).status_code == 201
    sent = rtstruct(files, {"BODY": squares(files, VOLUME > 100), "Bright": squares(files, drawn)})
    made = api.client.put(f"{cohort}/scans/1/mask?model=bright", content=sent)
    assert made.status_code == 201, made.text
    assert (made.json()["format"], made.json()["values"]) == ("nifti", [0, 1])
    (note,) = made.json()["notes"]
    assert note == "ROIs that are no label were left out: ('BODY')"
    (mask,) = [decode(data) for data in stored(api).values() if data[:2] == b"\x1f\x8b"]
    np.testing.assert_array_equal(mask.voxels[..., 0], drawn.transpose(2, 1, 0))
    assert not any(planted.encode() in data.lower() for data in stored(api).values() for planted in PLANTED)


def test_rtstruct_that_is_no_mask_of_the_scan_is_refused_by_its_roi(api: Any, cohort: str) -> None:
    files = series(VOLUME)
    assert api.client.put(f"{cohort}/scans/1", content=zipped(files)).status_code == 201

    def refused(content: bytes, query: str = "?model=bright") -> str:
        return detail(api.client.put(f"{cohort}/scans/1/mask{query}", content=content), 422)

    bright = {"bright": squares(files, VOLUME > 150)}
    assert "overlap, and a voxel has one value; name the `model`" in refused(
        rtstruct(files, {**bright, "body": squares(files, VOLUME > 100)}, first=1), ""
    )
    assert "expected a number from 1 to 255" in refused(rtstruct(files, bright), "")
    assert "none of the ROIs ('body') is a label of task" in refused(rtstruct(files, {"body": []}))
    another = series(VOLUME, SeriesInstanceUID=uid("another"))
    assert "those of 1 other series" in refused(rtstruct(another, bright))
    shifted = series(VOLUME, origin=(-31.0, 12.5, 41.0))
    contours = {"bright": squares(shifted, VOLUME > 150)}
    assert "ROI ('bright'): expected contours in the planes" in refused(rtstruct(files, contours))


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_segment_is_matched_by_its_name_and_by_its_number_with_a_note(
    api: Any, cohort: str, kind: str
) -> None:
    files = series(VOLUME)
    assert api.client.put(f"{cohort}/scans/1", content=zipped(files)).status_code == 201

    def put(number: int, name: str, query: str = "?model=bright") -> httpx.Response:
        drawn = np.where(VOLUME > 100, number, 0).astype(np.uint8)
        dataset = pydicom.dcmread(io.BytesIO(seg(files, drawn, kind)))
        segments = {item.SegmentNumber: item for item in dataset.SegmentSequence}
        segments[number].SegmentLabel = name
        dataset.SOPInstanceUID = uid(f"{number} {name}")
        api.client.delete(f"{cohort}/scans/1/mask")
        answer: httpx.Response = api.client.put(f"{cohort}/scans/1/mask{query}", content=written(dataset))
        return answer

    named = put(2, "Bright")
    assert named.status_code == 201, named.text
    assert (named.json()["values"], named.json()["notes"]) == ([0, 1], [])
    numbered = put(1, "Segment 1").json()
    assert numbered["values"] == [0, 1]
    assert "is taken for bright by its number alone" in numbered["notes"][0]
    assert "segment 2 ('dark', code 10200004) is none of the labels" in detail(put(2, "dark"), 422)
    unmatched = put(2, "Bright", "").json()
    assert unmatched["values"] == [0, 2]
    assert "kept by their numbers, since no `model` is named" in unmatched["notes"][0]


def test_seg_of_another_series_is_rejected(api: Any, cohort: str) -> None:
    assert api.client.put(f"{cohort}/scans/1", content=zipped(series(VOLUME))).status_code == 201
    other = series(VOLUME, origin=(0.0, 0.0, 0.0))
    sent = seg(other, np.ones(VOLUME.shape, np.uint8), "BINARY")
    assert "mm away" in detail(api.client.put(f"{cohort}/scans/1/mask", content=sent), 422)


def test_no_value_of_the_patient_in_an_answer_or_a_metric(api: Any) -> None:
    content = zipped(series(VOLUME))
    answers = [api.segment(content, model="bright", output=out) for out in ("json", "nifti", "overlay")]
    answers.append(api.client.get("/metrics"))
    assert [answer.status_code for answer in answers] == [200] * 4
    broken = header(VOLUME[0], CTImageStorage)
    del broken.PixelData
    answers.append(api.segment(written(broken), model="bright"))
    assert answers[-1].status_code == 415
    for answer in answers:
        shown = answer.content + str(answer.headers).encode()
        assert not any(planted.encode() in shown.lower() for planted in PLANTED)
