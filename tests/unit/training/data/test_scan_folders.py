"""Training cases that are folders of files: of DICOM, and of a format registered only by these tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import yaml
from numpy.typing import NDArray

from model_store.scan import encode_nifti
from model_store.scans import formats
from tests.helpers.model_store import dicom_files
from tests.helpers.model_store.other_formats import save_as
from tests.helpers.model_store.png_stack import PNG_STACK, slices, zipped
from training.data.federation import load_federation
from training.data.scan_files import content_digest, read_content, scans_in, stem_of
from training.data.splits import split_by_patient
from training.errors import FederationError
from training.local.site import SiteData

TASK = {"name": "bright", "labels": {"bright": [1]}, "size": [16, 16], "patient": "^(?P<patient>p[0-9.]+)"}
PATIENTS = ("p1", "p2", "p3.7", "p4")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, PNG_STACK))


def volume_of(patient: str) -> NDArray[np.uint8]:
    drawn = np.random.default_rng(PATIENTS.index(patient)).integers(0, 2, (16, 16, 3))
    return np.where(drawn == 1, 200, 20).astype(np.uint8)


def write_folder(folder: Path, volume: NDArray[np.uint8]) -> None:
    folder.mkdir(parents=True)
    for name, content in slices(volume).items():
        (folder / name).write_bytes(content)


def write_site(root: Path, form: str) -> Path:
    """One site: a case per patient as a folder, a zip, a NIfTI, or in the format of a suffix.

    The mask of a folder is a NIfTI, that of a .nrrd a .seg.nrrd.
    """
    (root / "north" / "images").mkdir(parents=True)
    (root / "north" / "masks").mkdir()
    (root / "task.yaml").write_text(yaml.safe_dump(TASK))
    for patient in PATIENTS:
        volume = volume_of(patient)
        mask = (volume == 200).astype(np.uint8)
        image = root / "north" / "images" / patient
        mask_file = root / "north" / "masks" / patient
        if form == "folder":
            write_folder(image, volume)
            Path(f"{mask_file}.nii.gz").write_bytes(encode_nifti(mask, np.eye(4)))
        elif form == "zip":
            Path(f"{image}.zip").write_bytes(zipped(slices(volume)))
            Path(f"{mask_file}.zip").write_bytes(zipped(slices(mask)))
        else:
            Path(f"{image}.nii.gz").write_bytes(encode_nifti(volume, np.eye(4)))
            Path(f"{mask_file}.nii.gz").write_bytes(encode_nifti(mask, np.eye(4)))
        if form.startswith("."):
            for file, suffix in ((image, form), (mask_file, ".seg.nrrd" if form == ".nrrd" else form)):
                save_as(Path(f"{file}.nii.gz"), Path(f"{file}{suffix}"))
                Path(f"{file}.nii.gz").unlink()
    return root


class TestSegmentation:
    def test_every_form_trains_on_the_same_slices_as_nifti(self, tmp_path: Path) -> None:
        data = {}
        for form in ("folder", "zip", ".nrrd", ".mha", ".hdr", "nifti"):
            federation = load_federation(write_site(tmp_path / form, form))
            assert federation.site("north").patients == PATIENTS
            data[form] = SiteData.load(split_by_patient(federation.site("north"), seed=0), federation.task)
        for form in set(data) - {"nifti"}:
            for split in ("train", "val", "test"):
                one, other = getattr(data[form], split), getattr(data["nifti"], split)
                np.testing.assert_array_equal(one.images, other.images)
                np.testing.assert_array_equal(one.targets, other.targets)
                assert one.patients == other.patients

    def test_task_is_inferred_from_scan_folders(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        (root / "task.yaml").unlink()
        federation = load_federation(root)
        assert (federation.task.labels, federation.task.size) == ({"foreground": (1,)}, (16, 16))
        # The whole name of a folder is the patient, since a folder has no suffix.
        assert federation.site("north").patients == PATIENTS

    def test_mask_folder_of_the_same_name_is_used(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        mask = root / "north" / "masks" / "p1"
        mask.with_name("p1.nii.gz").unlink()
        write_folder(mask, (volume_of("p1") == 200).astype(np.uint8))
        (case, *_) = load_federation(root).site("north").cases
        assert (case.name, case.mask) == ("p1", mask)

    def test_cases_csv_may_name_a_scan_folder(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        (root / "north" / "cases.csv").write_text("file,patient,split\np1,p9,test\n")
        (case, *_) = load_federation(root).site("north").cases
        assert (case.patient, case.split) == ("p9", "test")

    def test_digest_depends_on_every_name_and_byte_of_a_scan_folder(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        before = load_federation(root).digest
        copied = shutil.copytree(root, tmp_path / "copy")
        (copied / "north" / "images" / "p1" / ".DS_Store").write_bytes(b"hidden")
        assert load_federation(copied).digest == before
        first = copied / "north" / "images" / "p1" / "000.png"
        first.rename(first.with_name("0000.png"))
        renamed = load_federation(copied).digest
        assert renamed != before
        first.with_name("0000.png").write_bytes(slices(volume_of("p2"))["000.png"])
        assert load_federation(copied).digest not in (before, renamed)

    def test_repeated_lists_a_scan_folder_shared_by_two_patients(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        images = root / "north" / "images"
        shutil.rmtree(images / "p2")
        shutil.copytree(images / "p1", images / "p2")
        assert load_federation(root).repeated == (("north/images/p1", "north/images/p2"),)

    def test_all_problems_of_scan_folders_are_listed(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "folder")
        (root / "north" / "images" / "p1" / "notes.txt").write_text("the left hip")
        (root / "north" / "masks" / "p2.nii.gz").unlink()
        # Two masks for one folder: neither is chosen.
        shutil.copy(root / "north" / "masks" / "p4.nii.gz", root / "north" / "masks" / "p4.nii")
        with pytest.raises(FederationError) as caught:
            load_federation(root)
        found = "\n".join(caught.value.problems)
        for expected in (
            "north/images/p1: stack: expected PNG slices, found notes.txt",
            "north/images/p2: no mask",
            "north/images/p4: no mask",
            "north/masks/p4.nii: no image",
            "north/masks/p4.nii.gz: no image",
        ):
            assert expected in found
        assert len(caught.value.problems) == 5

    def test_image_file_without_a_mask_of_the_same_name_is_rejected(self, tmp_path: Path) -> None:
        root = write_site(tmp_path / "site", "nifti")
        shutil.move(root / "north" / "masks" / "p1.nii.gz", root / "north" / "masks" / "other.nii.gz")
        with pytest.raises(FederationError, match=r"p1\.nii\.gz: no mask"):
            load_federation(root)


def test_class_folders_may_contain_scan_folders(tmp_path: Path) -> None:
    for index, patient in enumerate(PATIENTS):
        write_folder(tmp_path / "north" / ("dark", "light")[index % 2] / patient, volume_of(patient))
    federation = load_federation(tmp_path)
    assert federation.task.kind == "classification"
    cases = federation.site("north").cases
    assert [(case.name, case.label) for case in cases] == [
        ("dark/p1", 0), ("dark/p3.7", 0), ("light/p2", 1), ("light/p4", 1),
    ]  # fmt: skip
    data = SiteData.load(split_by_patient(federation.site("north"), seed=0), federation.task)
    assert sum(map(len, (data.train, data.val, data.test))) == 3 * len(PATIENTS)


class TestScanFiles:
    def test_scans_in_lists_files_and_recognised_folders_only(self, tmp_path: Path) -> None:
        write_folder(tmp_path / "p1", volume_of("p1"))
        write_folder(tmp_path / ".hidden", volume_of("p1"))
        write_folder(tmp_path / "nested" / "p1", volume_of("p1"))
        (tmp_path / "empty").mkdir()
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.png").write_text("not a PNG")
        (tmp_path / "any.txt").write_text("checked later")
        assert set(scans_in(tmp_path)) == {"p1", "any.txt"}
        assert scans_in(tmp_path / "none") == {}

    def test_scans_in_lists_no_folder_without_a_multi_file_format(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_folder(tmp_path / "p1", volume_of("p1"))
        monkeypatch.setattr(formats, "FORMATS", formats.FORMATS[:-1])
        assert scans_in(tmp_path) == {}

    def test_stem_of_removes_the_suffix_of_files_but_not_of_folders(self, tmp_path: Path) -> None:
        (tmp_path / "p1.zip").mkdir()
        stems = {name: stem_of(tmp_path / name) for name in ("p1.zip", "p2.zip", "a.nii.gz", "a.b.dat", "a")}
        assert stems == {"p1.zip": "p1.zip", "p2.zip": "p2", "a.nii.gz": "a", "a.b.dat": "a.b", "a": "a"}

    def test_content_digest_of_a_file_is_sha256_of_its_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abc")
        # FIPS 180-2, example B.1.
        expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert content_digest(read_content(tmp_path / "a")) == expected
        assert content_digest({"a": b"1", "b": b"2"}) == content_digest({"b": b"2", "a": b"1"})
        assert content_digest({"a": b"1", "b": b"2"}) != content_digest({"a": b"2", "b": b"1"})


class TestDicom:
    @pytest.mark.parametrize("form", ["folder", "zip"])
    @pytest.mark.parametrize("mask_form", ["seg", "rtstruct", "nifti", "dicom"])
    def test_dicom_cases_train_on_the_same_slices_as_nifti(
        self, tmp_path: Path, form: str, mask_form: str
    ) -> None:
        task = TASK | {"normalisation": {"method": "none"}}
        data = {}
        for each in ("dicom", "nifti"):
            root = tmp_path / each
            for part in ("images", "masks"):
                (root / "north" / part).mkdir(parents=True)
            (root / "task.yaml").write_text(yaml.safe_dump(task))
            for patient in PATIENTS:
                self.write(root / "north", patient, form, mask_form if each == "dicom" else None)
            site = load_federation(root).site("north")
            assert site.patients == PATIENTS
            data[each] = SiteData.load(split_by_patient(site, seed=0), load_federation(root).task)
        for split in ("train", "val", "test"):
            one, other = getattr(data["dicom"], split), getattr(data["nifti"], split)
            np.testing.assert_array_equal(one.images, other.images)
            np.testing.assert_array_equal(one.targets, other.targets)
            assert one.targets.any()

    @staticmethod
    def write(site: Path, patient: str, form: str, mask_form: str | None) -> None:
        """One case; `mask_form` None writes it as NIfTI by the affine of SimpleITK's reading."""
        volume = volume_of(patient).transpose(2, 1, 0).astype(np.int16)
        drawn = (volume == 200).astype(np.uint8)
        files = dicom_files.series(volume, dicom_files.turned(8))
        folder = site / "images" / patient
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        mask = site / "masks" / patient
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
        scan = reader.Execute()
        drawn_as_nifti = sitk.GetImageFromArray(drawn)
        drawn_as_nifti.CopyInformation(scan)
        if mask_form in (None, "nifti"):
            sitk.WriteImage(drawn_as_nifti, f"{mask}.nii.gz")
        elif mask_form == "seg":
            Path(f"{mask}.dcm").write_bytes(dicom_files.seg(files, drawn, "BINARY"))
        elif mask_form == "rtstruct":
            rois = {"BODY": [], "Bright": dicom_files.squares(files, drawn > 0)}
            Path(f"{mask}.dcm").write_bytes(dicom_files.rtstruct(files, rois))
        else:
            mask.mkdir()
            for name, content in dicom_files.series(drawn.astype(np.int16), dicom_files.turned(8)).items():
                (mask / name).write_bytes(content)
        if mask_form is None:
            shutil.rmtree(folder)
            sitk.WriteImage(scan, f"{folder}.nii.gz")
        elif form == "zip":
            shutil.rmtree(folder)
            folder.with_name(f"{patient}.zip").write_bytes(dicom_files.zipped(files))
