"""A version that was made elsewhere gets a fingerprint of scans in folders."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.lens import FINGERPRINT, Fingerprint, seen_of
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.store import Store
from model_store.task import Task
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


@pytest.mark.parametrize(
    ("patients", "why"),
    [((3,), "expected 2 folders or more"), ((3, 1), "expected scans of 2 patients or more, found 1")],
)
def test_too_little_is_refused_in_words(tmp_path: Path, patients: tuple[int, ...], why: str) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / str(seed), seed, count) for seed, count in enumerate(patients)]
    code, said = run(tmp_path / "store", "organ", *folders)
    assert code != 0
    assert why in said


def test_a_file_that_is_no_scan_of_the_task_is_named(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    folders = [group(tmp_path / name, seed) for seed, name in enumerate(("north", "south"))]
    (folders[1] / "p9_0.nii.gz").write_bytes(b"no scan")
    code, said = run(tmp_path / "store", "organ", *folders)
    assert code != 0
    assert "p9_0.nii.gz" in said
