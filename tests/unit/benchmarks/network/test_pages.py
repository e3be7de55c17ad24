"""The pages of the network benchmarks, and the proxy that cuts connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from benchmarks.harness.experiment import Options
from benchmarks.network.cost import NetworkCost
from benchmarks.network.faults import KINDS, NetworkFaults
from benchmarks.network.proxy import Proxy


def test_page_of_faults_names_violations_and_recovery():
    experiment = NetworkFaults(Options(profile="cpu"))
    faults = [{"kind": kind, "recovered_s": 2.0} for kind in KINDS] + [
        {"kind": "connection cut", "recovered_s": None}
    ]
    rows = [
        {"cell": cell, "result": {"faults": faults, "violations": ["odd"]}} for cell in experiment.cells()
    ]
    page = "\n".join(experiment.sections(rows))
    assert "Violated invariants: 5" in page
    assert "- odd" in page
    (cut,) = [line for line in page.splitlines() if line.startswith("| connection cut")]
    assert [field.strip() for field in cut.split("|")[2:-1]] == ["10", "2.0", "2.0", "2.0", "5"]


def test_page_of_costs_has_the_ratios():
    experiment = NetworkCost(Options(profile="cpu"))
    times = {
        f"{side}_s": {"median": value}
        for side, value in {"in_process": 1.0, "bare": 2.0, "network": 3.0}.items()
    }
    found = {**times, "operator_mb": 10, "hospital_mb": 20, "bare_mb": 30}
    rows = [{"cell": cell, "result": found} for cell in experiment.cells()]
    page = "\n".join(experiment.sections(rows))
    assert "1.50" in page
    assert "3.00" in page


@pytest.fixture
def echo():
    """A port that sends back what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(near):
            with near, suppress(OSError):
                while block := near.recv(99):
                    near.sendall(block)

        def serve():
            with suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    threading.Thread(target=answer, args=(near,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def said(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.settimeout(5)
        line.sendall(b"hello")
        return line.recv(99)


def test_proxy_forwards_until_it_is_cut_and_after_it_is_mended(echo):
    proxy = Proxy(echo)
    assert said(proxy.port) == b"hello"
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as line:
        line.sendall(b"hello")
        assert line.recv(99) == b"hello"
        proxy.cut()
        assert line.recv(99) == b""
    with pytest.raises((ConnectionError, AssertionError)):
        assert said(proxy.port) == b"hello"
    proxy.mend()
    assert said(proxy.port) == b"hello"
    proxy.close()
