"""`make demo-network`: hospitals that train over a network end with the weights and masks of `make demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from locum.demo.service_process import free_port

ROOT = Path(__file__).parents[3]


# The limit is for a demo that hangs, not for a busy machine.
@pytest.mark.timeout(1200)
def test_weights_and_masks_of_a_network_are_those_of_the_demo(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "demo"), "--port", str(free_port()), "--rounds", "2"]
    command = [sys.executable, "-m", "locum.demo.network", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The weights of 4 models are the same, byte by byte." in done.stdout
    assert "The masks of 4 new patients are the same, byte by byte." in done.stdout
