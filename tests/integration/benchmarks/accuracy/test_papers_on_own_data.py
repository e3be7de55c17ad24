"""The papers' tables on one's own data: --data is a folder with task.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.harness.cells import Row, Rows
from benchmarks.harness.experiment import RESULTS
from model_store.task import Task
from training.phantom import write_federation

SITES = ("aster", "birch", "cedar")
SEGMENTATIONS = ("paper-iop-fl", "paper-fedoap")
CLASSIFICATIONS = ("paper-fedins", "paper-fedbicross")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("own") / "kidneys", SITES, 3, 32)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, brighter from one to the next."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    task = Task(name="cells", kind="classification", class_names=("a", "b", "c"), channels=1, size=(28, 28))
    task.dump(root / "task.yaml")
    arrays: dict[str, Any] = {}
    for split, count in (("train", 240), ("val", 48), ("test", 96)):
        labels = draw.integers(3, size=(count, 1))
        arrays[f"{split}_labels"] = labels
        noise = draw.integers(0, 60, size=(count, 28, 28))
        arrays[f"{split}_images"] = (noise + 60 * labels[..., None]).astype(np.uint8)
    np.savez(root / "cells.npz", **arrays)
    return root


def start(name: str, data: Path, folder: Path, *options: str) -> Result:
    command = ["run", name, "--profile", "smoke", "--data", str(data), "--state-dir", str(folder / "state")]
    return CliRunner().invoke(app, [*command, "--workers", "0", *options])


def run(name: str, data: Path, folder: Path, *only: str) -> tuple[list[Row], str]:
    """The rows and the page after a run of the smoke profile in `folder`."""
    rows = folder / "table.jsonl"
    chosen = [text for each in only for text in ("--only", each)]
    answer = start(name, data, folder, "--rows", str(rows), *chosen)
    assert answer.exit_code == 0, answer.output
    return Rows(rows).read(), rows.with_suffix(".md").read_text()


def refusal(name: str, data: Path, folder: Path, *options: str) -> str:
    """The message of a run that its options do not allow, in one line."""
    answer = start(name, data, folder, *options)
    assert answer.exit_code == 2, answer.output
    return " ".join(answer.output.replace("│", " ").split())


def test_iop_fl_trains_on_own_sites_and_leaves_each_out(federation: Path, tmp_path: Path) -> None:
    rows, page = run("paper-iop-fl", federation, tmp_path, "arm=FedAvg", "part=*side")
    assert [row["cell"].get("site") for row in rows] == [None, *SITES]
    assert set(rows[0]["result"]["sites"]) == set(SITES)
    assert {row["cell"]["set"] for row in rows} == {"kidneys"}
    assert "## Inside: kidneys" in page
    assert "## Outside: kidneys" in page
    assert "The set is `kidneys`" in page
    assert "glioma" not in page


def test_iop_fl_leaves_no_site_out_of_two(tmp_path: Path) -> None:
    two = write_federation(tmp_path / "two", SITES[:2], 2, 32)
    rows, page = run("paper-iop-fl", two, tmp_path, "arm=FedAvg")
    assert [row["cell"]["part"] for row in rows] == ["inside"]
    assert "## Outside" not in page


def test_fedoap_trains_on_own_sites(federation: Path, tmp_path: Path) -> None:
    rows, page = run("paper-fedoap", federation, tmp_path, "arm=FedOAP")
    assert [row["cell"]["arm"] for row in rows] == ["FedOAP"]
    assert set(rows[0]["result"]["sites"]) == set(SITES)
    assert "bladder" not in page


@pytest.mark.parametrize(
    ("name", "arm"), [("paper-fedins", "FedAvg"), ("paper-fedbicross", "FedAvg-1")], ids=CLASSIFICATIONS
)
def test_own_images_are_divided_among_clients(name: str, arm: str, images: Path, tmp_path: Path) -> None:
    rows, page = run(name, images, tmp_path, f"arm={arm}", "part=comparison")
    assert [row["cell"]["set"] for row in rows] == ["cells"]
    assert len(rows[0]["result"]["sites"]) == rows[0]["cell"]["clients"]
    assert "## Comparison: cells" in page
    assert "X-rays" not in page


def test_changed_images_are_other_rows_and_runs(images: Path, tmp_path: Path) -> None:
    run("paper-fedbicross", images, tmp_path, "arm=FedAvg-1", "part=comparison")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "task.yaml").write_bytes((images / "task.yaml").read_bytes())
    with np.load(images / "cells.npz") as arrays:
        np.savez(changed / "cells.npz", **{**arrays, "train_images": 255 - arrays["train_images"]})
    rows, _ = run("paper-fedbicross", changed, tmp_path, "arm=FedAvg-1", "part=comparison")
    assert len({row["cell"]["data"] for row in rows}) == 2
    assert len([*(tmp_path / "state/papers").iterdir()]) == 2


@pytest.mark.parametrize("rows", [(), ("--rows", str(RESULTS / "own.jsonl"))], ids=["none", "recorded"])
@pytest.mark.parametrize("name", [*SEGMENTATIONS, *CLASSIFICATIONS])
def test_own_data_need_rows_outside_the_recorded_tables(
    name: str, rows: tuple[str, ...], federation: Path, tmp_path: Path
) -> None:
    message = refusal(name, federation, tmp_path, *rows)
    assert "--rows: expected a file outside docs/results" in message
    assert not (RESULTS / "own.jsonl").exists()


@pytest.mark.parametrize("name", [*SEGMENTATIONS, *CLASSIFICATIONS])
def test_a_folder_with_neither_kind_of_data_is_refused(name: str, tmp_path: Path) -> None:
    message = refusal(name, tmp_path, tmp_path, "--rows", str(tmp_path / "table.jsonl"))
    assert "--data: expected the folder with" in message
    assert "task.yaml" in message


@pytest.mark.parametrize("name", CLASSIFICATIONS)
def test_a_segmentation_is_refused_where_images_have_classes(
    name: str, federation: Path, tmp_path: Path
) -> None:
    message = refusal(name, federation, tmp_path, "--rows", str(tmp_path / "table.jsonl"))
    assert "expected one .npz" in message or "needs a task of kind classification" in message


@pytest.mark.parametrize("name", SEGMENTATIONS)
def test_a_classification_is_refused_where_images_have_masks(name: str, images: Path, tmp_path: Path) -> None:
    message = refusal(name, images, tmp_path, "--rows", str(tmp_path / "table.jsonl"))
    assert "needs a task of kind segmentation, found classification" in message


@pytest.mark.parametrize("name", SEGMENTATIONS)
def test_too_few_patients_are_refused_with_the_sites_name(name: str, tmp_path: Path) -> None:
    few = write_federation(tmp_path / "few", SITES, 1, 32)
    message = refusal(name, few, tmp_path, "--rows", str(tmp_path / "table.jsonl"))
    assert "site 'aster': expected at least 2 patients" in message


def test_images_of_a_size_that_the_patches_do_not_fit_are_refused(images: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "cells.npz").write_bytes((images / "cells.npz").read_bytes())
    Task.load(images / "task.yaml").model_copy(update={"size": (32, 32)}).dump(own / "task.yaml")
    message = refusal("paper-fedins", own, tmp_path, "--rows", str(tmp_path / "table.jsonl"))
    assert (
        "patches of 14 pixels do not fill images of 32x32; the nearest sizes are 28x28 and 42x42" in message
    )
