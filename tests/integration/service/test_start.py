"""What a person sees who starts the service."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.harness import forked
from tests.helpers.waiting import wait_for


def environment(state: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LOCUM_")}
    return inherited | {"LOCUM_STATE_DIR": str(state), "LOCUM_DEVICE": "cpu"}


def test_terminal_shows_the_address_and_no_log(
    publish_bright: Callable[[Path], object], tmp_path: Path
) -> None:
    publish_bright(tmp_path / "store")
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "--store", str(tmp_path / "store"), "--port", "0", "--no-worker"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=environment(tmp_path / "state"),
    )
    os.close(inner)
    shown = b""

    def address() -> str | None:
        nonlocal shown
        shown += os.read(outer, 4096)
        found = re.search(rb"Locum is at (http://127\.0\.0\.1:\d+), until Ctrl-C\.\r\n", shown)
        return found and found[1].decode()

    try:
        url = wait_for(address)
        assert httpx.get(f"{url}/health/live").status_code == 200
        assert b"{" not in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outer)


def test_port_that_is_taken_is_one_sentence_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        options = ("--store", tmp_path / "store", "--port", port)
        done = forked.run("service", *options, environment=environment(tmp_path / "state"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"locum: port {port} of 127.0.0.1 (LOCUM_PORT, LOCUM_HOST): expected a free one, found: Address"
    )
    assert not (tmp_path / "state").exists()
