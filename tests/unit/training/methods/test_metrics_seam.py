"""A metric that only this test registers reaches rounds, manifests, reports, progress and benchmarks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.harness.evaluation import Scans
from model_store.store import Store
from model_store.task import Task
from personalization.metrics import METRICS, Compared, Metric, metrics_of
from tests.helpers.training.sites import site_data
from training.algorithm import SiteSize
from training.choices.fedavg import FedAvgConfig
from training.data.federation import load_federation
from training.local.scores import ValidationScore, evaluate
from training.methods.registry import method
from training.parts.train import SCORES
from training.phantom import write_federation
from training.progress.state import heading, in_order
from training.record import RunRecord
from training.report.page import write_report
from training.run import Run, execute


def wrong_pixels(case: Compared) -> float:
    """Count them in one patient; undefined where the truth has no target."""
    return float((case.predicted != case.truth).sum()) if bool(case.truth.any()) else math.nan


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Metric("wrong", "wrong pixels", "segmentation", wrong_pixels, best="lowest", most=math.inf)
    monkeypatch.setitem(METRICS, "wrong", toy)


class AlwaysBackground(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.bias.view(1, 2, 1, 1).expand(len(images), 2, *images.shape[2:])


def test_first_metric_of_a_task_chooses_and_all_are_measured() -> None:
    names = [metric.name for metric in metrics_of("segmentation")]
    assert (names[0], names[-1]) == ("dice", "wrong")
    data = site_data("A", 2, 6, 0).val
    score = evaluate(AlwaysBackground(), data, 2)
    per_patient = [int((data.targets[2 * i : 2 * i + 2] > 0).sum()) for i in range(3)]
    assert [*score.further] == names[1:]
    assert score.further["wrong"] == (sum(per_patient), 3)
    found = score.metrics("personal_val_dice")
    assert found["personal_val_dice"] == 0.0
    assert found["personal_val_wrong"] == pytest.approx(sum(per_patient) / 3)


def test_a_case_without_the_metric_is_left_out_and_counted() -> None:
    empty = site_data("A", 2, 6, 0, empty=True).val
    assert evaluate(AlwaysBackground(), empty, 2).further["wrong"] == (0.0, 0)
    one, two = ValidationScore(1.0, 2, {"wrong": (6.0, 2)}), ValidationScore(0.5, 1, {"wrong": (0.0, 0)})
    together = ValidationScore.together([one, two])
    assert together.metrics("val_dice") == {"val_dice": 0.5, "val_wrong": 3.0}
    assert ValidationScore.received(one.state()) == one


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"wrong": (-1.0, 1)}, "0..inf"),
        ({"wrong": (9.0, 0)}, "and their count"),
        ({"dice": (2.0, 1)}, "0..1 and"),
        ({"unheard": (0.0, 1)}, "metrics beside it"),
    ],
)
def test_server_checks_every_metric_by_its_bounds(
    further: dict[str, tuple[float, int]], message: str
) -> None:
    SCORES.check(ValidationScore(1.0, 2, {"wrong": (5000.0, 2)}).state(), SiteSize(3, 3))
    with pytest.raises(ValueError, match=message):
        SCORES.check(ValidationScore(1.0, 2, further).state(), SiteSize(3, 3))


def test_headings_and_order_follow_from_the_metric() -> None:
    assert heading("val_wrong") == "wrong pixels"
    assert heading("personal_val_wrong") == "own wrong pixels"
    seen = {"val_wrong", "val_dice", "loss", "personal_val_dice", "odd_one", "key_entropy"}
    expected = ["loss", "val_dice", "personal_val_dice", "val_wrong", "key_entropy", "odd_one"]
    assert in_order(seen) == expected


@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_run_record_manifest_and_report_show_the_metric(name: str, tmp_path: Path) -> None:
    federation = load_federation(write_federation(tmp_path / "data", ("aster", "birch"), 4, 16))
    config = method(name).config(rounds=2, local_steps=1, width=1, batch_size=4)
    assert isinstance(config, FedAvgConfig)
    run, store = Run(federation, name, config), Store(tmp_path / "store")
    if name == "fedper":
        run = Run(federation, name, config, run.settings.model_copy(update={"consent": "all"}))
    result = execute(run, tmp_path / "run", workers=0, store=store, name="toy")
    parts = [artefact.manifest.metrics for artefact in result.artefacts]
    key = "val_wrong" if name == "fedavg" else "aster.val_wrong"
    assert parts[-1][key] > 0
    shown = "val_wrong" if name == "fedavg" else "personal_val_wrong"
    record = RunRecord.of(result)
    assert any(shown in site.metrics for entry in record.rounds for site in entry.sites.values())
    page = write_report(record, tmp_path / "report.html", result.publication).read_text()
    model = "the global model as each site receives it" if name == "fedavg" else "each site&#39;s own model"
    assert f"Validation wrong pixels of {model}. A dot marks the best round." in page
    lowest = [
        min(e.sites[s].metrics[shown] for e in record.rounds if s in e.sites and shown in e.sites[s].metrics)
        for s in ("aster", "birch")
    ]
    assert f"best validation {heading(shown)}" in page
    if name == "fedper":  # each site's own best
        assert f"{sum(lowest) / 2:.0f}" in page


def test_benchmarks_measure_it_on_the_scans_own_grid(tmp_path: Path) -> None:
    root = write_federation(tmp_path, ("aster",), 1, 16)
    federation = load_federation(root)
    task: Task = federation.task
    scans = Scans.load(federation.sites[0].cases, task)
    background = torch.zeros(len(scans.images), 2, *scans.images.shape[2:])
    background[:, 0] = 1
    (patient,) = scans.patients
    assert scans.measured(background, "wrong") == {patient: float((scans.scans[0].truth > 0).sum())}
    assert scans.measured(background, "dice") == pytest.approx(scans.dice(background))
