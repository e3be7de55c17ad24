from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.runtime.child_process import Child

pytestmark = pytest.mark.process

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS


def group(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_child_is_the_command_in_its_own_process_group() -> None:
    child = Child(["sleep", "600"])
    while psutil.Process(child.pid).name() != "sleep":
        assert child.alive
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    child.stop()
    assert child.returncode == -signal.SIGTERM
    assert not child.alive
    assert psutil.wait_procs(group(child.pid), timeout=20)[1] == []


def test_child_that_exits_reports_its_return_code() -> None:
    child = Child(["sh", "-c", "exit 7"])
    while child.alive:
        pass
    assert child.returncode == 7
    child.stop()
    assert psutil.wait_procs(group(child.pid), timeout=20)[1] == []


def test_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output.open("wb") as stream:
        child = Child([sys.executable, "-c", IGNORES_TERM], output=stream, grace_seconds=0.1)
    while output.read_bytes() != b"ready\n":
        assert child.alive
    child.stop()
    assert child.returncode == -signal.SIGKILL


def test_silent_child_has_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child(["sh", "-c", "echo said; echo logged >&2"], silent=True)
    while child.alive:
        pass
    child.stop()
    assert tuple(capfd.readouterr()) == ("", "logged\n")


def test_stop_ends_grandchildren(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output.open("wb") as stream:
        child = Child(["sh", "-c", "sleep 600 & echo $!; wait"], output=stream)
    while not (line := output.read_text()).endswith("\n"):
        assert child.alive
    grandchild = psutil.Process(int(line))
    child.stop()
    grandchild.wait(10)


@pytest.mark.parametrize("program", [SLEEPS, IGNORES_TERM])
def test_child_ends_when_its_parent_is_killed(program: str) -> None:
    starts = (
        "import sys, time; from service.runtime.child_process import Child\n"
        f"child = Child([sys.executable, '-c', {program!r}], grace_seconds=0.2)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        child = psutil.Process(int((lines - {"ready"}).pop()))
        parent.kill()
        child.wait(20)
        # The output is at its end: neither the child nor its watcher holds it any more.
        assert parent.stdout.read() == ""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="NOT TESTED: setpriv is not installed")
@pytest.mark.parametrize("thread", [False, True])
def test_child_ends_when_its_watcher_and_then_its_parent_are_killed(thread: bool) -> None:
    start = "threading.Thread(target=start).start()" if thread else "start()"
    starts = (
        "import threading, time; from service.runtime.child_process import Child\n"
        "def start(): print(Child(['sleep', '600']).pid, flush=True)\n"
        f"{start}; time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while child.name() != "sleep" or len(group(child.pid)) < 2:
            assert parent.poll() is None
        for process in group(child.pid):
            if process.pid != child.pid:
                process.kill()
        # The end of a thread that started it is no end of the process.
        assert child.is_running()
        parent.kill()
        child.wait(20)


def test_watcher_does_not_hold_an_inherited_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = Child(["sleep", "600"], output=lock)
    with path.open("ab") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    while psutil.Process(child.pid).name() != "sleep":
        assert child.alive
    while len(group(child.pid)) < 2:
        assert child.alive
    os.kill(child.pid, signal.SIGKILL)
    while child.alive:
        pass
    # The watcher lets go in its own time; one that never did would leave this waiting for good.
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    child.stop()
