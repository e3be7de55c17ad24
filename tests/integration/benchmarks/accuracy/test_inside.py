from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.accuracy.inside.experiment import Experiment, Profile, cells_of
from model_store.task import Task
from training.data.federation import load_federation

SETTINGS = Profile(32, 2, 1, 1, method={"width": 2, "rounds": 2, "batch_size": 4})
PATIENTS = ("a", "b", "c", "d")


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """Two sites of four patients with two images each: a bright square, brighter at the second site."""
    root = tmp_path / "squares"
    generator = np.random.default_rng(0)
    for site, brightness in (("east", 90), ("west", 160)):
        for name in ("images", "masks"):
            (root / site / name).mkdir(parents=True)
        for patient in PATIENTS:
            for number in (0, 1):
                mask = np.zeros((24, 24), np.uint8)
                row, column = generator.integers(2, 12, size=2)
                mask[row : row + 8, column : column + 8] = 1
                image = generator.integers(0, 60, size=mask.shape) + brightness * mask
                Image.fromarray(image.astype(np.uint8)).save(
                    root / site / "images" / f"{patient}_{number}.png"
                )
                Image.fromarray(mask).save(root / site / "masks" / f"{patient}_{number}.png")
    task = Task(name="squares", labels={"square": (1,)}, size=(32, 32), patient="^(?P<patient>[a-z])_")
    task.dump(root / "task.yaml")
    return root


def test_a_federation_cell_tests_each_patient_of_its_fold_with_every_arm(
    federation: Path, tmp_path: Path
) -> None:
    cells = cells_of("toy", SETTINGS, SETTINGS.method)
    assert [(c["trained"], c["fold"]) for c in cells] == [
        ("federation", 0),
        ("federation", 1),
        ("local-only", 0),
        ("local-only", 1),
    ]
    result = Experiment(load_federation(federation), "cpu", workers=2)(cells[0], tmp_path / "work")
    assert set(result["dice"]) == {"global", "personal", "fine-tuned"}
    for arm, sites in result["dice"].items():
        assert set(sites) == {"east", "west"}, arm
        for patients in sites.values():
            assert len(patients) == 2
            assert set(patients) < set(PATIENTS)
            assert all(value is None or 0 <= value <= 1 for value in patients.values())
    # Rounds 0, 1 and the last one are validated; fine-tuning begins where the chosen global model stands.
    for site in ("east", "west"):
        curve = result["curves"]["global"][site]
        assert len(curve) == 3
        assert result["curves"]["fine-tuned"][site][0] == curve[result["global_round"]]
        assert len(result["curves"]["personal"][site]) == 2


def test_a_local_cell_trains_each_site_alone(federation: Path, tmp_path: Path) -> None:
    cell = cells_of("toy", SETTINGS, SETTINGS.method)[3]
    result = Experiment(load_federation(federation), "cpu", workers=1)(cell, tmp_path / "work")
    assert set(result["dice"]) == {"local-only"}
    assert {site: len(patients) for site, patients in result["dice"]["local-only"].items()} == {
        "east": 2,
        "west": 2,
    }
    runs = sorted(path.name for path in (tmp_path / "work").iterdir())
    assert runs == ["local-east", "local-west"]
