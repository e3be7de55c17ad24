"""Scans that paths, folders and globs name, and the masks beside them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from locum.commands.batch import Found, find, group, one_of_channels
from locum.commands.fitting import check, split
from locum.errors import ScanInvalid

DICOM = bytes(128) + b"DICM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "a.nii.gz": b"",
        "notes.txt": b"",
        ".hidden.nii": b"",
        "study/one/1": DICOM,
        "study/one/2": DICOM,
        "study/two/1.dcm": DICOM,
        "study/two/report.png": b"",
        "out/a-mask.nii.gz": b"",
        ".trash/b.nii": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_folder_is_searched_and_a_folder_of_dicom_is_one_scan(folder: Path) -> None:
    found = {scan.name: scan.path for scan in find([str(folder)], folder / "out")}
    assert found == {
        "a.nii.gz": folder / "a.nii.gz",
        "study/one": folder / "study/one",
        "study/two": folder / "study/two",
        "study/two/report.png": folder / "study/two/report.png",
    }


def test_glob_and_path_of_one_file_name_it_once(folder: Path) -> None:
    found = find([str(folder / "*.nii.gz"), str(folder / "a.nii.gz"), str(folder / "study/one")])
    assert [(scan.name, scan.stem) for scan in found] == [("a.nii.gz", "a"), ("one", "one")]


@pytest.mark.parametrize("given", ["nothing-*.nii", "gone/"])
def test_path_without_scans_is_named(folder: Path, given: str) -> None:
    with pytest.raises(ScanInvalid, match="expected a file, a folder or a glob"):
        find([str(folder / given)])


def test_two_scans_with_one_name_are_rejected(folder: Path) -> None:
    (folder / "study/a.nii.gz").write_bytes(b"")
    with pytest.raises(ScanInvalid, match="both results would be called a"):
        find([str(folder / "a.nii.gz"), str(folder / "study/a.nii.gz")])


def test_masks_are_beside_their_scans_or_in_a_folder(tmp_path: Path) -> None:
    for name in (
        "scans/1.nii.gz",
        "scans/2.nii.gz",
        "scans/1_mask.nii.gz",
        "masks/2.nii.gz",
        "masks/1-mask.nii",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    images, masks = split(find([str(tmp_path / "scans")]), None)
    assert [scan.name for scan in images] == ["1.nii.gz", "2.nii.gz"]
    assert {scan.name: path.name for scan, path in masks.items()} == {"1.nii.gz": "1_mask.nii.gz"}
    (tmp_path / "scans/1_mask.nii.gz").unlink()
    scans = find([str(tmp_path / "scans")])
    _, masks = split(scans, tmp_path / "masks")
    assert {scan.name: path.name for scan, path in masks.items()} == {
        "1.nii.gz": "1-mask.nii",
        "2.nii.gz": "2.nii.gz",
    }
    assert split(scans, None) == (scans, {})
    (tmp_path / "masks/1-mask.nii").rename(tmp_path / "masks/3.nii")
    with pytest.raises(ScanInvalid, match=r"expected masks in .*masks, found none"):
        split(find([str(tmp_path / "scans/1.nii.gz")]), tmp_path / "masks")


def of_a_model(**changes: Any) -> Any:
    known = {"name": "hippocampus", "hospital": None, "adaptable": True, "masks": "required"}
    words = "adapts to a hospital with masks of a few scans, not without: its network has instance norm"
    return Namespace(**{**known, "presets": ("auto", "masks"), "summary": words, **changes})


@pytest.mark.parametrize(
    ("model", "masks", "options", "refused"),
    [
        (of_a_model(), 0, {}, "not without: its network has instance norm: expected masks"),
        (of_a_model(), 0, {"preset": "ladder"}, "hippocampus can be adapted by auto, masks"),
        (of_a_model(masks="optional"), 0, {"preset": "masks"}, "expected masks of some scans, found none"),
        (
            of_a_model(adaptable=False, summary="answers as it is"),
            3,
            {},
            "as it is: no job adapts it",
        ),
        (of_a_model(), 3, {}, None),
        (of_a_model(masks="optional"), 0, {}, None),
        (of_a_model(masks="none", presets=()), 0, {"criterion": "entropy"}, None),
        (of_a_model(hospital="dune", adaptable=False), 0, {}, None),
    ],
)
def test_what_a_job_would_reject_is_refused_before_anything_is_sent(
    model: Any, masks: int, options: dict[str, Any], refused: str | None
) -> None:
    if refused is None:
        check(model, masks, options)
        return
    with pytest.raises(ScanInvalid, match=refused):
        check(model, masks, options)


class TestChannels:
    """Files of the channels T1 and FLAIR."""

    def grouped(self, root: Path, *names: str) -> dict[str, Found]:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(DICOM if name.endswith("/1") else b"")
        return {scan.stem: scan for scan in group(find([str(root)]), ("T1", "FLAIR"))}

    def test_files_of_a_case_are_one_scan_by_name_and_by_number(self, tmp_path: Path) -> None:
        names = ["a_0001.nii.gz", "a_0000.nii.gz", "b-flair.nii", "b-T1.nii", "c/T1/1", "c/FLAIR/1", "d.zip"]
        found = self.grouped(tmp_path, *names)
        assert {name: scan.scan for name, scan in found.items()} == {
            "a": {"T1": tmp_path / "a_0000.nii.gz", "FLAIR": tmp_path / "a_0001.nii.gz"},
            "b": {"T1": tmp_path / "b-T1.nii", "FLAIR": tmp_path / "b-flair.nii"},
            "c": {"T1": tmp_path / "c/T1", "FLAIR": tmp_path / "c/FLAIR"},
            "d": tmp_path / "d.zip",
        }

    def test_a_missing_channel_is_named_and_stops_no_other_case(self, tmp_path: Path) -> None:
        found = self.grouped(tmp_path, "a_0000.nii.gz", "b_T1.nii", "b_FLAIR.nii")
        with pytest.raises(ScanInvalid, match=r"T1, FLAIR, found a_0000\.nii\.gz: FLAIR is missing"):
            _ = found["a"].scan
        assert len(found["b"].channels) == 2

    def test_two_files_of_one_channel_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ScanInvalid, match="both are channel T1 of a; leave one out"):
            self.grouped(tmp_path, "a_0000.nii.gz", "a_T1.nii.gz")

    def test_a_model_of_one_channel_leaves_names_with_numbers_alone(self, tmp_path: Path) -> None:
        (tmp_path / "a_0000.nii").write_bytes(b"")
        assert [scan.stem for scan in group(find([str(tmp_path)]), ())] == ["a_0000"]

    def test_channel_options_name_one_scan(self, tmp_path: Path) -> None:
        found = one_of_channels(["T1=x/case7_T1.nii.gz", "FLAIR=x/case7_FLAIR.nii.gz"])
        assert (found.name, [name for name, _ in found.channels]) == ("case7", ["T1", "FLAIR"])
        assert one_of_channels([f"T1={tmp_path}/t1.nii", f"FLAIR={tmp_path}/b.nii"]).name == tmp_path.name
        for wrong in (["T1"], ["=a.nii"], ["T1="], ["T1=a.nii", "T1=b.nii"]):
            with pytest.raises(ScanInvalid, match="expected NAME=FILE, each name once"):
                one_of_channels(wrong)
