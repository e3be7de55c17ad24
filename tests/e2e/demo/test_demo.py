"""`make demo`, shortened: it trains, serves, adapts, is refused, and says where everything is."""

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


SERVED = r"{} hospital; hospital=dune, by phantom.at-dune@1: Dice ([01]\.\d{{3}})"


# A hung demo is what this is to catch, not a busy machine
@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    # Enough for masks that can be told from noise: from a worse parent the gate would let nobody go.
    shorter = ["--rounds", "7", "--scans", "4", "--epochs", "1"]
    command = ["--once", *shorter, "--folder", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "demo", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    store = Store(tmp_path / "store")
    assert set(store.names()) == {
        "phantom",
        *(f"phantom.{part}" for part in ("global", "aster", "birch", "cedar", "at-dune")),
    }
    assert "aster, in the federation, is served member; site=aster" in said
    assert "dune, outside the federation, is served global" in said
    files = dict.fromkeys(re.findall(r"(?:mask|overlay) +(\S+)", said))
    assert len(files) == 2 * 2 + 2 * 2
    for path in files:
        assert decode(Path(path).read_bytes()).voxels.size
    assert len(re.findall(r"is served .*: Dice [01]\.\d{3}", said)) == 3

    # both jobs were followed from their first epoch to their end
    assert re.findall(r"^  epoch (\d)  loss", said, re.MULTILINE) == list("0101")
    assert said.count("judging against half 2 of the scans") == 2
    assert len(store.versions("phantom.at-dune")) == 2

    # the first was assigned over its gate, since it is better by the truth, and serves; the second was not
    good, bad = (Path(path).read_text() for path in re.findall(r"card +(\S+)", said))
    assert "phantom.at-dune@1 (succeeded) does not pass the gate" in said
    assert "assigned over the gate: phantom.at-dune@1, by ada" in said
    assert "phantom.at-dune@1" in good
    assert "phantom.at-dune@2 (succeeded) does not pass the gate" in said
    assert re.search(r"✗ agreement +0\.\d{3}  \(at least 0\.85\)", said)
    assert re.search(r"409 'phantom.at-dune@2' has not passed its gate \(it failed: agreement", said)
    assert "phantom.at-dune@2" in bad
    (served,), (still,) = (re.findall(SERVED.format(when), said) for when in ("is served", "is still served"))
    assert served == still

    assert re.search(r"for this answer only: scan, by phantom@1: Dice [01]\.\d{3}", said)
