"""What is said about a mask: labels that overlap, and volumes in millilitres."""

from __future__ import annotations

import email
import email.policy
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray

from model_store.preprocessing import geometry_of
from model_store.scan import Scan, decode
from model_store.task import Task
from service.errors import OutputMismatch, ParametersContradict
from service.inference.pipeline import Segmentation
from service.observation import seen_labels
from service.prediction import output
from service.prediction.output import (
    LabelReport,
    Output,
    centroids,
    choose_output,
    common_slices,
    encode,
    encode_multipart,
    label_header,
    label_names,
    label_reports,
    picture,
    sizes,
)

FUNDUS = Task(name="fundus", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))


def segmentation(
    classes: NDArray[np.uint8], affine: NDArray[np.float64] | None, unit: float = 1.0
) -> Segmentation:
    form = "png" if affine is None else "nifti"
    scan = Scan(np.zeros((*classes.shape, 1), np.uint8), affine, form, unit)  # type: ignore[arg-type]
    return Segmentation(scan, geometry_of(scan, FUNDUS), classes, {})


def measure(found: Segmentation, task: Task) -> dict[str, LabelReport]:
    """What a JSON answer says of the labels of a mask."""
    nothing = dict.fromkeys(task.labels, 0.5)
    seen = seen_labels(found.classes, task, nothing, found.scan.voxel_volume_ml)
    return label_reports(seen, dict.fromkeys(task.labels), task, found.classes.size)


def test_measure_sums_the_classes_of_a_label() -> None:
    classes = np.zeros((16, 16), np.uint8)
    classes[:4] = 1
    classes[0, :8] = 2
    found = measure(segmentation(classes, None), FUNDUS)
    assert (found["disc"].classes, found["disc"].voxels, found["disc"].fraction) == ([1, 2], 64, 0.25)
    assert (found["cup"].classes, found["cup"].voxels) == ([2], 8)
    assert found["disc"].volume_ml is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_measure_counts_a_volume_of_several_parts_in_either_order_of_memory(order: str) -> None:
    classes = np.random.default_rng(0).integers(0, 3, (130, 120, 140)).astype(np.uint8, order=order)  # type: ignore[call-overload]
    found = measure(segmentation(classes, np.eye(4)), FUNDUS)
    assert found["disc"].voxels == np.count_nonzero(classes)
    assert found["cup"].voxels == np.count_nonzero(classes == 2)
    said = [f"{label} {found[label].volume_ml:.2f} mL" for label in ("disc", "cup")]
    assert sizes(segmentation(classes, np.eye(4)), FUNDUS) == said


@pytest.mark.parametrize(("unit", "factor"), [(1.0, 1.0), (1000.0, 1e9), (0.001, 1e-9)])
def test_measured_volume_follows_the_affine_and_its_unit(unit: float, factor: float) -> None:
    classes = np.ones((16, 16, 10), np.uint8)
    affine = np.array([[0, 0, 5.0, 0], [0.5, 0, 0, 0], [0, -2.0, 0, 0], [0, 0, 0, 1]])
    found = measure(segmentation(classes, affine, unit), FUNDUS)
    assert found["disc"].volume_ml == pytest.approx(2560 * 5.0 * 0.5 * 2.0 / 1000 * factor)


def test_nifti_and_nrrd_lie_on_a_scan_with_two_forms(tmp_path: Path) -> None:
    """By the sform in nibabel, and in ITK by the qform."""
    scanner, atlas = np.diag([-2.0, -2.0, 6.0, 1.0]), np.diag([-2.0, -2.0, 6.0, 1.0])
    atlas[:3, 3] = (90, 30, -40)
    image = nib.Nifti1Image(np.zeros((16, 18, 6), np.int16), atlas)
    image.set_qform(scanner, 1)
    image.set_sform(atlas, 4)
    (tmp_path / "scan.nii").write_bytes(image.to_bytes())
    scan = decode(image.to_bytes())
    found = Segmentation(scan, geometry_of(scan, FUNDUS), np.ones(scan.grid, np.uint8), {})
    for kind, suffix in (("nifti", "nii.gz"), ("nrrd", "nrrd")):
        content, _ = encode(kind, found, FUNDUS, "", (), pytest.fail)  # type: ignore[arg-type]
        (tmp_path / f"mask.{suffix}").write_bytes(content)
        ours, mask = (sitk.ReadImage(str(tmp_path / name)) for name in ("scan.nii", f"mask.{suffix}"))
        assert mask.GetOrigin() == pytest.approx(ours.GetOrigin())
        assert mask.GetDirection() == pytest.approx(ours.GetDirection())
    np.testing.assert_array_equal(nib.load(tmp_path / "mask.nii.gz").affine, atlas)  # type: ignore[attr-defined]


