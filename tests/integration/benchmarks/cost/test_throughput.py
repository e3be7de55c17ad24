from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.cost import peers
from benchmarks.cost.throughput import Throughput
from benchmarks.harness.experiment import Options


def test_locum_is_measured_beside_the_servers_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.PYTHON, sys.executable)
    there = peers.installed()
    assert "FastAPI" in there
    cost = Throughput(Options("smoke"))
    (cell,) = (cell for cell in cost.cells() if cell["what"] == "peers")
    found = cost.compute(cell, tmp_path)
    assert list(found) == ["Locum", *there]
    assert found["Locum"]["ratio"]["median"] == 1
    assert all(each["processor_ms"] > 0 for each in found.values())
    page = "\n".join(cost.sections([{"cell": cell, "result": found}]))
    assert "| FastAPI |" in page
