from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from model_store.errors import TaskError
from model_store.task import Task
from training import tasks
from training.data.classification import Partition
from training.data.federation import load_federation


def few_files(root: Path, target: Path, sites: tuple[str, ...], count: int = 6) -> Path:
    """A federation of links to the first files of each site. A site may be given as a path."""
    for site in sites:
        source = root / site
        masks = next(source / name for name in ("masks", "labels") if (source / name).is_dir())
        for part, folder in (("images", source / "images"), ("masks", masks)):
            to = target / source.name / part
            to.mkdir(parents=True)
            for path in sorted(folder.iterdir())[:count]:
                (to / path.name).symlink_to(path)
    return target


REAL = {
    "brain_lgg_flair": tuple(f"brain_lgg_flair/{site}" for site in ("CS", "DU", "FG", "HT")),
    "retina_vessels": tuple(f"retina_vessels/{s}" for s in ("DRIVE", "CHASE_DB1", "STARE", "VEVIO_frames")),
    "fundus_disc_cup": ("fundus_disc_cup/Drishti_GS_roi", "fundus_disc_cup/ORIGA_roi"),
    "bladder_mri": ("tumour_organs/bladder_mri",),
    "tumour_any_organ": (
        "tumour_organs/bladder_mri",
        "tumour_organs/skin_dermoscopy",
        "tumour_organs/brain_mri_t1ce",
        "tumour_organs/breast_dce_mri",
        "breast_ultrasound/BUSI_tumour",
        "brain_lgg_flair/HT",
    ),
    "breast_ultrasound": ("breast_ultrasound/BUSI_tumour",),
    "wbc_cells": ("wbc_cells/Dataset1", "wbc_cells/Dataset2"),
    "hippocampus_nifti": ("hippocampus_nifti",),
    "lungs_cxr": tuple(f"lungs_cxr/{site}" for site in ("JSRT", "Montgomery", "Shenzhen")),
}


ARRAYS = {"pneumoniamnist": (4708 + 524 + 624, 2), "wbc5_28_shift": (270 + 30 + 100, 5)}


def test_template_names_cover_every_data_set() -> None:
    assert set(tasks.names()) == {*REAL, *ARRAYS, "polyp_centres"}


def test_template_fits_the_frames_of_three_hospitals(real_data: Path, tmp_path: Path) -> None:
    for frame in (real_data / "polyp_centres").glob("*/*/*[05].jpg"):
        copy = tmp_path / frame.relative_to(real_data / "polyp_centres").with_suffix(".png")
        copy.parent.mkdir(parents=True, exist_ok=True)
        Image.open(frame).save(copy)  # Locum refuses JPEG
    federation = load_federation(tmp_path, tasks.template("polyp_centres"))
    assert federation.names == ("C_A", "C_B", "C_C")
    # Frames of one sequence are one patient.
    negatives = [case.patient for site in federation.sites for case in site.cases if case.label == 0]
    assert len(set(negatives)) < 30 < len(negatives)


@pytest.mark.parametrize("name", ARRAYS)
def test_template_fits_the_real_arrays(name: str, real_data: Path) -> None:
    path = real_data / "medmnist_npz" / f"{name}.npz"
    federation = load_federation(path, tasks.template(name), Partition(clients=3, alpha=1.0))
    images, classes = ARRAYS[name]
    assert sum(len(site.cases) for site in federation.sites) == images
    assert len(federation.task.classes) == classes


@pytest.mark.parametrize("name", REAL)
def test_template_fits_the_real_data_set(name: str, real_data: Path, tmp_path: Path) -> None:
    root = few_files(real_data, tmp_path, REAL[name])
    federation = load_federation(root, tasks.template(name))
    assert len(federation.sites) == len(REAL[name])


