"""A run of the tests that is killed leaves no process, nor does a killed worker of pytest-xdist."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
# A child, one that ignores SIGTERM in a session of its own, a forked process, a daemon without its parent,
# and a member of the daemon's group that has another environment, as Redis has.
LEAVES = """
import json, multiprocessing, os, subprocess, sys, time
from pathlib import Path

IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, 1); print(flush=True); time.sleep(600)"
DAEMONS = "sleep 600 > /dev/null & echo $!; env -i sleep 600 > /dev/null & echo $!"

def test_leaves():
    child = subprocess.Popen(["sleep", "600"])
    stubborn = subprocess.Popen(
        [sys.executable, "-c", IGNORES_TERM], start_new_session=True, stdout=subprocess.PIPE
    )
    stubborn.stdout.readline()
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    daemons = subprocess.run(["sh", "-c", DAEMONS], start_new_session=True, stdout=subprocess.PIPE).stdout
    pids = [child.pid, stubborn.pid, forked.pid, *map(int, daemons.split())]
    note = Path(__file__).with_name("note")
    note.with_suffix(".new").write_text(json.dumps([os.getpid(), pids]))
    note.with_suffix(".new").rename(note)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("workers", "victim", "sent"),
    [
        (0, "pytest", signal.SIGTERM),
        (1, "pytest", signal.SIGKILL),
        (1, "worker", signal.SIGKILL),
    ],
)
def test_what_a_killed_run_started_ends(
    workers: int, victim: str, sent: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [*command, "-n", str(workers), "-c", "pyproject.toml", str(tmp_path)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    note = tmp_path / "note"
    wait_for(note.exists, psutil.Process(run.pid))
    worker, pids = json.loads(note.read_text())
    left = [psutil.Process(pid) for pid in (worker, *pids)]
    (run if victim == "pytest" else psutil.Process(worker)).send_signal(sent)
    run.wait(60)
    assert psutil.wait_procs(left, timeout=60)[1] == [], (tmp_path / "log").read_text()
