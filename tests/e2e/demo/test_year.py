"""`locum demo --year`, as a person starts it: the watch calls the update, and the model is fitted to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from locum.demo.service_process import free_port


def test_watch_calls_the_update_and_the_series_goes_on_with_the_adapted_version(tmp_path: Path) -> None:
    command = ["--year", "--once", "--folder", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "locum.demo", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "57 scans, mean Dice 0.9" in said
    assert "CT 2 is at routine month 4" in said
    scans = re.search(r"software; (\d+) scans later 409 an alarm of the watch holds the answers", said)
    assert scans is not None, said
    assert int(scans[1]) <= 30
    assert re.search(r"CT 2 is at investigate: (shift|confidence of|volume of)[a-z ]* since", said), said
    assert "the gate passes it; assigned: abdomen.at-aster@1" in said
    assert said.count("ada answers: new software of CT 2") == 1
    later = said.partition("another series begins")[2]
    assert later.count("CT 2 is at routine") == 1
    # It truly helps: the update lost far more than the spread of a few scans, and most of it is back.
    lost, regained = (
        re.search(r"mean Dice (0\.\d+)", text) for text in (said.partition("month 4")[2], later)
    )
    assert lost is not None, said
    assert regained is not None, said
    assert float(regained[1]) > float(lost[1]) + 0.08
