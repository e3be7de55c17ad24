from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.accuracy.papers import iop_fl
from benchmarks.accuracy.papers.arms import Arm, Trainer, fold_of
from benchmarks.accuracy.papers.iop_fl import AVERAGE, ENSEMBLE, INSIDE, LABELLED, PER_MODEL, SITES
from benchmarks.harness.cells import Row, Rows
from benchmarks.harness.experiment import Options
from personalization.iop_fl.network import coefficients, route
from personalization.networks import build, initialise
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt
from tests.helpers.personalization.routing_cases import images as routing_images
from tests.helpers.personalization.routing_cases import space_of
from training.choices.fedavg import FedAvgConfig
from training.data.federation import load_federation
from training.tasks import template

SET = "retina_vessels"
PATIENTS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with the names of the real one: images of bright squares, brighter from site to site."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for number, site in enumerate(SITES[SET]):
        for name in ("images", "masks"):
            (root / SET / site / name).mkdir(parents=True)
        for patient in PATIENTS:
            mask = np.zeros((24, 24), np.uint8)
            row, column = generator.integers(2, 12, size=2)
            mask[row : row + 8, column : column + 8] = 255
            image = generator.integers(0, 60, size=(24, 24, 3)) + (60 + 30 * number) * (mask > 0)[..., None]
            Image.fromarray(image.astype(np.uint8)).save(root / SET / site / "images" / f"{patient}.png")
            Image.fromarray(mask).save(root / SET / site / "masks" / f"{patient}.png")
    return root


