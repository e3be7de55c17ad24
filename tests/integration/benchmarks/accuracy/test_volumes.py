"""Cells of `volumes` on the phantom, from training to the scans' own grid, and the page's sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.accuracy.volumes.clock import Clock
from benchmarks.accuracy.volumes.experiment import Volumes
from benchmarks.accuracy.volumes.outside import SHARES
from benchmarks.accuracy.volumes.report import Patients, elsewhere, level, sections
from benchmarks.accuracy.volumes.scoring import answered
from benchmarks.harness.experiment import Options
from training.data.federation import load_federation
from training.data.scan_files import read_mask
from training.engine.history import RoundEntry
from training.phantom import VOLUMES, write_federation


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    state = tmp_path_factory.mktemp("state")
    experiment = Volumes(Options("smoke", data=state, state_dir=state, workers=0))
    return [
        {"cell": cell, "result": experiment.compute(cell, state / str(number))}
        for number, cell in enumerate(experiment.cells())
        if cell.get("outside") in (None, "aster")
    ]


def test_every_arm_scores_the_same_held_out_patients_with_every_metric(rows: list[dict[str, Any]]) -> None:
    assert [row["cell"]["arm"] for row in rows] == ["2-D", "3-D", "planned", "planned, outside"]
    slices, volumes, planned, outside = (row["result"]["models"] for row in rows)
    assert set(slices) == {"global"}
    assert set(volumes) == set(planned) == {"global", "personal"}
    assert slices["global"].keys() == volumes["global"].keys() == planned["personal"].keys()
    assert len(slices["global"]) >= 2
    assert {name.split("/")[0] for own in outside.values() for name in own} == {"aster"}
    assert len(outside["global"]) == 5
    for models in (slices, volumes, planned, outside):
        for patients in models.values():
            for metrics in patients.values():
                assert set(metrics) == {"dice", "hd95", "assd", "nsd"}
                assert all(len(values) == 1 for values in metrics.values())


def test_a_plan_is_that_of_the_members_alone(rows: list[dict[str, Any]]) -> None:
    planned, outside = (row["result"]["plan"] for row in rows[2:])
    assert planned["options"]["network"] == "monai.dynunet"
    assert planned["spacing"] != outside["spacing"]  # of both sites, and of one


def test_a_hospital_outside_is_served_by_auto_where_the_gate_accepts_it(rows: list[dict[str, Any]]) -> None:
    models = rows[-1]["result"]["models"]
    names = ["global", *SHARES]
    assert [*models] == [f"{name}{through}" for through in ("", ", scanner") for name in (*names, "auto")]
    scores = [json.dumps(own) for name, own in models.items() if not name.startswith("auto")]
    assert len(set(scores)) == len(scores)  # the scanner changes every scan, and a dose every answer
    for name, failed in rows[-1]["result"]["failed"].items():
        plain = models[name.replace("auto", "global")]
        assert (models[name] == plain) == bool(failed)


def test_the_page_follows_from_the_rows(rows: list[dict[str, Any]]) -> None:
    text = "\n\n".join(sections(rows))
    for row in rows[:-1]:
        found = level(row["result"]["models"]["global"], "dice")
        assert f"| {row['cell']['arm']}" in text
        assert f"{found:.3f}" in text
    assert "better than 2-D" in text
    assert text.index("## The goal") < text.index("## A hospital outside") < text.index("## Patients")
    assert "The loss of slices" not in text


def row_of(arm: str, seed: int, dice: list[float], **cell: str) -> dict[str, Any]:
    """A recorded row of an arm, with one class."""
    scores = {
        f"west/{number}": {"dice": [value], "hd95": [2.0], "assd": [1.0], "nsd": [0.5]}
        for number, value in enumerate(dice)
    }
    result = {"models": {"global": scores}, "labels": ["a"], "parameters": 1, "cpu_seconds": None}
    return {"cell": {"arm": arm, "seed": seed, "set": arm[:3], **cell}, "result": result}


def losses(change: float, seeds: int = 3) -> str:
    """The page of both losses on two sets, of which the second gains `change`."""
    rows = [
        row_of(arm + name, seed, [0.5 + gain + seed / 100, 0.7 + gain])
        for arm, of_arm in (("2-D", 0.01), ("vessels", change))
        for name, gain in (("", 0.0), (", dice_ce", of_arm))
        for seed in range(seeds)
    ]
    return "\n\n".join(sections(rows))


def test_a_loss_becomes_the_default_by_three_seeds_on_both_sets() -> None:
    assert "Met: the mean" in losses(0.02)
    assert "+0.020, +0.020, +0.020" in losses(0.02)
    assert "Not met" in losses(-0.02)
    assert "Not decided" in losses(0.02, seeds=2)
    assert "vessels" not in losses(0.02).split("## The loss of slices")[0]


def test_sites_left_out_are_joined_before_their_mean_and_held_out_ones_counted_apart() -> None:
    one, two = (
        row_of("planned, outside", 0, [0.2, 0.4], outside="west"),
        row_of("planned, outside", 0, [0.9], outside="north"),
    )
    one["result"]["held_out"], two["result"]["held_out"] = ["west/1"], []
    two["result"]["models"]["global"] = {"north/0": two["result"]["models"]["global"]["west/0"]}
    (line,) = [
        each for each in "\n\n".join(sections([one, two])).splitlines() if each.startswith("| planned")
    ]
    seeds, held, dice, _, every, dice_all = (each.strip() for each in line.split("|")[3:9])
    assert (seeds, held, dice, every, dice_all) == ("1", "1", "0.400", "3", "0.500")
    (found,) = elsewhere([one, two])
    assert found == ["planned, outside", "global", 1, "0.500", "2.00"]


def test_cpu_seconds_are_of_every_process_that_committed_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([5.0, 12.0, 100.0, 103.0])
    monkeypatch.setattr("time.process_time", lambda: next(seconds))
    Clock(tmp_path).round_finished(RoundEntry("train", 0, 2))
    assert Clock(tmp_path).seconds == 7 + 3


def test_levels_are_means_over_patients_of_what_is_defined() -> None:
    patients: Patients = {"a": {"hd95": [1.0, 3.0]}, "b": {"hd95": [None, 4.0]}, "c": {"hd95": [None, None]}}
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
        assert spacing is not None
        assert np.prod(spacing) / 1000 == pytest.approx(mask.voxel_volume_ml)
        organ = truth > 0
        assert float((predicted[organ] == 1).float().mean()) > 0.8
        assert float((predicted[~organ] == 1).float().mean()) < 0.3
