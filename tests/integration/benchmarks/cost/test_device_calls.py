"""Steps on a GPU do not make the host wait: counted on the pretended device by the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.device_calls import BEFORE, DeviceCalls
from benchmarks.harness.experiment import Options

COST = DeviceCalls(Options("smoke"))
CELLS = {f"{cell['what']}: {cell['name']}": cell for cell in COST.cells()}


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("training: augmented, drawn scanners", 0),
        # Whether the loss is a number decides on the step.
        ("adaptation: paper", 1),
        ("adaptation: tent", 1),
        # The masks, and the terms of the loss.
        ("measuring: paper", 2),
    ],
)
def test_step_waits_for_the_device_as_rarely_as_it_can(name: str, waits: int, tmp_path: Path) -> None:
    assert COST.compute(CELLS[name], tmp_path)["waits"] == waits


def test_every_step_has_its_counts_before() -> None:
    assert CELLS.keys() == BEFORE.keys()
