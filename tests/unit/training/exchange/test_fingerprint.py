"""A version that was made elsewhere gets a fingerprint of scans in folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.lens import FINGERPRINT, KINDS, Fingerprint, seen_of
from model_store.lens.features import LEVELS
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.store import Store
from model_store.task import Task
from service.kinds import adaptation_of
from tests.helpers.model_store.dicom_files import series
from tests.helpers.model_store.graphs import graph_of
from training.data.scan_files import read_scan
from training.exchange.__main__ import app

TASK = Task.model_validate(
    {
        "name": "organ",
        "labels": {"organ": [1]},
        "normalisation": {"scope": "volume", "method": "zscore"},
        "geometry": {"spacing": None, "patch": [16, 16, 16]},
        "patient": "(?P<patient>p[0-9]+)_",
    }
)


TWO = Task.model_validate(
    {
        **TASK.model_dump(exclude={"normalisation"}),
        "channels": [{"name": "T1"}, {"name": "FLAIR"}],
        "patient": None,
    }
)


def store_in(root: Path, task: Task = TASK) -> Artefact:
    manifest = ModelManifest(
        name="organ",
        task=task,
        network=NetworkSpec(name="graph", arguments={}),
        lineage=Lineage(method="imported", run="r", sites=(), rounds=0, seed=0, details={"form": "onnx"}),
    )
    return Store(root).publish(manifest, {WEIGHTS: b"", GRAPH: graph_of("a graph")})


def group(folder: Path, seed: int, patients: int = 3) -> Path:
    """Two scans of each patient."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(2 * patients):
        write(folder / f"p{number // 2}_{number % 2}.nii.gz", draw.gamma(2, 10, (20, 18, 16)))
    return folder


def write(path: Path, voxels: Any, side: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(voxels.astype(np.float32), np.diag([side, side, side, 1.0]))
    image.header.set_xyzt_units("mm")
    image.to_filename(path)


def channels(folder: Path, ends: tuple[str, str], patients: int = 3) -> Path:
    """A file of each channel, of one case of each patient."""
    draw = np.random.default_rng(7)
    for number in range(patients):
        for end in ends:
            write(folder / f"case{number}{end}.nii.gz", draw.gamma(2, 10, (20, 18, 16)))
    return folder


def run(store: Path, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fingerprint", *map(str, arguments), "--store", str(store)])
    return result.exit_code, result.output + str(result.exception or "")


def test_the_next_version_is_the_same_with_a_fingerprint(tmp_path: Path) -> None:
    first = store_in(tmp_path / "store")
    folders = [group(tmp_path / name, seed) for seed, name in enumerate(("north", "south", "west"))]
    code, said = run(tmp_path / "store", "organ", *folders)
    assert (code, said.split()[:2]) == (0, ["published", "organ@2"])
    made = Store(tmp_path / "store").open("organ@2").expect(ModelManifest)
    assert {name: made.read(name) for name in first.manifest.files} == {
        name: first.read(name) for name in first.manifest.files
    }
    assert made.manifest.lineage.parents == (first.digest,)
    assert made.manifest.lineage.details == {"form": "onnx", "fingerprint_of": [3, 3, 3]}
    groups = []
    for folder in folders:
        images = []
        for path in sorted(folder.iterdir()):
            prepared = prepare_for(TASK, read_scan(path))
            assert isinstance(prepared, PreparedVolume)
            images.append((path.name[:2], prepared.volume[None]))
        groups.append(seen_of(images))
    assert Fingerprint.model_validate_json(made.read(FINGERPRINT)) == Fingerprint.of(groups)


def test_one_folder_is_enough_and_every_place_says_that_it_was_one(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    folder = group(tmp_path / "north", 1, patients=4)
    code, said = run(tmp_path / "store", "organ", folder)
    assert code == 0
    assert f"{folder}: 4 patients\n" in said
    assert "one group: how far hospitals are apart is not known from it." in said
    assert "for 8.33 times the variance between its patients" in said
    made = Store(tmp_path / "store").open("organ@2").expect(ModelManifest)
    assert made.manifest.lineage.details["fingerprint_of"] == [4]
    found = Fingerprint.model_validate_json(made.read(FINGERPRINT))
    assert (found.members, found.factor) == (1, pytest.approx(25 / 3))
    adaptation = adaptation_of(made)
    assert adaptation is not None
    zeros = dict.fromkeys(KINDS, 0.0)
    result = {"lens": {"before": zeros, "after": zeros, "shares": zeros, "negated": False}}
    (section,) = adaptation.sections(result, ())
    assert section.sentences[1].startswith("This model knows the scans of one group alone")
    assert "8.333 times the variance between the patients" in section.sentences[1]


def test_of_several_folders_no_place_says_that_it_was_one(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / name, seed) for seed, name in enumerate(("north", "south"))]
    _, said = run(tmp_path / "store", "organ", *folders)
    assert "one group" not in said
    adaptation = adaptation_of(Store(tmp_path / "store").open("organ@2"))
    assert adaptation is not None
    zeros = dict.fromkeys(KINDS, 0.0)
    result = {"lens": {"before": zeros, "after": zeros, "shares": zeros, "negated": False}}
    (section,) = adaptation.sections(result, ())
    assert len(section.sentences) == 1


@pytest.mark.parametrize("patients", [(1,), (2,), (3, 1)])
def test_too_little_is_refused_in_words(tmp_path: Path, patients: tuple[int, ...]) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / str(seed), seed, count) for seed, count in enumerate(patients)]
    code, said = run(tmp_path / "store", "organ", *folders)
    assert code != 0
    assert f"{folders[-1]}: expected scans of 3 patients or more, found {patients[-1]}" in said
    assert Store(tmp_path / "store").open("organ").manifest.lineage.parents == ()


