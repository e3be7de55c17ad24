"""DICOM in and DICOM SEG out over HTTP."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highdicom as hd
import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from pydicom.uid import UltrasoundMultiFrameImageStorage

from model_store.scan import decode, decode_mask
from service.jobs import records
from service.jobs.files import JobFolder
from service.observation import review
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import (
    PLANES,
    enhanced,
    header,
    image,
    series,
    tilted,
    turned,
    written,
    zipped,
)
from tests.helpers.service.coded import CODED, VOLUME

THRESHOLD = 100
MUTATIONS = 100


@pytest.fixture(scope="module")
def api(start: Any, tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    publish_bright(root, name="coded", task=CODED)
    publish_bright(root, name="other", task=CODED, at=50)
    return start(root)


def nifti_of(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return nib.Nifti1Image.from_bytes(gzip.decompress(response.content))


def seg_of(response: Any) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/dicom"
    return hd.seg.segread(io.BytesIO(response.content))


def as_nifti(files: dict[str, bytes], folder: Path) -> bytes:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    sitk.WriteImage(reader.Execute(), str(folder / "scan.nii"))
    return (folder / "scan.nii").read_bytes()


every_plane = pytest.mark.parametrize("plane", [*PLANES.values(), turned(8)], ids=[*PLANES, "oblique"])


def dcmqi(program: str) -> str:
    """A program of dcmqi, an independent reader and writer of SEG and SR."""
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("dcmqi is not installed: `make test-pacs` does it")
    return found


@every_plane
def test_series_gets_the_mask_of_the_same_nifti(api: Any, plane: Any, tmp_path: Path) -> None:
    files = series(np.pad(VOLUME, ((0, 7), (0, 0), (0, 0)), mode="wrap"), plane)
    masks = [
        nifti_of(api.segment(content, model="bright"))
        for content in (zipped(files), as_nifti(files, tmp_path))
    ]
    np.testing.assert_array_equal(*(np.asarray(mask.dataobj) for mask in masks))
    np.testing.assert_allclose(masks[0].affine, masks[1].affine, atol=1e-4)
    assert np.asarray(masks[0].dataobj).any()


def test_parts_in_any_order_are_one_scan(api: Any) -> None:
    files = list(series(VOLUME).values())
    answers = [
        api.client.post(
            "/segment",
            files=[("scan", ("x", part)) for part in parts],
            data={"model": "bright", "output": "json"},
        ).json()
        for parts in (files, files[::-1])
    ]
    assert answers[0]["shape"] == [32, 32, 9]
    assert answers[0]["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())
    assert answers[0]["receipt"]["input_sha256"] == answers[1]["receipt"]["input_sha256"]


@pytest.mark.parametrize("pack", [lambda v: zipped(series(v)), enhanced], ids=["series", "enhanced"])
@pytest.mark.parametrize("kind", ["binary", "labelmap", "fractional"])
def test_seg_holds_the_mask_voxel_for_voxel(api: Any, pack: Callable[..., bytes], kind: str) -> None:
    seg = seg_of(api.segment(pack(VOLUME), model="coded", output="dicom-seg", segmentation_type=kind))
    assert seg.SegmentationType == kind.upper()
    assert int(seg.NumberOfFrames) == len(VOLUME)
    by_position = {
        round(float(frame.PlanePositionSequence[0].ImagePositionPatient[2]), 3): pixels
        for frame, pixels in zip(seg.PerFrameFunctionalGroupsSequence, seg.pixel_array, strict=True)
    }
    for place, pixels in enumerate(VOLUME):
        np.testing.assert_array_equal(by_position[40.0 + 2.5 * place], pixels > THRESHOLD)
    assert seg.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices == 2.5


def test_seg_refers_to_its_source_instance_by_instance(api: Any) -> None:
    files = series(VOLUME, turned(8))
    seg = seg_of(api.segment(zipped(files), model="coded", output="dicom-seg"))
    sources = {d.SOPInstanceUID: d for d in map(pydicom.dcmread, map(io.BytesIO, files.values()))}
    found = seg.get_pixels_by_source_instance(list(sources), segment_numbers=[1])[..., 0]
    for pixels, source in zip(found, sources.values(), strict=True):
        np.testing.assert_array_equal(pixels, source.pixel_array > THRESHOLD)
    one = next(iter(sources.values()))
    for keyword in ("StudyInstanceUID", "FrameOfReferenceUID", "PatientID"):
        assert seg[keyword].value == one[keyword].value
    assert seg.ReferencedSeriesSequence[0].SeriesInstanceUID == one.SeriesInstanceUID
    assert seg.SeriesInstanceUID != one.SeriesInstanceUID


def test_tilted_series_is_answered_on_its_own_slices(api: Any) -> None:
    files = tilted(VOLUME, 12)
    answer = api.segment(zipped(files), model="coded", output="dicom-seg")
    assert "gantry-tilt" in answer.headers["locum-warning-names"]
    seg = seg_of(answer)
    sources = {d.SOPInstanceUID: d for d in map(pydicom.dcmread, map(io.BytesIO, files.values()))}
    found = seg.get_pixels_by_source_instance(list(sources), segment_numbers=[1])[..., 0]
    for pixels, source in zip(found, sources.values(), strict=True):
        np.testing.assert_array_equal(pixels, source.pixel_array > THRESHOLD)
    spacing = seg.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices
    assert float(spacing) == pytest.approx(2.5 * np.cos(np.radians(12)), abs=1e-5)
    contours = api.segment(zipped(files), model="coded", output="dicom-rtstruct").content
    drawn = decode_mask(contours, scan=decode(files)).voxels[..., 0]
    np.testing.assert_array_equal(drawn.transpose(2, 1, 0) > 0, VOLUME > THRESHOLD)


def test_ultrasound_of_several_frames_is_answered_frame_by_frame(api: Any) -> None:
    film = written(
        header(VOLUME, UltrasoundMultiFrameImageStorage, NumberOfFrames=len(VOLUME), Modality="US")
    )
    answer = api.segment(film, model="bright")
    assert answer.headers["locum-warning-names"] == "film"
    mask = np.asarray(nifti_of(answer).dataobj)
    np.testing.assert_array_equal(mask.transpose(2, 1, 0), VOLUME > THRESHOLD)
    report = api.segment(film, model="bright", output="json").json()
    assert report["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())
    assert report["labels"]["bright"]["volume_ml"] is None
    refused = api.segment(film, model="coded", output="dicom-seg")
    assert (refused.status_code, "frames of a film have no place" in refused.text) == (422, True)


def test_seg_says_what_made_it(api: Any) -> None:
    scan = zipped(series(VOLUME))
    response = api.segment(scan, model="coded", output="dicom-seg")
    seg = seg_of(response)
    (segment,) = seg.SegmentSequence
    assert segment.SegmentAlgorithmType == "AUTOMATIC"
    assert segment.SegmentedPropertyTypeCodeSequence[0].CodeValue == "10200004"
    (algorithm,) = segment.SegmentationAlgorithmIdentificationSequence
    assert algorithm.AlgorithmName == "coded@1"
    assert f"sha256:{algorithm.AlgorithmVersion}" == api.store.open("coded@1").digest
    assert "personalization=global" in algorithm.AlgorithmParameters
    for text in (seg.SeriesDescription, seg.ContentDescription):
        assert "research use only" in text
    other = seg_of(api.segment(scan, model="other", output="dicom-seg"))
    devices = {e.DeviceUID for s in (seg, other) for e in s.ContributingEquipmentSequence if "DeviceUID" in e}
    assert len(devices) == 2
    assert seg.SOPInstanceUID != other.SOPInstanceUID


def test_same_request_gives_the_same_instance_and_another_option_another(api: Any) -> None:
    scan = zipped(series(VOLUME))
    first, again, named = (
        api.segment(scan, model=model, output="dicom-seg") for model in ("coded", "coded", "coded@1")
    )
    assert first.content == again.content == named.content
    others = [
        api.segment(scan, model="coded", output="dicom-seg", segmentation_type="labelmap"),
        api.segment(zipped(series(VOLUME + 1)), model="coded", output="dicom-seg"),
    ]
    assert len({seg_of(each).SOPInstanceUID for each in (first, *others)}) == 3


@pytest.mark.parametrize("pack", [lambda v: zipped(series(v)), enhanced], ids=["series", "enhanced"])
@pytest.mark.parametrize("kind", ["binary", "labelmap"])
def test_report_has_the_volumes_and_refers_to_the_seg_of_the_same_request(
    api: Any, pack: Callable[..., bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After twenty answers of this module a report has the rank among them, too, from the next look on.
    monkeypatch.setattr(review, "FEWEST", 10**6)
    scan = pack(VOLUME)
    first, again, seg = (
        api.segment(scan, model="coded", output=output, segmentation_type=kind)
        for output in ("dicom-sr", "dicom-sr", "dicom-seg")
    )
    assert first.content == again.content
    report = hd.sr.srread(io.BytesIO(first.content))
    made = seg_of(seg)
    assert report.ContentTemplateSequence[0].TemplateIdentifier == "1500"
    (group,) = report.content.get_volumetric_roi_measurement_groups()
    (volume,) = group.get_measurements()
    expected = int((VOLUME > THRESHOLD).sum()) * 0.8 * 0.7 * 2.5 / 1000
    assert (volume.name.meaning, volume.unit.value) == ("Volume", "ml")
    assert volume.value == pytest.approx(expected)
    assert group.finding_type.value == "10200004"
    assert group.tracking_uid == made.SegmentSequence[-1].TrackingUID
    reference = next(item for item in group[0].ContentSequence if item.ValueType == "IMAGE")
    (referenced,) = reference.ReferencedSOPSequence
    assert referenced.ReferencedSOPInstanceUID == made.SOPInstanceUID
    assert referenced.ReferencedSegmentNumber == 1
    assert report.StudyInstanceUID == made.StudyInstanceUID
    assert report.SeriesInstanceUID != made.SeriesInstanceUID
    assert "research use only" in report.SeriesDescription
    evidence = {
        each.ReferencedSOPInstanceUID
        for name in ("CurrentRequestedProcedureEvidenceSequence", "PertinentOtherEvidenceSequence")
        for study in report.get(name, ())
        for one in study.ReferencedSeriesSequence
        for each in one.ReferencedSOPSequence
    }
    assert made.SOPInstanceUID in evidence
    assert len(evidence) == 1 + (len(VOLUME) if pack is not enhanced else 1)


def test_single_projection_image_has_no_report(api: Any) -> None:
    response = api.segment(image(VOLUME[0].astype(np.uint16)), model="coded", output="dicom-sr")
    assert response.status_code == 422
    assert "a single image has none" in response.json()["detail"]


def test_single_projection_image_has_a_seg(api: Any) -> None:
    pixels = VOLUME[0].astype(np.uint16)
    seg = seg_of(api.segment(image(pixels), model="coded", output="dicom-seg"))
    np.testing.assert_array_equal(seg.pixel_array, pixels > THRESHOLD)


def test_single_projection_image_has_no_contours(api: Any) -> None:
    response = api.segment(image(VOLUME[0].astype(np.uint16)), model="coded", output="dicom-rtstruct")
    assert response.status_code == 422
    assert "a single image has no position there" in response.json()["detail"]


@pytest.mark.parametrize("pack", [lambda v: zipped(series(v)), enhanced], ids=["series", "enhanced"])
@pytest.mark.parametrize("model", ["coded", "bright"])
def test_rtstruct_has_the_mask_of_the_answer(api: Any, pack: Callable[..., bytes], model: str) -> None:
    """Also where the task has no codes, which an ROI does not need."""
    scan = pack(VOLUME)
    response = api.segment(scan, model=model, output="dicom-rtstruct")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/dicom"
    mask = decode_mask(response.content, scan=decode(scan)).voxels[..., 0]
    np.testing.assert_array_equal(mask.transpose(2, 1, 0), VOLUME > THRESHOLD)
    made = pydicom.dcmread(io.BytesIO(response.content))
    assert [roi.ROIName for roi in made.StructureSetROISequence] == ["bright"]
    simple = api.segment(scan, model=model, output="dicom-rtstruct", tolerance_mm="2")
    assert len(simple.content) < len(response.content)
    assert api.segment(scan, model=model, output="dicom-rtstruct").content == response.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bright", "output": "dicom-seg"}, "has none for bright"),
        ({"model": "coded", "output": "dicom-seg", "tolerance_mm": "1"}, "belongs to output=dicom-rtstruct"),
        ({"model": "coded", "segmentation_type": "labelmap"}, "belongs to output=dicom-seg"),
    ],
)
def test_request_without_what_a_seg_needs_is_refused(api: Any, fields: dict[str, str], message: str) -> None:
    response = api.segment(zipped(series(VOLUME)), **fields)
    assert response.status_code == 422
    assert message in response.json()["detail"]


@pytest.mark.parametrize("output", ["dicom-seg", "dicom-sr", "dicom-rtstruct"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, place: setattr(d, "SOPInstanceUID", "Planted^Patient"), "valid SOPInstanceUID.* 9 of 9"),
        (lambda d, place: setattr(d, "StudyInstanceUID", ""), "valid StudyInstanceUID.* 9 of 9 without"),
        (lambda d, place: delattr(d, "SeriesInstanceUID"), "valid SeriesInstanceUID"),
        (lambda d, place: delattr(d, "FrameOfReferenceUID"), "valid FrameOfReferenceUID"),
        (lambda d, place: setattr(d, "SOPInstanceUID", "1.2.3"), "each of 9 files.* 1 different"),
    ],
)
def test_series_that_a_seg_cannot_refer_to_has_no_dicom_answer(
    api: Any, change: Callable[[Any, int], None], message: str, output: str
) -> None:
    scan = zipped(series(VOLUME, change=change))
    response = api.segment(scan, model="coded", output=output)
    assert response.status_code == 415, response.text
    assert re.search(message, response.json()["detail"])
    assert "Planted" not in response.text
    assert api.segment(scan, model="coded").status_code == 200


def test_patient_cd_is_segmented(api: Any) -> None:
    viewer = {f"VIEWER/{n}.dll": b"MZ" + bytes(200) for n in range(80)}
    answer = api.segment(zipped({**viewer, **series(VOLUME)}), model="bright", output="json")
    assert answer.status_code == 200, answer.text
    assert answer.json()["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())


def study() -> bytes:
    """A zip of series 3, which is dark, and series 4."""
    files = {
        f"{number}/{name}": content
        for number, voxels in ((3, VOLUME // 4), (4, VOLUME))
        for name, content in series(voxels, SeriesNumber=number, SeriesInstanceUID=f"1.2.3.{number}").items()
    }
    return zipped(files)


ALONE = zipped(series(VOLUME, SeriesNumber=4, SeriesInstanceUID="1.2.3.4"))


def test_study_of_several_series_is_refused_with_a_list_and_one_is_chosen(api: Any) -> None:
    refused = api.segment(study(), model="coded")
    assert refused.status_code == 415
    assert "number 3 (CT, axial, 9 images of 32 x 32), number 4 (CT, " in refused.json()["detail"]
    # A zip has the time at which it was made.
    sent = study()
    answer = api.segment(sent, model="coded", output="json", series="4")
    assert answer.status_code == 200, answer.text
    assert answer.json()["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())
    receipt = answer.json()["receipt"]
    assert receipt["options"]["series"] == "4"
    assert receipt["input_sha256"] == f"sha256:{hashlib.sha256(sent).hexdigest()}"
    seg = seg_of(api.segment(study(), model="coded", output="dicom-seg", series="1.2.3.4"))
    (source,) = seg.ReferencedSeriesSequence
    assert source.SeriesInstanceUID == "1.2.3.4"
    assert len(source.ReferencedInstanceSequence) == len(VOLUME)


@pytest.mark.parametrize(
    ("series", "status", "message"),
    [
        ("7", 415, "number 7 by the option `series`, found 0 among 2: number 3"),
        ("1.2", 415, "this UID by the option `series`, found 0 among 2"),
        ("../3", 422, "expected the number of a DICOM series, its UID, or the end of its UID"),
        ("1" * 65, 422, "64"),
    ],
)
def test_wrong_choice_of_a_series_is_refused(api: Any, series: str, status: int, message: str) -> None:
    answer = api.segment(study(), model="coded", series=series)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert "1.2.3" not in answer.text


@pytest.mark.parametrize("output", ["json", "dicom-seg", "dicom-rtstruct"])
def test_job_keeps_the_chosen_series_alone(api: Any, output: str) -> None:
    fields = {"model": "coded", "output": output, "series": "1.2.3.4"}
    accepted = api.client.post(
        "/segment", files={"scan": study()}, data=fields, headers={"Prefer": "respond-async"}
    )
    assert accepted.status_code == 202, accepted.text
    job = accepted.json()["id"]
    folder = JobFolder(api.settings.open_files(), job)
    kept = folder.read_input()
    assert kept is not None
    np.testing.assert_array_equal(decode(kept.content).voxels, decode(ALONE).voxels)
    with api.context.database.read() as session:
        assert "1.2.3.4" not in json.dumps(records.get(session, job).options)
    run_job(job, api.settings)
    found = api.client.get(f"/jobs/{job}/result")
    assert found.status_code == 200, found.text
    if output != "json":
        assert found.content == api.segment(study(), **fields).content
    else:
        assert found.json()["receipt"]["options"]["series"] == "1.2.3.4"
        assert found.json()["labels"]["bright"]["voxels"] == int((VOLUME > THRESHOLD).sum())
    assert folder.names == ["result", "result.json"]


@pytest.mark.parametrize("output", ["dicom-seg", "dicom-sr", "dicom-rtstruct"])
def test_attribute_that_a_dicom_answer_leaves_out_is_named(api: Any, output: str) -> None:
    scan = zipped(series(VOLUME, PatientSex="U", PatientID="P" * 70))
    answer = api.segment(scan, model="coded", output=output, guard="refuse")
    made = pydicom.dcmread(io.BytesIO(answer.content))
    assert (made.PatientSex, made.PatientID) == ("", "P" * 70)
    assert answer.headers["locum-warning-names"] == "copied:PatientID, left-out:PatientSex"
    assert answer.headers["locum-warnings"] == "2"


def test_series_sent_in_another_container_is_one_seg(api: Any) -> None:
    files = series(VOLUME)
    parts = [("scan", ("x", one)) for one in [*files.values()][::-1]]
    loose = api.client.post("/segment", files=parts, data={"model": "coded", "output": "dicom-seg"})
    assert loose.content == api.segment(zipped(files), model="coded", output="dicom-seg").content


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({**series(VOLUME), "__MACOSX/._0001.dcm": b"\0\5\x16\7" + bytes(100)}, "files-ignored"),
        (series(VOLUME, LossyImageCompression="01"), "lossy-pixels"),
        (series(VOLUME, BurnedInAnnotation="YES"), "burnt-in-text"),
        ({"one.dcm": next(iter(series(VOLUME).values()))}, "one-slice"),
    ],
)
def test_guard_judges_the_scan_and_not_its_container(api: Any, files: dict[str, bytes], name: str) -> None:
    answer = api.segment(zipped(files), model="bright", output="json", guard="refuse")
    assert answer.status_code == 200, answer.text
    assert answer.headers["locum-warning-names"] == name
    assert answer.headers["locum-warnings"] == str(len(answer.json()["warnings"])) == "1"
    constant = zipped(series(np.ones_like(VOLUME), LossyImageCompression="01"))
    refused = api.segment(constant, model="bright", guard="refuse")
    assert (refused.status_code, len(refused.json()["warnings"])) == (422, 1)


def test_nifti_has_no_dicom_answer(api: Any, make_nifti: Callable[..., bytes]) -> None:
    response = api.segment(make_nifti(VOLUME, np.eye(4)), model="coded", output="dicom-seg")
    assert response.status_code == 422
    assert "send the series" in response.json()["detail"]


@pytest.mark.parametrize("pack", [lambda v: zipped(series(v)), enhanced], ids=["series", "enhanced"])
@pytest.mark.parametrize("output", ["dicom-seg", "dicom-sr", "dicom-rtstruct"])
def test_dciodvfy_finds_no_error(api: Any, pack: Callable[..., bytes], output: str, tmp_path: Path) -> None:
    if shutil.which("dciodvfy") is None:
        pytest.skip("dciodvfy is not installed (apt-get install dicom3tools)")
    path = tmp_path / "made.dcm"
    path.write_bytes(api.segment(pack(VOLUME), model="coded", output=output).content)
    found = subprocess.run(["dciodvfy", "-new", path], capture_output=True, text=True, check=False)
    iod = {"dicom-seg": "Segmentation", "dicom-sr": "ComprehensiveSR", "dicom-rtstruct": "RTStructureSet"}
    assert iod[output] in found.stderr
    assert [line for line in found.stderr.splitlines() if line.startswith("Error")] == []


@every_plane
def test_dcmqi_reads_the_mask_in_the_same_place(api: Any, plane: Any, tmp_path: Path) -> None:
    found = dcmqi("segimage2itkimage")
    content = zipped(series(VOLUME, plane))
    (tmp_path / "made.dcm").write_bytes(api.segment(content, model="coded", output="dicom-seg").content)
    command = [found, "--inputDICOM", tmp_path / "made.dcm", "--outputDirectory", tmp_path, "-t", "nifti"]
    subprocess.run(command, check=True, capture_output=True)
    read = sitk.ReadImage(str(tmp_path / "1.nii.gz"))
    ours = nifti_of(api.segment(content, model="coded"))
    (tmp_path / "ours.nii.gz").write_bytes(gzip.compress(ours.to_bytes()))
    expected = sitk.ReadImage(str(tmp_path / "ours.nii.gz"))
    assert sitk.GetArrayFromImage(read).sum() == sitk.GetArrayFromImage(expected).sum() > 4000
    resampled = sitk.Resample(read, expected, sitk.Transform(), sitk.sitkNearestNeighbor)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(resampled) > 0, sitk.GetArrayFromImage(expected) > 0)
    assert sorted(read.GetSpacing()) == pytest.approx(sorted(expected.GetSpacing()))


def test_dcmqi_reads_the_report(api: Any, tmp_path: Path) -> None:
    found, content = dcmqi("tid1500reader"), zipped(series(VOLUME, turned(8)))
    (tmp_path / "made.dcm").write_bytes(api.segment(content, model="coded", output="dicom-sr").content)
    command = [found, "--inputDICOM", tmp_path / "made.dcm", "--outputMetadata", tmp_path / "read.json"]
    subprocess.run(command, check=True, capture_output=True)
    (group,) = json.loads((tmp_path / "read.json").read_text())["Measurements"]
    seg = seg_of(api.segment(content, model="coded", output="dicom-seg"))
    assert group["segmentationSOPInstanceUID"] == seg.SOPInstanceUID
    assert group["ReferencedSegment"] == 1
    assert group["Finding"]["CodeValue"] == "10200004"
    (item,) = group["measurementItems"]
    assert (item["quantity"]["CodeMeaning"], item["units"]["CodeValue"]) == ("Volume", "ml")
    expected = int((VOLUME > THRESHOLD).sum()) * 0.8 * 0.7 * 2.5 / 1000
    assert float(item["value"]) == pytest.approx(expected)


def test_no_value_of_the_patient_in_an_error(api: Any) -> None:
    files = series(VOLUME)
    files.pop("0003.dcm")
    response = api.segment(zipped({f"PLANTED^{n}": c for n, c in files.items()}), model="coded")
    assert response.status_code == 415
    assert "1 slices are missing" in response.text
    assert "planted" not in (response.text + str(response.headers)).lower()


@pytest.mark.parametrize("output", ["dicom-seg", "dicom-sr", "dicom-rtstruct"])
def test_damaged_header_gets_a_seg_or_a_reason(api: Any, output: str) -> None:
    rng = np.random.default_rng(7)
    whole = [next(iter(series(VOLUME).values())), enhanced(VOLUME)]
    statuses = []
    for number in range(MUTATIONS):
        content = bytearray(whole[number % 2])
        for place in rng.integers(132, 1500, int(rng.integers(1, 6))):
            content[place] = int(rng.choice([0, 0x20, 0x41, 0xFF, int(rng.integers(256))]))
        response = api.segment(bytes(content), model="coded", output=output)
        statuses.append(response.status_code)
        assert response.status_code < 500, (number, response.text)
    assert 200 in statuses
    assert set(statuses) - {200}
