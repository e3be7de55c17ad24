from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.cells import Row, Rows
from model_store.task import Task

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


def run(federation: Path, folder: Path, *options: str) -> tuple[list[Row], str]:
    """The rows and the page after a run of the smoke profile in `folder`."""
    rows = folder / "inside.jsonl"
    command = ["run", "inside", "--profile", "smoke", "--data", str(federation), "--rows", str(rows)]
    answer = CliRunner().invoke(app, [*command, "--state-dir", str(folder / "state"), *options])
    assert answer.exit_code == 0, answer.output
    return Rows(rows).read(), rows.with_suffix(".md").read_text()


def test_a_federation_cell_tests_each_patient_of_its_fold_with_every_arm(
    federation: Path, tmp_path: Path
) -> None:
    chosen = ("--only", "trained=federation", "--only", "fold=0")
    [row], page = run(federation, tmp_path, *chosen, "--workers", "2")
    assert (row["cell"]["trained"], row["cell"]["seed"], row["cell"]["fold"]) == ("federation", 0, 0)
    result = row["result"]
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
    assert "1 of federation" in page
    assert f"python -m benchmarks run inside --profile smoke --data {federation}" in page

    # A run that was made again computes nothing; a changed method makes another cell, shown as a try.
    before = Rows(tmp_path / "inside.jsonl").path.read_bytes()
    assert run(federation, tmp_path, *chosen) == ([row], page)
    assert Rows(tmp_path / "inside.jsonl").path.read_bytes() == before
    rows, page = run(federation, tmp_path, *chosen, "--set", "method.tau=0.5")
    assert len(rows) == 2
    assert rows[1]["cell"]["method"]["tau"] == 0.5
    assert "## Try: tau = 0.5" in page


def test_a_local_cell_trains_each_site_alone(federation: Path, tmp_path: Path) -> None:
    [row], _ = run(federation, tmp_path, "--only", "trained=local*", "--only", "fold=1")
    assert set(row["result"]["dice"]) == {"local-only"}
    assert {site: len(patients) for site, patients in row["result"]["dice"]["local-only"].items()} == {
        "east": 2,
        "west": 2,
    }
    assert set(row["result"]["curves"]["local-only"]) == {"east", "west"}
