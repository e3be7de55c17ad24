"""Cells of `volumes` on the phantom, from training to the scans' own grid, and the page's sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.accuracy.volumes.experiment import Volumes
from benchmarks.accuracy.volumes.report import level, sections
from benchmarks.accuracy.volumes.scoring import answered
from benchmarks.harness.experiment import Options
from training.data.federation import load_federation
from training.data.scan_files import read_mask
from training.phantom import VOLUMES, write_federation


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    state = tmp_path_factory.mktemp("state")
    experiment = Volumes(Options("smoke", data=state, state_dir=state, workers=0))
    return [
        {"cell": cell, "result": experiment.compute(cell, state / str(number))}
        for number, cell in enumerate(experiment.cells())
    ]


def test_every_arm_scores_the_same_held_out_patients_with_every_metric(rows: list[dict[str, Any]]) -> None:
    assert [row["cell"]["arm"] for row in rows] == ["2-D", "3-D"]
    slices, volumes = (row["result"]["models"] for row in rows)
    assert set(slices) == {"global"}
    assert slices["global"].keys() == volumes["global"].keys()
    assert len(slices["global"]) >= 2
    for models in (slices, volumes):
        for patients in models.values():
            for metrics in patients.values():
                assert set(metrics) == {"dice", "hd95", "assd", "nsd"}
                assert all(len(values) == 1 for values in metrics.values())


def test_the_page_follows_from_the_rows(rows: list[dict[str, Any]]) -> None:
    text = "\n\n".join(sections(rows))
    for row in rows:
        found = level(row["result"]["models"]["global"], "dice")
        assert f"| {row['cell']['arm']}" in text
        assert f"{found:.3f}" in text
    assert "better than 2-D" in text
    assert "## The goal" in text


def test_levels_are_means_over_patients_of_what_is_defined() -> None:
    patients = {"a": {"hd95": [1.0, 3.0]}, "b": {"hd95": [None, 4.0]}, "c": {"hd95": [None, None]}}
    assert level(patients, "hd95") == pytest.approx((2.0 + 4.0) / 2)


def test_answers_are_on_the_scans_own_grid_in_every_orientation(tmp_path: Path) -> None:
    """A network that finds what is bright, in scans that are stored in two orders of axes."""

    class Bright(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 20 * torch.cat([0.8 - images, images - 0.8], dim=1)

    federation = load_federation(write_federation(tmp_path, ("aster", "cedar"), 1, task=VOLUMES), VOLUMES)
    for site in federation.sites:
        (case,) = site.cases
        predicted, truth, spacing = answered(Bright(), case, VOLUMES)
        mask = read_mask(case.mask)
        assert predicted.shape == truth.shape == mask.grid
        assert np.array_equal(truth.numpy(), mask.voxels[..., 0])
        assert np.prod(spacing) / 1000 == pytest.approx(mask.voxel_volume_ml)
        organ = truth > 0
        assert float((predicted[organ] == 1).float().mean()) > 0.8
        assert float((predicted[~organ] == 1).float().mean()) < 0.3
