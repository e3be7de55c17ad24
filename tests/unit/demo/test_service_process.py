"""The demo's service and other processes that listen on its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from locum.demo import __main__ as demo
from locum.demo import network, service_process
from locum.demo.service_process import free_port, running_service


class _Ready(BaseHTTPRequestHandler):
    """Another service, which is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), _Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_port_of_another_service_ends_the_command_with_one_line(other: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, running_service(tmp_path, tmp_path / "state", other):
        pytest.fail("the client of another service was given")
    assert str(ended.value).startswith(f"port {other}: expected a free port")
    assert "--port N" in str(ended.value)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", [demo.main, network.main])
def test_taken_port_ends_a_demo_before_it_trains(
    command: Callable[..., None], other: int, tmp_path: Path
) -> None:
    kept = tmp_path / "demo" / "kept"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(SystemExit, match=f"port {other}"):
        command(folder=kept.parent, port=other)
    assert [*kept.parent.iterdir()] == [kept]


def test_port_without_a_listener_is_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass
    service_process.check_port(port)


@pytest.mark.process
def test_answer_of_another_process_is_not_taken_for_that_of_a_service_that_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    log = tmp_path / "service.log"
    log.write_text("the port is taken")

    def other(_: httpx.Request) -> httpx.Response:
        process.communicate()  # the service finds the port taken while another process answers
        return httpx.Response(200)

    client = httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(other))
    with pytest.raises(RuntimeError, match="the port is taken"):
        service_process._wait_until_ready(client, process, log)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["terminated", "terminal-closed"])
def test_signal_that_ends_a_demo_ends_its_service(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(
        "import http.server, sys\n"
        "class Ready(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Ready).serve_forever()\n"
    )
    port = free_port()
    command = (
        "import signal; from pathlib import Path; from locum.demo import service_process\n"
        "service_process.end_by_signals()\n"
        f"with service_process.running_service(Path('store'), Path('state'), {port}):\n"
        "    print('ready', flush=True); signal.pause()\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(service_process.__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(number)
        assert started.wait() == 128 + number
    service_process.check_port(port)  # the service has ended, so that nothing listens
