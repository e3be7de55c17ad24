"""Run the service as a process, as a person starts it, with a client for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

_START_TIMEOUT_S = 60.0


def free_port() -> int:
    """Return a free TCP port on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_port(port: int) -> None:
    """End the command with one line (SystemExit) if another process listens on the port.

    The client would send that process its hospitals, cohorts and jobs.
    """
    with socket.socket() as listener:
        # As servers do: connections that ended a moment ago do not occupy the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(
                f"port {port}: expected a free port for the service, found: {error.strerror}; stop what "
                "listens there, or choose another with --port N"
            ) from error


def end_by_signals() -> None:
    """End the command by SIGTERM and SIGHUP (its terminal was closed) as by Ctrl-C: with its processes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def running_service(
    store: Path, state: Path, port: int, *options: str, settings: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Start `python -m service` with options and settings (LOCUM_…), wait until it is ready, and stop it at
    the end.

    Raises RuntimeError with the end of its log if it does not become ready, SystemExit if something listens
    on the port already.
    """
    check_port(port)
    state.mkdir(parents=True, exist_ok=True)
    log = state / "service.log"
    command = [sys.executable, "-m", "service", "--store", str(store), "--port", str(port), *options]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LOCUM_STATE_DIR": str(state), **(settings or {})},
            # Ctrl-C reaches the demo alone, which then stops the service in order.
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait_until_ready(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ready = client.get("/health/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            ready = False
        # Another process may have taken the port meanwhile; then it answered, and the service has ended.
        if ready and process.poll() is None:
            return
        time.sleep(0.1)
    log_end = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the service did not become ready; the end of {log}:\n{log_end}")
