"""`make demo`, shortened to one round: it trains, serves, segments, and says where everything is."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from model_store.scan import decode
from model_store.store import Store

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    command = ["--once", "--rounds", "1", "--folder", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "demo", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(Store(tmp_path / "store").names()) == {
        "phantom",
        *(f"phantom.{part}" for part in ("global", "aster", "birch", "cedar")),
    }
    assert "aster, in the federation, is served member; site=aster" in done.stdout
    assert "dune, outside the federation, is served global" in done.stdout
    for path in re.findall(r"(?:mask|overlay) +(\S+)", done.stdout):
        assert decode(Path(path).read_bytes()).voxels.size
    assert len(re.findall(r"is served .*: Dice [01]\.\d{3}", done.stdout)) == 2
