"""`make demo`, shortened: train, serve, join, adapt, reject, and print where every file is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.service_process import free_port
from model_store.scan import decode
from model_store.store import Store

ROOT = Path(__file__).parents[3]


# The limit is for a demo that hangs, not for a busy machine.
@pytest.mark.timeout(600)
def test_demo_assigns_only_what_its_gate_passes(tmp_path: Path) -> None:
    shorter = ["--rounds", "7", "--scans", "4", "--epochs", "1"]
    command = ["--once", *shorter, "--folder", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "demo", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    store = Store(tmp_path / "store")
    parts = ("global", "aster", "birch", "cedar", "at-dune")
    names = {name for model in ("phantom", "any-organ") for name in (model, *(f"{model}.{p}" for p in parts))}
    assert set(store.names()) == names
    assert "aster, in the federation, is served member; site=aster" in said
    assert "dune, outside the federation, is served global" in said
    files = dict.fromkeys(re.findall(r"(?:scan|mask|overlay) +(/\S+)", said))
    assert len(files) == 2 * 3 + 3 * 2
    for path in files:
        assert decode(Path(path).read_bytes()).voxels.size
    # The request in the README posts one of these scans.
    (scan,) = re.findall(r"scan=@\.locum/demo/(\S+)", (ROOT / "README.md").read_text())
    assert (tmp_path / scan).is_file()

    # The demo printed every epoch of all three jobs.
    epochs = re.findall(r"^  epoch (\d+)  ", said, re.MULTILINE)
    assert epochs == [*map(str, range(11)), *"01", *"01"]
    assert said.count("judging against half 2 of the scans") == 2
    assert len(store.versions("phantom.at-dune")) == 2

    # The gate passes the model measured on masks. It is assigned and serves.
    joined, adapted, refused = (Path(path).read_text() for path in re.findall(r"card +(\S+)", said))
    assert "any-organ.at-dune@1 (succeeded) passes the gate" in said
    assert "assigned: any-organ.at-dune@1, by ada" in said
    assert re.search(
        r"dune is served hospital; hospital=dune, by any-organ.at-dune@1: Dice [01]\.\d{3}", said
    )
    assert "any-organ.at-dune@1" in joined

    # The two models adapted without masks fail the gate. Neither is assigned; the global model still serves.
    for version, card in (("phantom.at-dune@1", adapted), ("phantom.at-dune@2", refused)):
        assert f"{version} (succeeded) does not pass the gate" in said
        assert re.search(rf"409 '{version}' has not passed its gate \(it failed: ", said)
        assert version in card
    assert re.search(r"✗ agreement +0\.\d{3}  \(at least 0\.85\)", said)
    still = re.findall(r"is still served (.*): Dice ([01]\.\d{3})", said)
    assert still == [("global, by phantom@1", still[0][1])] * 2

    assert re.search(r"for this answer only: scan, by phantom@1: Dice [01]\.\d{3}", said)
