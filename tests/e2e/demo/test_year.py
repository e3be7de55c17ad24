"""`locum demo --year`, as a person starts it: the watch calls the update of the scanner, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from locum.demo.service_process import free_port


def test_watch_calls_the_update_and_a_person_s_answer_begins_the_series_anew(tmp_path: Path) -> None:
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
    assert "ada answers" in said
    assert said.partition("another series begins")[2].count("CT 2 is at routine") == 1