def test_label_header_maps_values_to_labels_in_ascii() -> None:
    header = label_header(FUNDUS)
    assert json.loads(header) == {"1": ["disc"], "2": ["disc", "cup"]}
    assert label_header(Task(name="t", labels={"Gef\u00e4\u00df": (1,)}, size=(16, 16))).isascii()


def test_choose_output_follows_the_scan_and_rejects_a_mismatch() -> None:
    image = segmentation(np.zeros((16, 16), np.uint8), None).scan
    volume = segmentation(np.zeros((16, 16, 16), np.uint8), np.eye(4)).scan
    assert (choose_output(None, image, FUNDUS), choose_output(None, volume, FUNDUS)) == ("png", "nifti")
    assert choose_output("overlay", volume, FUNDUS) == "overlay"
    assert choose_output("multipart", image, FUNDUS) == "multipart"
    for wanted, scan in (("nifti", image), ("nrrd", image), ("png", volume)):
        with pytest.raises(OutputMismatch) as refused:
            choose_output(wanted, scan, FUNDUS)  # type: ignore[arg-type]
        assert refused.value.status == 422


def test_compress_belongs_to_nrrd() -> None:
    volume = segmentation(np.zeros((16, 16, 16), np.uint8), np.eye(4)).scan
    assert choose_output("multipart", volume, FUNDUS, compress=False) == "multipart"
    with pytest.raises(ParametersContradict):
        choose_output("nifti", volume, FUNDUS, compress=False)


def test_names_of_mask_values_are_one_per_value_from_1_without_background() -> None:
    assert label_names(FUNDUS) == {"disc": 1, "disc + cup": 2}
    assert label_names(Task(name="t", labels={"b": (7,), "a": (2,)}, size=(16, 16))) == {"a": 1, "b": 2}


def test_centroids_are_the_mean_voxel_of_each_value_that_is_there() -> None:
    classes = np.zeros((16, 17, 18), np.uint8)
    classes[2:5, 6, 9:12] = 2
    where = np.argwhere(classes == 2).mean(axis=0)
    assert centroids(classes, FUNDUS) == {"disc + cup": [2, *where.astype(int)]}
    assert centroids(np.zeros((16, 16), np.uint8), FUNDUS) == {}


def test_multipart_is_read_by_another_parser() -> None:
    report, mask = b'{"label_names": {"disc": 1}}', b"NRRD0004\n\n" + bytes(range(256)) + b"\r\n\r\n--locum"
    body, media_type = encode_multipart(report, mask, "nrrd")
    head = f"Content-Type: {media_type}\r\n\r\n".encode()
    parsed = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    params, image = parsed.iter_parts()
    assert params.get_param("name", header="content-disposition") == "params"
    assert (params.get_content_type(), params.get_filename()) == ("application/json", None)
    assert (image.get_content_type(), image.get_filename()) == ("application/octet-stream", "mask.nrrd")
    # Not through the parser, which reads lines.
    assert (
        body.partition(b'filename="mask.nrrd"')[2]
        .partition(b"\r\n\r\n")[2]
        .startswith(mask + b"\r\n--locum-")
    )
    assert params.get_payload(decode=True) == report


def test_compared_pictures_show_the_same_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = np.zeros((2, 16, 16, 12), np.uint8)
    before[4:8, 4:8, 1:3] = 1
    after[4:8, 4:8, 9] = 1
    found = [segmentation(classes, np.diag([1.0, 1.0, 3.0, 1.0])) for classes in (before, after)]
    shown: list[list[str]] = []
    monkeypatch.setattr(
        output, "overlay", lambda panels, *_: shown.append([panel.caption for panel in panels])
    )
    for one in found:
        picture(one, FUNDUS, "alone")
    for one in found:
        picture(one, FUNDUS, "compared", shown=common_slices(found))
    assert [len(captions) for captions in shown] == [2, 1, 3, 3]
    assert shown[2] == shown[3] == [f"axial {number} of 12" for number in (2, 3, 10)]


@pytest.mark.parametrize(
    ("names", "said"),
    [((), None), (("zero-shot", "scan-unlike-task"), "warnings: zero-shot, scan-unlike-task")],
)
def test_overlay_footer_names_the_warnings(
    names: tuple[str, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        output, "overlay", lambda _panels, _legend, _title, footer, _compression: lines.append(footer)
    )
    classes = np.zeros((16, 16), np.uint8)
    wanted: Output = "overlay"
    encode(wanted, segmentation(classes, None), FUNDUS, "fundus@1", names, lambda: pytest.fail("no JSON"))
    (line,) = lines
    parts = line.split("  ·  ")
    assert parts[:2] == ["disc 0 px", "cup 0 px"]
    assert parts[2:-1] == ([said] if said else [])
    assert parts[-1] == output.NOTICE
