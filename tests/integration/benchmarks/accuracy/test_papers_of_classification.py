from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.accuracy.papers import fedbicross, fedins
from benchmarks.accuracy.papers.classification import MOST_FREQUENT, Clients
from benchmarks.harness.cells import Row, Rows
from benchmarks.harness.experiment import Options
from training.local.images import Images

SET = "wbc5_28_shift"
CLASSES = 5
CLIENTS = [f"client-{number}" for number in range(1, 6)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz of five classes, brighter from one to the next, under the name of a set with a template."""
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "medmnist_npz").mkdir()
    arrays: dict[str, Any] = {}
    for split, count in (("train", 240), ("val", 48), ("test", 96)):
        labels = draw.integers(CLASSES, size=(count, 1))
        noise = draw.integers(0, 60, size=(count, 28, 28, 3))
        arrays[f"{split}_labels"] = labels
        arrays[f"{split}_images"] = (noise + 40 * labels[..., None, None]).astype(np.uint8)
    np.savez(root / "medmnist_npz" / f"{SET}.npz", **arrays)
    return root


def run(name: str, data: Path, folder: Path, *only: str) -> tuple[list[Row], str]:
    """The rows and the page after a run of the smoke profile in `folder`."""
    rows = folder / "table.jsonl"
    command = ["run", name, "--profile", "smoke", "--data", str(data), "--rows", str(rows)]
    options = [text for each in only for text in ("--only", each)]
    answer = CliRunner().invoke(app, [*command, "--state-dir", str(folder / "state"), *options])
    assert answer.exit_code == 0, answer.output
    return Rows(rows).read(), rows.with_suffix(".md").read_text()


def tables(name: str, data: Path, folder: Path) -> tuple[list[Row], str]:
    """Both of a paper's tables, without the studies."""
    run(name, data, folder, "part=comparison")
    return run(name, data, folder, "part=ablation")


def costs(rows: list[Row]) -> dict[str, dict[str, float]]:
    return {row["cell"]["arm"]: row["result"]["cost"] for row in rows}


def check_scores(rows: list[Row]) -> None:
    """Every arm is scored on the same own test images, and on all."""
    tested = [{site: set(found["ours"]) for site, found in row["result"]["sites"].items()} for row in rows]
    assert all(each == tested[0] for each in tested)
    assert sorted(tested[0]) == CLIENTS
    for row in rows:
        for found in row["result"]["sites"].values():
            assert set(found["ours"].values()) <= {0, 1}
            assert 0 <= found["paper"] <= 1


def test_fedins_every_arm_tunes_the_same_network(data: Path, tmp_path: Path) -> None:
    rows, page = tables("paper-fedins", data, tmp_path)
    arms = [arm for part in ("comparison", "ablation") for arm in fedins.ARMS[part]]
    # Without a published network all arms adapt all blocks.
    assert [row["cell"]["arm"] for row in rows] == [arm.name for arm in arms if arm.name != fedins.ALL_BLOCKS]
    check_scores(rows)
    found = costs(rows)
    # A pool is sent in place of the weights, and one entry in place of a pool; nothing is sent alone.
    assert found["SSF"]["sent"] < found["SSF pool"]["sent"]
    assert found["SSF pool"] == {**found["FedIns"], "seconds": found["SSF pool"]["seconds"]}
    for arm in ("SCAFFOLD", "FedDC"):
        assert found[arm]["sent"] > 1.8 * found["FedAvg"]["sent"]
    assert found["MOON"]["sent"] == found["FedAvg"]["sent"]
    assert found[MOST_FREQUENT]["sent"] == 0
    assert found["SOLO"]["sent"] < 0.2 * found["FedAvg"]["sent"]
    for part in ("comparison", "ablation"):
        assert f"](table.{part}.{SET}.svg)" in page
        assert (tmp_path / f"table.{part}.{SET}.svg").read_text().startswith("<svg")


def test_fedins_rivals_start_from_the_trained_network(data: Path, tmp_path: Path) -> None:
    """With a rate of nothing, every rival answers as the network that it starts from."""
    settings = ["--set", "tuning.learning_rate=1e-12"]
    rows = tmp_path / "table.jsonl"
    command = ["run", "paper-fedins", "--profile", "smoke", "--data", str(data), "--rows", str(rows)]
    options = [*settings, "--state-dir", str(tmp_path / "state"), "--only", "part=comparison"]
    answer = CliRunner().invoke(app, [*command, *options])
    assert answer.exit_code == 0, answer.output
    found = {row["cell"]["arm"]: row["result"]["sites"] for row in Rows(rows).read()}
    for arm in ("SOLO", "FedProx", "MOON", "FedBN", "Centralised"):
        assert found[arm] == found["FedAvg"], arm


def test_fedbicross_every_arm_makes_something_of_the_same_uploads(data: Path, tmp_path: Path) -> None:
    rows, page = tables("paper-fedbicross", data, tmp_path)
    arms = [arm for part in ("comparison", "ablation") for arm in fedbicross.ARMS[part]]
    assert [row["cell"]["arm"] for row in rows] == [arm.name for arm in arms]
    check_scores(rows)
    found = costs(rows)
    assert found[fedbicross.ALONE]["sent"] == found[fedbicross.ALONE]["received"] == 0
    # One model up, and one down; of the ensemble, all models.
    average, ensemble = found[fedbicross.AVERAGE], found[fedbicross.ENSEMBLE]
    model, number = average["received"] - 8, 8  # beside the model, a site receives one number
    assert ensemble["received"] == average["received"] + 4 * model
    # A student comes down once, and each site counts what is right per class, with two metrics.
    for arm in fedbicross.ONE_STUDENT:
        assert found[arm]["received"] == average["received"]
    # Personalising counts what is right per class, with five metrics; given uploads repeat no metric of the
    # first phase, which has three. The scores of test patients are not counted.
    for name, metrics in ((fedbicross.WHOLE, 5), *((arm, 2) for arm in fedbicross.ONE_STUDENT)):
        assert found[name]["sent"] == average["sent"] + number * (2 * CLASSES + metrics - 3)
    assert found[fedbicross.WHOLE]["received"] == average["received"]
    # One run of uploads; of the whole method, one for three lines; one per student; one for each other line.
    whole = [arm for arm in arms if arm.name in (fedbicross.WHOLE, fedbicross.NO_STAGE_3)]
    others = [arm for arm in arms if arm.fields]
    assert len(whole) == 3
    assert len([*(tmp_path / "state/papers").iterdir()]) == 2 + len(fedbicross.ONE_STUDENT) + len(others)
    assert f"](table.ablation.{SET}.0.3.svg)" in page


def test_studies_divide_the_images_among_other_clients(data: Path, tmp_path: Path) -> None:
    rows, _ = run("paper-fedbicross", data, tmp_path, "part=10 clients", f"arm={fedbicross.AVERAGE}")
    rows, page = run("paper-fedbicross", data, tmp_path, "part=alpha 0.1", f"arm={fedbicross.AVERAGE}")
    assert [len(row["result"]["sites"]) for row in rows] == [10, 5]
    assert [row["cell"]["alpha"] for row in rows] == [0.3, 0.1]
    assert "## Alpha 0.1" in page
    [row], _ = run("paper-fedins", data, tmp_path / "fedins", "part=alpha 10", "arm=SSF")
    assert row["cell"]["alpha"] == 10
    # Nearly every client has every class.
    clients = Clients(data / "medmnist_npz", SET, 5, 10.0, 0)
    assert {site: len(found["ours"]) for site, found in row["result"]["sites"].items()} == {
        site: len(own.test) for site, own in clients.data.items()
    }


@pytest.mark.parametrize("name", ["paper-fedins", "paper-fedbicross"])
def test_the_most_frequent_class_needs_no_training(name: str, data: Path, tmp_path: Path) -> None:
    [row], _ = run(name, data, tmp_path, f"arm={MOST_FREQUENT}")
    assert row["result"]["cost"] == {"sent": 0, "received": 0, "seconds": 0}
    assert not (tmp_path / "state/papers").exists()
    clients = Clients(data / "medmnist_npz", SET, 5, 0.3, 0)
    for site, own in clients.data.items():
        counts = [int((own.train.targets == label).sum()) for label in range(CLASSES)]
        right = row["result"]["sites"][site]["ours"].values()
        assert [*right] == [int(counts[label] == max(counts)) for label in own.test.targets]


def test_fedbicross_published_figures_stand_beside_their_own_alpha_alone(data: Path) -> None:
    experiment = fedbicross.PaperFedBiCross(Options("gpu", data))
    found = {site: {"ours": {"image": 1}, "paper": 1.0} for site in CLIENTS}
    result = {"sites": found, "cost": {"sent": 0, "received": 0, "seconds": 0}}
    parts = experiment.parts([{"cell": cell, "result": result} for cell in experiment.cells()])
    for name, part in parts.items():
        if not name.startswith(("comparison", "ablation")):
            assert not part.columns
            continue
        published = [line.published for line in part.lines.values() if line.published]
        assert bool(part.columns) == bool(published) == name.endswith(".0.3"), name


def test_judging_counts_right_answers_at_home_and_on_all_test_images(data: Path) -> None:
    clients = Clients(data / "medmnist_npz", SET, 5, 0.3, 0)
    first = CLIENTS[0]
    models = {site: (lambda images: torch.zeros(len(images))) for site in CLIENTS}
    models[first] = lambda images: torch.from_numpy(images.targets)
    found = clients.judge(models)
    labels = {site: own.test.targets for site, own in clients.data.items()}
    every = np.concatenate([*labels.values()])
    assert found[first]["paper"] == 1
    assert set(found[first]["ours"].values()) == {1}
    for site in CLIENTS[1:]:
        assert found[site]["paper"] == pytest.approx((every == 0).mean(), abs=1e-5)
        assert [*found[site]["ours"].values()] == (labels[site] == 0).astype(int).tolist()


def test_fedavg_in_one_round_weighs_clients_by_their_images() -> None:
    models = {"a": {"w": torch.tensor([1.0]), "n": torch.tensor(7)}, "b": {"w": torch.tensor([5.0])}}
    models["b"]["n"] = torch.tensor(9)
    found = fedbicross.averaged(models, {"a": 30, "b": 10})
    assert found["w"].tolist() == [2.0]  # (30 * 1 + 10 * 5) / 40
    assert found["n"].item() == 7  # a counter is copied


def test_pretraining_sees_every_style() -> None:
    images = np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32)
    names = tuple(map(str, range(40)))
    plain = Images(images, np.zeros(40, np.int64), names, names, (0,) * 40)
    mixed = fedins.styled(plain, torch.Generator().manual_seed(0)).images
    for number, style in enumerate(fedins.STYLES):
        changed = style(torch.from_numpy(images.copy())).numpy()
        assert any(np.array_equal(one, other) for one, other in zip(mixed, changed, strict=True)), number
