"""A cell of `dose` on the phantom, from training to what is served, and a classification of few pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.accuracy.dose.classification import Classifiers, Images
from benchmarks.accuracy.dose.experiment import PROFILES, TRAININGS, Dose
from benchmarks.accuracy.dose.hospital import LADDER, RUNGS
from benchmarks.accuracy.outside.federation import PHANTOM
from benchmarks.harness.experiment import Options
from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.data.federation import load_federation

TINY = {"rounds": 1, "width": 4, "batch_size": 8}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state = tmp_path_factory.mktemp("state")
    experiment = Dose(Options("smoke", data=state, state_dir=state, workers=0))
    cell = {**experiment.cells()[0], "rungs": ["0", "speckle"]}
    return {"cell": cell, "result": experiment.compute(cell, state / "work")}


def test_cells_are_every_hospital_by_both_trainings(tmp_path: Path) -> None:
    experiment = Dose(Options("smoke", data=tmp_path, state_dir=tmp_path, workers=0))
    cells = experiment.cells()
    assert len(cells) == PROFILES["smoke"].scanners * (len(TRAININGS) + 1)
    assert [cell["training"] for cell in cells if cell["part"] == "masks"] == ["before"] * 3
    assert {cell["set"] for cell in cells} == {PHANTOM}
    assert {cell["seed"] for cell in cells} == {3}


def test_a_cell_has_every_arm_on_every_rung(row: dict[str, Any]) -> None:
    result = row["result"]
    assert set(result["at"]) == {"0", "speckle"}
    assert row["cell"]["site"] not in result["home"]
    for at in result["at"].values():
        assert set(at["arms"]) == {"global", "patients", "auto", "by shift", *LADDER}
        assert len(at["cohorts"]) == 2
        assert all(0 <= cohort["dose"] <= 1 for cohort in at["cohorts"])
    assert {each["kind"] for each in result["at"]["0"]["planted"]} >= {
        *("a cohort of noise", "statistics of inverted scans", "shuffled weights", "one layer shuffled"),
    }
    assert result["at"]["speckle"]["planted"] == []


def test_auto_is_the_dose_where_both_halves_pass_and_the_parent_where_none_does(row: dict[str, Any]) -> None:
    for at in row["result"]["at"].values():
        passed = [not cohort["failed"] for cohort in at["cohorts"]]
        if all(passed):
            assert at["arms"]["auto"] == at["arms"]["by shift"]
        if not any(passed):
            assert at["arms"]["auto"][0] == 0


def test_a_cell_with_masks_never_scores_a_patient_with_one(tmp_path: Path) -> None:
    experiment = Dose(Options("smoke", data=tmp_path, state_dir=tmp_path, workers=0))
    [cell, *_] = [cell for cell in experiment.cells() if cell["part"] == "masks"]
    result = experiment.compute(cell, tmp_path / "work")
    at = result["at"]["0"]
    assert at["scored"] + max(map(int, at["masks"])) <= PROFILES["smoke"].phantoms
    assert "With masks of a few patients" in "\n".join(
        experiment.sections([{"cell": cell, "result": result}])
    )


def test_the_page_has_its_criteria(row: dict[str, Any], tmp_path: Path) -> None:
    experiment = Dose(Options("smoke", data=tmp_path, state_dir=tmp_path, workers=0))
    text = "\n".join(experiment.sections([row]))
    assert "## Criteria of what is served" in text
    assert "seven kinds |" in text


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for number, site in enumerate(("A", "B", "C")):
        for label, name in enumerate(("dark", "bright")):
            folder = tmp_path / "data" / site / name
            folder.mkdir(parents=True)
            for image in range(12):
                pixels = generator.integers(0, 120, (32, 32)) + 100 * label + 10 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"p{image // 2}_{image}.png")
    return tmp_path / "data"


def test_a_classification_is_scored_by_balanced_accuracy(pictures: Path, tmp_path: Path) -> None:
    task = Task(
        name="shade",
        kind="classification",
        class_names=("dark", "bright"),
        channels=1,
        size=(32, 32),
        patient=r"^(?P<patient>p\d+)_",
    )
    federation = load_federation(pictures, task)
    method = FedAvgConfig(rounds=1, width=4, batch_size=4).model_dump(mode="json")
    found = Classifiers(federation, tmp_path / "runs", method, 0).served("C", 3, ["0", "curve"])
    assert set(found["home"]) == {"A", "B"}
    for at in found["at"].values():
        assert 0 <= at["arms"]["global"] <= 1
        assert set(at["arms"]) == {*("global", "patients", "auto", "by shift"), *LADDER}


def test_balanced_accuracy_counts_each_class_alike(pictures: Path) -> None:
    import torch

    task = Task(
        name="shade", kind="classification", class_names=("dark", "bright"), channels=1, size=(32, 32)
    )
    federation = load_federation(pictures, task)
    images = Images.load(federation.site("A").cases, task)

    class Always(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1.0, 0.0]]).repeat(len(batch), 1)

    few = Images(images.images[:13], images.classes[:13], images.patients[:13])
    assert few.classes.tolist() == [0] * 12 + [1]
    assert few.balanced_accuracy(Always()) == 0.5
    assert RUNGS[:4] == ("0", "1", "2", "3")
    assert replace(few).thinned(4).images.shape[0] == 4
