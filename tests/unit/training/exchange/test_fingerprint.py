"""A version that was made elsewhere gets a fingerprint of scans in folders."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile, copytree

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.lens import FINGERPRINT, KINDS, Fingerprint, seen_of
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.store import Store
from model_store.task import Task
from service.kinds import adaptation_of
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


def store_in(root: Path) -> Artefact:
    manifest = ModelManifest(
        name="organ",
        task=TASK,
        network=NetworkSpec(name="graph", arguments={}),
        lineage=Lineage(method="imported", run="r", sites=(), rounds=0, seed=0, details={"form": "onnx"}),
    )
    return Store(root).publish(manifest, {WEIGHTS: b"", GRAPH: graph_of("a graph")})


def group(folder: Path, seed: int, patients: int = 3) -> Path:
    """Two scans of each patient."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(2 * patients):
        image = nib.Nifti1Image(draw.gamma(2, 10, (20, 18, 16)).astype(np.float32), np.eye(4))
        image.header.set_xyzt_units("mm")
        image.to_filename(folder / f"p{number // 2}_{number % 2}.nii.gz")
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


def test_a_file_that_is_no_scan_of_the_task_is_named(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / name, seed) for seed, name in enumerate(("north", "south"))]
    (folders[1] / "p9_0.nii.gz").write_bytes(b"no scan")
    code, said = run(tmp_path / "store", "organ", *folders)
    assert code != 0
    assert "p9_0.nii.gz" in said
