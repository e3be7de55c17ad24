"""A member of the consortium misuses its certificate and NVFLARE's other channels."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.forked import Forked, run
from benchmarks.network.consortium import Consortium
from training.network.kits import provision
from training.phantom.federation import TASK


@pytest.fixture(scope="module")
def consortium(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "data").mkdir()
    TASK.dump(root / "data" / "task.yaml")
    with Consortium(root, root / "data", ("birch", "cedar"), begin=Forked) as made:
        made.start_operator("--method", "fedavg").wait_for("listening on")
        yield made


def attack(kit, address, seconds) -> subprocess.CompletedProcess[str]:
    return run("tests.helpers.training.hostile_cell", kit, address, seconds)


def test_only_its_own_requests_of_bytes_are_served(consortium):
    done = attack(consortium.root / "kits" / "birch", f"localhost:{consortium.port}", 60)
    answers = json.loads(done.stdout.splitlines()[-1])
    served = {name for name, answer in answers.items() if answer == "ok"}
    assert served == {"own name", "still served"}, done.stderr


def test_certificate_of_one_hospital_cannot_claim_another(consortium):
    kits = consortium.root / "kits"
    # The folder's name is the name that the cell claims; the certificate is birch's.
    claimed = consortium.root / "cedar"
    claimed.mkdir()
    for file in ("client.crt", "client.key", "rootCA.pem"):
        (claimed / file).write_bytes((kits / "birch" / file).read_bytes())
    # Each of the ten attempts after them waits for an answer, too.
    done = attack(claimed, f"localhost:{consortium.port}", 2)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert "ok" not in answers.values()


def greeting(consortium: Consortium, kit: Path | None) -> bytes:
    """The first bytes that the operator sends by HTTP/2 over TLS; none where it closes the connection."""
    context = ssl.create_default_context(cafile=consortium.root / "kits" / "birch" / "rootCA.pem")
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(kit / "client.crt", kit / "client.key")
    try:
        with (
            socket.create_connection(("localhost", consortium.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as line,
        ):
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + b"\0" * 5)
            return line.recv(9)
    except (ConnectionError, ssl.SSLError):
        return b""


def test_connection_without_a_certificate_of_the_consortium_is_closed(consortium, tmp_path):
    foreign = provision(tmp_path / "foreign", "loopback", f"localhost:{consortium.port}", ["birch"])
    assert greeting(consortium, consortium.root / "kits" / "birch") != b""
    assert greeting(consortium, None) == b""
    assert greeting(consortium, foreign["birch"]) == b""