def run(data: Path, folder: Path, *only: str) -> tuple[list[Row], str]:
    """The rows and the page after a run of the smoke profile in `folder`."""
    rows = folder / "table.jsonl"
    command = ["run", "paper-iop-fl", "--profile", "smoke", "--data", str(data), "--rows", str(rows)]
    options = [text for each in only for text in ("--only", each)]
    answer = CliRunner().invoke(
        app, [*command, "--state-dir", str(folder / "state"), "--workers", "0", *options]
    )
    assert answer.exit_code == 0, answer.output
    return Rows(rows).read(), rows.with_suffix(".md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("only", [("part=inside",), ("part=outside", "site=DRIVE")])
def test_every_arm_runs_on_a_gpu(data: Path, tmp_path: Path, only: tuple[str, ...]) -> None:
    rows = tmp_path / "table.jsonl"
    command = ["run", "paper-iop-fl", "--profile", "smoke", "--data", str(data), "--rows", str(rows)]
    options = ["--set", "device=cuda", "--state-dir", str(tmp_path / "state"), "--workers", "0"]
    chosen = [text for each in only for text in ("--only", each)]
    answer = CliRunner().invoke(app, [*command, *options, *chosen])
    assert answer.exit_code == 0, answer.output
    assert all(0 <= found["paper"] <= 1 for row in Rows(rows).read() for found in scores(row).values())


def scores(row: Row) -> dict[str, Any]:
    return dict(row["result"]["sites"])


def test_inside_every_arm_is_scored_by_both_metrics_with_its_cost(data: Path, tmp_path: Path) -> None:
    rows, page = run(data, tmp_path, "part=inside")
    assert [row["cell"]["arm"] for row in rows] == [arm.name for arm in INSIDE]
    for row in rows:
        assert set(scores(row)) == set(SITES[SET])
        for found in scores(row).values():
            assert set(found["ours"]) < set(PATIENTS)
            assert 0 <= found["paper"] <= 1
            assert set(found["hd95"]) == set(found["nsd"]) == set(found["ours"])
        assert row["result"]["cost"]["sent"] > 0
        # A site that trains alone, or sends its images, gets no weights in training.
        assert (row["result"]["cost"]["received"] > 0) == (row["cell"]["arm"] != "Single-site")
    # The decoder stays at the site.
    by_arm = {row["cell"]["arm"]: row["result"]["cost"] for row in rows}
    assert by_arm["FedPer"]["sent"] < by_arm["FedAvg"]["sent"]
    assert by_arm["FedAvg + fine-tuning"]["sent"] == pytest.approx(by_arm["FedAvg"]["sent"], rel=0.1)
    assert by_arm["FedAvg, twice the rounds"]["sent"] > 1.5 * by_arm["FedAvg"]["sent"]
    figure = f"table.inside.{SET}.svg"
    assert f"]({figure})" in page
    assert (tmp_path / figure).read_text().startswith("<svg")
    assert "| FedBN" in page


def test_fine_tuning_goes_on_from_the_federations_model_at_every_site(data: Path, tmp_path: Path) -> None:
    task = template(SET).model_copy(update={"size": (32, 32)})
    federation = fold_of(load_federation(data / SET, task), 0, 3)
    config = FedAvgConfig(recipe="paper", width=2, rounds=1, local_steps=1)
    # In a worker process, as by default: the method has to travel there.
    trainer = Trainer(Options(state_dir=tmp_path, workers=1), "cpu")
    tuned = trainer.served(federation, Arm("tuned", "fedavg", tuned=1), config, 0).publication.models
    [shared] = trainer.train(federation, "fedavg", config, 0).publication.models
    assert {draft.site for draft in tuned} == set(SITES[SET])
    for draft in tuned:
        # The first step of Adam moves a weight by its rate at most.
        moved = max(
            float((draft.weights[name] - weights).abs().max())
            for name, weights in shared.weights.items()
            if name.endswith("weight")
        )
        assert 0 < moved <= config.learning_rate * 1.001


def test_outside_one_federation_per_site_serves_every_arm(data: Path, tmp_path: Path) -> None:
    arms = ("FedAvg", AVERAGE, ENSEMBLE, PER_MODEL, "statistics")
    for arm in arms:
        rows, _ = run(data, tmp_path, "part=outside", "site=DRIVE", f"arm={arm}")
    assert [row["cell"]["arm"] for row in rows] == list(arms)
    assert {row["result"]["cost"]["sent"] for row in rows} == {rows[0]["result"]["cost"]["sent"]}
    assert len([*(tmp_path / "state/papers").iterdir()]) == 1
    for row in rows:
        assert set(scores(row)) == {"DRIVE"}
        assert set(scores(row)["DRIVE"]["ours"]) == set(PATIENTS)


def test_average_and_ensemble_are_those_of_a_loop_over_members() -> None:
    """Average is a mean of scores, Ensemble the answer of mean logits."""
    images = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    members = []
    for seed in range(3):
        network = build("unet", in_channels=1, classes=2, width=2)
        members.append(initialise(network, torch.Generator().manual_seed(seed)).eval())
    with torch.no_grad():
        expected = torch.zeros(3, 2, 32, 32)
        for network in members:
            expected += network(images) / 3
        torch.testing.assert_close(iop_fl._Mean(members)(images), expected)
    scores_of = [
        {"ours": {"p": each, "q": None}, "hd95": {"p": 10 * each}, "nsd": {"p": each}, "paper": each}
        for each in (0.2, 0.5, 0.8)
    ]
    found = iop_fl._average(scores_of)
    assert found["ours"] == {"p": pytest.approx(0.5)}
    assert (found["paper"], found["hd95"]["p"]) == (pytest.approx(0.5), pytest.approx(5.0))


def test_one_coefficient_per_model_is_one_parameter_of_all_layers() -> None:
    space, images = space_of(2, torch.float32), routing_images(4, 32, 32, torch.float32)
    network = route(space, "direct")
    iop_fl._share_coefficients(network)
    named = [name for name, _ in network.named_parameters() if name.endswith("logits")]
    assert len(named) == 1
    adapt(network, images, AdaptationConfig(preset="paper", epochs=2, batch_size=2))
    by_layer = coefficients(network, images)
    assert (by_layer - by_layer[:, :1]).abs().max() == 0
    assert (by_layer[0, 0] - 1 / 3).abs().max() > 1e-3


def test_studies_change_one_thing(data: Path, tmp_path: Path) -> None:
    for only in (
        ("part=members", "site=DRIVE", "arm=* 2 members"),
        ("part=terms", "site=DRIVE", "arm=consistency"),
        ("part=epochs", "site=DRIVE", "arm=3 epochs"),
        ("part=tau", "arm=IOP-FL, tau 0.[19]"),
        ("part=inside", "arm=Ditto, as many steps"),
    ):
        rows, page = run(data, tmp_path, *only)
    by_arm = {row["cell"]["arm"]: row for row in rows}
    assert len(by_arm) == 7
    assert by_arm["3 epochs"]["cell"]["epochs"] == 3
    # Both losses adapt what one federation of three made; two members are another.
    [both] = {row["result"]["cost"]["sent"] for row in rows if row["cell"]["part"] in ("terms", "epochs")}
    assert both > 0
    unchanged, adapted = (by_arm[f"{name}, 2 members"] for name in ("FedAvg", "Locum's loss"))
    assert unchanged["result"]["cost"] == adapted["result"]["cost"]
    # The moving average keeps more of the first model.
    taus = [by_arm[f"IOP-FL, tau {tau}"]["cell"]["method"]["tau"] for tau in (0.1, 0.9)]
    assert taus == [0.1, 0.9]
    assert len([*(tmp_path / "state/papers").iterdir()]) == 5
    for part in ("Members", "Terms", "Epochs", "Tau"):
        assert f"## {part}: {SET}" in page


def test_outside_arms_that_train_for_themselves_have_runs_of_their_own(data: Path, tmp_path: Path) -> None:
    arms = ("FedDG", "TTT")
    for arm in arms:
        rows, _ = run(data, tmp_path, "part=outside", "site=DRIVE", f"arm={arm}")
    assert [row["cell"]["arm"] for row in rows] == list(arms)
    assert len([*(tmp_path / "state/papers").iterdir()]) == 2
    sent = {row["cell"]["arm"]: row["result"]["cost"]["sent"] for row in rows}
    # The others' amplitudes, and the rotation head, beside the weights of a global model.
    assert 0 < sent["TTT"] != sent["FedDG"] > 0
    for row in rows:
        assert set(scores(row)["DRIVE"]["ours"]) == set(PATIENTS)


def test_the_published_protocol_has_the_papers_metric_alone(data: Path, tmp_path: Path) -> None:
    [row], page = run(data, tmp_path, "site=STARE", f"arm={LABELLED}")
    assert scores(row)["STARE"]["ours"] == {}
    assert 0 < scores(row)["STARE"]["paper"] < 1
    assert f"| {LABELLED} " in page
