from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy.one_shot.arms import ARMS, FOR_ANYBODY, compute
from benchmarks.accuracy.one_shot.experiment import Profile, cells_of
from benchmarks.accuracy.one_shot.report import sections

TINY = Profile(
    1,
    clients=3,
    method={
        "width": 2,
        "local_epochs": 1,
        "personal_epochs": 1,
        "probes": 4,
        "epochs": 1,
        "steps": 2,
        "synthesis_batch": 4,
        "outer_steps": 1,
        "min_silhouette": -1,  # several clusters, whatever these little models say to noise
    },
)
CELLS = cells_of("toy", TINY, ["pneumoniamnist"], [0.5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz of two classes, dark and bright, under the name of a set that has a template."""
    folder = tmp_path_factory.mktemp("npz")
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 48), ("val", 8), ("test", 16)):
        labels = draw.integers(2, size=(count, 1))
        noise = draw.integers(0, 60, size=(count, 28, 28))
        arrays[f"{split}_labels"] = labels
        arrays[f"{split}_images"] = (noise + 150 * labels[..., None]).astype(np.uint8)
    np.savez(folder / "pneumoniamnist.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The result of a cell, and the folder of its checkpoints."""
    work = tmp_path_factory.mktemp("work")
    return compute(folder, "cpu", CELLS[0], work), work


def test_a_cell_has_every_arm_on_every_test_image_and_the_page_says_so(
    folder: Path, finished: tuple[dict[str, Any], Path]
) -> None:
    result, _ = finished
    truth = np.load(folder / "pneumoniamnist.npz")["test_labels"][:, 0]
    assert result["labels"] == "".join(map(str, truth))
    assert set(result["owners"]) <= {"0", "1", "2", "3"}
    assert set(result["own"]) == set(result["right"]) == set(ARMS)
    for arm in ARMS:
        own, right = result["own"][arm], result["right"][arm]
        assert [said == "-" for said in own] == [owner == "0" for owner in result["owners"]]
        # Where the owner's model is right, at least one of three is; where it is wrong, at most two are.
        for said, label, count in zip(own, result["labels"], right, strict=True):
            if said != "-":
                assert (int(count) >= 1) if said == label else (int(count) <= 2), arm
    # One model for everybody: all are right about an image, or none.
    for arm in FOR_ANYBODY:
        assert set(result["right"][arm]) <= {"0", "3"}

    found = result["clusters"]["mixing"]
    assert len(found) == len(set(result["clusters"]["assignment"].values())) == 2
    assert all(sum(row.values()) == pytest.approx(1) for row in found.values())
    outside = result["outside"]
    assert sum(outside["images"]) + sum(map(sum, result["clients"].values())) <= 48 + 8 + 16
    assert [entry["step"] for entry in result["synthesis"]] == [2]
    assert set(outside["accuracies"]) == set(found)
    assert set(outside["picked"].values()) <= set(found)

    text = "\n".join(sections([{"cell": CELLS[0], "result": result}], CELLS))
    for arm in ARMS:
        assert text.count(f"\n| {arm} ") >= 4  # both measures on both distributions
    assert "1 of 1 cells" in text


def test_a_cell_that_was_killed_goes_on_to_the_same_result(
    folder: Path, finished: tuple[dict[str, Any], Path]
) -> None:
    result, work = finished
    trained = [
        work / run / "checkpoint.json" for run in ("uploads", "whole", "unclustered", "flat", "literal")
    ]
    before = [path.stat().st_mtime_ns for path in trained]
    assert compute(folder, "cpu", CELLS[0], work) == result
    assert [path.stat().st_mtime_ns for path in trained] == before
