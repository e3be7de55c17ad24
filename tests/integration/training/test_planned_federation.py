"""`training.federate --plan`, run as a user runs it: plan, train, edit the plan, train by it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from model_store.store import Store
from model_store.task import Task
from tests.helpers.training.ct_volumes import write_volumes
from training.exit_codes import FAILED
from training.federate import federate

app = typer.Typer()
app.command()(federate)
SITES = dict.fromkeys(("aster", "birch"), (5, (2.0, 2.0, 2.5)))
TINY = {"rounds": 1, "least_steps": 1}


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the overlays: they are drawn in separate processes, which take seconds to start."""
    monkeypatch.setattr("training.report.write_site_pages", lambda result, folder: {})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_volumes(tmp_path / "organ", SITES, shape=(24, 20, 20))


def run(data: Path, place: Path, *more: object) -> Result:
    command = ("--method", "fedavg", "--data", data, "--out", place / "store", "--run", place / "run")
    return CliRunner().invoke(app, [str(word) for word in (*command, "--workers", 0, *more)])


def test_a_folder_and_one_word_make_a_federation_of_volumes_that_can_be_edited(data, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump({"method": TINY}))
    first = run(data, tmp_path / "one", "--plan", "--config", config)
    assert first.exit_code == 0, first.output
    folder = tmp_path / "one" / "run"
    planned = Task.load(folder / "task.yaml")
    assert planned.geometry is not None
    artefact = Store(tmp_path / "one" / "store").open("organ")
    assert artefact.manifest.task == planned
    record = json.loads((folder / "record.json").read_text())
    assert record["details"]["plan"]["sites"] == ["aster", "birch"]
    assert record["config"]["network_arguments"] == record["details"]["plan"]["options"]["network_arguments"]

    again = run(data, tmp_path / "one", "--plan", "--config", config, "--resume")
    assert again.exit_code == 0, again.output
    assert Store(tmp_path / "one" / "store").open("organ").digest == artefact.digest

    # By hand: half of the patch, and the network that follows from it.
    content = yaml.safe_load((folder / "task.yaml").read_text())
    content["geometry"]["patch"] = [16, 16, 16]
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(content))
    edited = run(data, tmp_path / "two", "--task", tmp_path / "task.yaml", "--config", config)
    assert edited.exit_code == 0, edited.output
    task = Store(tmp_path / "two" / "store").open("organ").manifest.task
    assert task.input_shape == (16, 16, 16)
    assert task.labels == planned.labels


def test_plan_of_too_few_patients_says_what_to_do(data, tmp_path):
    for site in SITES:
        for part in ("images", "masks"):
            for path in sorted((data / site / part).iterdir())[2:]:
                path.unlink()
    failed = run(data, tmp_path / "run", "--plan")
    assert failed.exit_code == FAILED
    assert "no site tells what its volumes are like" in failed.output
    assert "site 'birch': it has fewer than 3 training patients" in failed.output
    assert "give it with --task in place of --plan" in " ".join(failed.output.split())


def test_budget_that_is_none_is_named(data, tmp_path):
    failed = run(data, tmp_path / "run", "--plan", "--budget", "huge")
    assert failed.exit_code == FAILED
    assert "found 'huge'" in failed.output