def test_equal_scans_say_nothing_of_a_spread(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    north = group(tmp_path / "north", 1)
    code, said = run(tmp_path / "store", "organ", north, copytree(north, tmp_path / "again"))
    assert code != 0
    assert "found the same scans" in said
    for number in range(1, 6):
        copyfile(north / "p0_0.nii.gz", north / f"p{number // 2}_{number % 2}.nii.gz")
    code, said = run(tmp_path / "store", "organ", north)
    assert code != 0
    assert "found the same of each" in said


@pytest.mark.parametrize("inside", ["", "images", "imagesTr"])
@pytest.mark.parametrize("ends", [("_T1", "_FLAIR"), ("_0000", "_0001")])
def test_channels_in_files_of_their_own_are_one_scan(
    tmp_path: Path, ends: tuple[str, str], inside: str
) -> None:
    store_in(tmp_path / "store", TWO)
    channels(tmp_path / "north" / inside, ends)
    if inside:
        write(tmp_path / "north" / inside.replace("images", "labels") / "case0.nii.gz", np.ones((20, 18, 16)))
    code, said = run(tmp_path / "store", "organ", tmp_path / "north")
    assert code == 0, said
    found = Fingerprint.model_validate_json(Store(tmp_path / "store").open("organ@2").read(FINGERPRINT))
    draw, means = np.random.default_rng(7), []
    for _ in range(3):
        volumes = [draw.gamma(2, 10, (20, 18, 16)).astype(np.float32) for _ in range(2)]
        means.append([np.quantile((each - each.mean()) / each.std(), LEVELS) for each in volumes])
    np.testing.assert_allclose(found.quantiles.mean_CE, np.mean(means, axis=0), atol=1e-4)
    assert found.quantiles.patient == pytest.approx(np.var(means, axis=0, ddof=1).mean(), rel=1e-3)


def test_patients_are_those_of_cases_csv(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    north = tmp_path / "north"
    north.mkdir()
    group(north / "images", 1)
    rows = [f"p{number // 2}_{number % 2}.nii.gz,{'ab'[number // 3]}" for number in range(6)]
    (north / "cases.csv").write_text("\n".join(["file,patient", *rows]))
    code, said = run(tmp_path / "store", "organ", north)
    assert code != 0
    assert "found 2, of 6 scans" in said
    # Beside the scans it is no scan.
    (north / "cases.csv").rename(north / "images" / "cases.csv")
    assert "found 2, of 6 scans" in run(tmp_path / "store", "organ", north / "images")[1]


def test_scans_of_many_sizes_are_compared_on_the_grid_of_the_feature(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    ramp = np.linspace(0, 1, 24)[:, None, None] * np.ones((1, 18, 12))
    for number, every in enumerate((1, 2, 4, 1)):
        noise = np.random.default_rng(number).normal(0, 0.01, ramp[::every].shape)
        write(tmp_path / "north" / f"p{number}_0.nii.gz", ramp[::every] + noise)
    code, said = run(tmp_path / "store", "organ", tmp_path / "north")
    assert code == 0, said
    found = Fingerprint.model_validate_json(Store(tmp_path / "store").open("organ@2").read(FINGERPRINT))
    (field,) = found.field.mean_CE.reshape(1, 6, 6, 6)
    # Along the ramp, whichever way the network's first axis points.
    steps = np.abs(np.diff(field, axis=0))
    np.testing.assert_allclose(steps, steps.mean(), rtol=0.1)


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        (lambda folder: (folder / "case1_FLAIR.nii.gz").unlink(), "'case1' has no file of FLAIR"),
        (lambda folder: write(folder / "scout.nii.gz", np.ones((4, 4, 4))), "scout.nii.gz: of no channel"),
        (
            lambda folder: write(folder / "case1_FLAIR.nii.gz", np.ones((20, 18, 15))),
            "case1.nii.gz: channel FLAIR is not on the grid of channel T1",
        ),
        (
            lambda folder: write(folder / "case2_T1.nii.gz", np.ones((20, 18, 16)), side=2.0),
            "case2.nii.gz: channel FLAIR is not on the grid of channel T1",
        ),
        (
            lambda folder: (folder / "case3_T1.nii.gz").symlink_to(folder / "nowhere"),
            "case3_T1.nii.gz: a link to",
        ),
    ],
)
def test_a_fault_of_channels_is_named(tmp_path: Path, spoiled: Callable[[Path], None], why: str) -> None:
    store_in(tmp_path / "store", TWO)
    spoiled(channels(tmp_path / "north", ("_T1", "_FLAIR")))
    code, said = run(tmp_path / "store", "organ", tmp_path / "north")
    assert code != 0
    assert why in said


def test_a_folder_without_scans_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    missing, bare, outer = tmp_path / "missing", tmp_path / "bare", tmp_path / "outer"
    bare.mkdir()
    for name in ("north", "south"):
        (outer / name).mkdir(parents=True)
    for folder, why in (
        (missing, "expected a folder with scans, found none"),
        (bare, "expected scans, in it or in images/ in it, found none"),
        (
            outer,
            "expected scans, in it or in images/ in it, found the folders north, south: name each",
        ),
    ):
        code, said = run(tmp_path / "store", "organ", folder)
        assert code != 0
        assert f"{folder}: {why}" in said
    (outer / "images").mkdir()
    (outer / "imagesTr").mkdir()
    assert "found the folders images, imagesTr for images" in run(tmp_path / "store", "organ", outer)[1]


def test_masks_among_the_scans_are_refused(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    north = group(tmp_path / "north", 1)
    write(north / "p0_seg.nii.gz", np.random.default_rng(1).integers(0, 3, (20, 18, 16)))
    code, said = run(tmp_path / "store", "organ", north)
    assert code != 0
    assert "p0_seg.nii.gz: expected a scan, found 3 different values, as masks have" in said


def test_a_picture_among_volumes_is_refused(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    north = group(tmp_path / "north", 1)
    picture = np.random.default_rng(1).integers(0, 255, (32, 32)).astype(np.uint8)
    Image.fromarray(picture).save(north / "p3_0.png")
    code, said = run(tmp_path / "store", "organ", north)
    assert code != 0
    assert "p3_0.png: " in said


def test_a_dicom_series_is_one_patient_in_a_folder_of_its_own_and_refused_as_loose_files(
    tmp_path: Path,
) -> None:
    task = TASK.model_copy(update={"geometry": None, "size": (16, 16), "patient": None})
    store_in(tmp_path / "store", task)
    draw = np.random.default_rng(2)
    for patient in range(3):
        folder = tmp_path / "north" / f"case{patient}"
        folder.mkdir(parents=True)
        for name, content in series(draw.gamma(2, 10, (5, 18, 16)).astype(np.int16)).items():
            (folder / name).write_bytes(content)
    code, said = run(tmp_path / "store", "organ", tmp_path / "north")
    assert (code, "3 patients" in said) == (0, True)
    code, said = run(tmp_path / "store", "organ", tmp_path / "north" / "case0")
    assert code != 0
    assert "found images of one DICOM series" in said


def test_a_file_that_is_no_scan_of_the_task_is_named(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / name, seed) for seed, name in enumerate(("north", "south"))]
    (folders[1] / "p9_0.nii.gz").write_bytes(b"no scan")
    code, said = run(tmp_path / "store", "organ", *folders)
    assert code != 0
    assert "p9_0.nii.gz" in said
