"""The part `masks` of the benchmark: no label that is used is scored, and a row has every arm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.accuracy.dose import masks
from benchmarks.accuracy.dose.masks import BASELINES, by_masks, section, split
from personalization.masks import MasksConfig
from personalization.networks import build, initialise
from training.data.federation import load_federation
from training.phantom import write_federation


@pytest.mark.parametrize(
    ("patients", "numbers"), [(60, [1, 5, 10, 20]), (16, [1, 5, 10]), (8, [1, 5]), (3, [])]
)
def test_patients_with_masks_are_never_scored(patients: int, numbers: list[int]) -> None:
    names = [f"p{i}" for i in range(patients)]
    order, scored, found = split(names, seed=3)
    assert found == numbers
    assert not {*order} & {*scored}
    assert sorted(order + scored) == sorted(names)
    assert len(scored) >= max(3, patients / 3)
    assert split(names, seed=3) == split(names, seed=3)


def test_row_has_every_arm_and_the_report_its_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = load_federation(write_federation(tmp_path / "data", ("aster",), 8, 32), None)
    monkeypatch.setattr(MasksConfig, "steps_for", lambda _self, _patients: 2)
    network = initialise(build("unet", in_channels=1, classes=2, width=4), torch.Generator().manual_seed(0))
    row = by_masks(network.eval(), federation, "aster", 3, severities=(0,))
    (at,) = row["at"].values()
    assert at["scored"] == 3
    assert {*at["masks"]} == {"1", "5"}
    one, five = at["masks"]["1"], at["masks"]["5"]
    assert {"tuned", "half"} <= one["arms"].keys()
    assert "weight" not in one
    assert {"masks", "gated", "tuned", *BASELINES} <= five["arms"].keys()
    assert five["held_out"][2] == 5
    assert five["arms"]["masks"][0] in (five["arms"]["gated"][0], 0.0) or not five["passed"]
    text = "\n".join(section([{"cell": {"set": "phantom"}, "result": row}]))
    assert f"{100 * five['arms']['tuned'][0]:+.1f}" in text
    assert masks.section([]) == []