@pytest.mark.parametrize(
    ("name", "stem", "patient"),
    [
        ("brain_lgg_flair", "TCGA_CS_4941_19960909_7", "TCGA_CS_4941"),
        ("brain_lgg_flair", "TCGA_HT_A61A_20000127_43", "TCGA_HT_A61A"),
        ("polyp_centres", "seq1_seq1-img10", "seq1"),
        ("polyp_centres", "pos100_img100", "pos100"),
        ("retina_vessels", "Image_01L", "Image_01"),
        ("retina_vessels", "Image_01R", "Image_01"),
        ("retina_vessels", "neo11od1", "neo11"),
        ("retina_vessels", "drive_01", "drive_01"),
        ("retina_vessels", "im0077", "im0077"),
        ("bladder_mri", "1046", "10"),
        ("bladder_mri", "1281", "12"),
        ("bladder_mri", "1395", "1"),
        ("bladder_mri", "1403", "1"),
        ("bladder_mri", "12043", "120"),
        ("tumour_any_organ", "1281", "12"),
        ("tumour_any_organ", "1403", "1"),
        ("tumour_any_organ", "132131", "13"),
        ("tumour_any_organ", "137675", "13"),
        ("tumour_any_organ", "4587", "4587"),
        ("tumour_any_organ", "3001", "3001"),
        ("tumour_any_organ", "IMD002", "IMD002"),
        ("tumour_any_organ", "TCGA_HT_7692_19960724_10", "TCGA_HT_7692"),
        ("breast_ultrasound", "benign_97", "benign_97"),
    ],
)
def test_template_patient_pattern_parses_the_patient(name: str, stem: str, patient: str) -> None:
    assert tasks.template(name).patient_of(stem) == patient


@pytest.mark.parametrize("name", ["bladder_mri", "tumour_any_organ"])
@pytest.mark.parametrize(
    ("first", "last"),
    # Runs of consecutive slices in the bladder set.
    [
        *((1043, 1046), (1110, 1120), (1203, 1208), (1249, 1281), (1326, 1348), (1349, 1381)),
        *((1395, 1416), (1486, 1522), (1554, 1583), (1626, 1632), (1666, 1679), (1689, 1732)),
    ],
)
def test_consecutive_bladder_slices_belong_to_one_patient(name: str, first: int, last: int) -> None:
    task = tasks.template(name)
    assert len({task.patient_of(str(number)) for number in range(first, last + 1)}) == 1


def test_template_labels_nest_as_documented() -> None:
    fundus = tasks.template("fundus_disc_cup")
    assert [c.labels for c in fundus.classes] == [(), ("disc",), ("disc", "cup")]
    tumour = tasks.template("tumour_any_organ")
    assert tumour.lookup()[[0, 1, 2, 255]].tolist() == [0, 0, 1, 1]
    assert tumour.lookup()[3] == -1


def test_resolve_reads_a_file_or_a_template_and_rejects_unknown_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    tasks.template("wbc_cells").model_copy(update={"name": "mine"}).dump(path)
    assert tasks.resolve(str(path)).name == "mine"
    assert tasks.resolve("wbc_cells").name == "wbc-cells"
    with pytest.raises(TaskError, match="no template 'wbc'; expected one of bladder_mri, brain_lgg_flair"):
        tasks.resolve("wbc")
    with pytest.raises(TaskError, match="no such file"):
        tasks.resolve(str(tmp_path / "absent.yaml"))


class TestCommand:
    """`python -m training.tasks`."""

    def test_command_lists_every_template(self) -> None:
        result = CliRunner().invoke(tasks.app, [], env={"COLUMNS": "120"})
        assert result.exit_code == 0
        assert all(name in result.output for name in tasks.names())
        assert "disc {1, 2}, cup {2}" in result.output

    def test_show_prints_a_loadable_task(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(tasks.app, ["show", "hippocampus_nifti"])
        (tmp_path / "task.yaml").write_text(result.output)
        assert Task.load(tmp_path / "task.yaml") == tasks.template("hippocampus_nifti")

    def test_write_does_not_overwrite_without_force(self, tmp_path: Path) -> None:
        runner = CliRunner()
        assert runner.invoke(tasks.app, ["write", "wbc_cells", str(tmp_path)]).exit_code == 0
        assert Task.load(tmp_path / "task.yaml") == tasks.template("wbc_cells")
        again = runner.invoke(tasks.app, ["write", "bladder_mri", str(tmp_path)])
        assert again.exit_code == 1
        assert "--force" in again.output
        assert Task.load(tmp_path / "task.yaml").name == "wbc-cells"
        assert runner.invoke(tasks.app, ["write", "bladder_mri", str(tmp_path), "--force"]).exit_code == 0
        assert Task.load(tmp_path / "task.yaml").name == "bladder-mri"

    @pytest.mark.parametrize("arguments", [["show", "nothing"], ["write", "nothing", "."]])
    def test_unknown_template_exits_with_an_error(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(tasks.app, arguments)
        assert result.exit_code == 1
        assert "no template 'nothing'" in result.output

    def test_write_to_an_absent_folder_exits_with_an_error(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(tasks.app, ["write", "wbc_cells", str(tmp_path / "absent")])
        assert result.exit_code == 1
        assert "not a folder" in result.output
