"""What the check of a hospital finds, and why a handshake is refused."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from training.network import checking, handshake
from training.network.checking import Finding, Hospital, diagnose
from training.network.handshake import refusal
from training.network.kits import KIT_FILE, Kit, provision
from training.phantom import write_federation

ADDRESS = "localhost:8002"


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory):
    """Kits, made once: each costs a private key."""
    root = tmp_path_factory.mktemp("kits")
    for name in ("ours", "foreign"):
        provision(root / name, "hearts", ADDRESS, ["birch"])
    return root


@pytest.fixture
def root(provisioned, tmp_path):
    return shutil.copytree(provisioned / "ours", tmp_path / "kits")


def findings(hospital: Hospital) -> dict[str, Finding]:
    return {found.part: found for found in diagnose(hospital)}


def at(kit: Path, port: int) -> Kit:
    """The hospital's kit, of an operator at this port."""
    content = json.loads((kit / KIT_FILE).read_text())
    content["address"] = f"localhost:{port}"
    (kit / KIT_FILE).write_text(json.dumps(content))
    return Kit.open(kit, server=False)


@contextmanager
def listening(own: Path, authority: Path) -> Iterator[int]:
    """A port with the certificate of an operator's kit, which takes those of an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / "server.crt", own / "server.key")
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED

    def serve() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            try:
                with line, context.wrap_socket(line, server_side=True) as secured:
                    secured.recv(24)
                    secured.sendall(b"settings")
                    secured.recv(24)
            except OSError:
                continue

    with socket.create_server(("localhost", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_check_finds_a_hospital_in_order(root, tmp_path):
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "data" / "images" / "a.png").write_bytes(b"")
    policy = tmp_path / "policy.yaml"
    policy.write_text("allows: [weights]\nconsents: true\n")
    with listening(root / "server", root / "server/rootCA.pem") as port:
        at(root / "birch", port)
        found = findings(Hospital(root / "birch", tmp_path / "data", policy, device="cpu"))
    assert {each.state for each in found.values()} == {"ok"}
    assert found["kit"].words.startswith("of 'birch' in hearts, complete and valid until ")
    assert found["data"].words.startswith("1 files in images/")
    assert found["policy"].words.endswith(
        "lets weights leave, and consents to the export of this hospital's own model"
    )
    policy.write_text(
        "allows: [weights]\nconsents: true\nprivacy: {kinds: {weights: {clip: 1, noise: 10}}, epsilon: 8}\n"
    )
    alone = findings(Hospital(policy=policy))["policy"].words
    assert alone.endswith("leave, weights with noise alone, which keeps this hospital's own model here")


def test_check_names_what_is_wrong_and_what_to_do(root, tmp_path, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + timedelta(days=3650)

    monkeypatch.setattr(checking, "datetime", Later)
    monkeypatch.setattr(handshake.socket, "create_connection", refused)
    found = findings(Hospital(root / "birch", tmp_path / "none", tmp_path / "none.yaml", device="cuda:99"))
    wrong = {name for name, each in found.items() if each.state == "wrong"}
    assert wrong == {"device", "kit", "data", "policy"}
    assert "cuda:99 is not there" in found["device"].words
    assert "is not valid now" in found["kit"].words
    assert "set the clock" in found["kit"].words
    assert "expected images/ and masks/" in found["data"].words
    assert (found["operator"].state, found["memory"].state) == ("warning", "warning")
    assert "localhost:8002 cannot be reached (refused)" in found["operator"].words


def test_check_finds_that_the_network_engine_is_missing(monkeypatch):
    def version(name):
        if name == "nvflare":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(checking, "version", version)
    software = findings(Hospital(device="cpu"))["software"]
    assert software.state == "wrong"
    assert "the network engine is not installed" in software.words
    assert "pip install -c constraints.txt '.[network]'" in software.words


def test_check_says_once_that_a_folder_is_no_kit(tmp_path):
    found = findings(Hospital(tmp_path, device="cpu"))
    assert (found["kit"].state, found["operator"].state) == ("wrong", "warning")
    assert "it has no kit.json: give the folder that the operator made" in found["kit"].words
    assert found["operator"].words == "not looked at: its address is in the kit, which is wrong"


def refused(*_, **__):
    raise OSError("refused")


def test_handshake_of_a_kit_that_fits_is_taken(root):
    with listening(root / "server", root / "server/rootCA.pem") as port:
        assert refusal(at(root / "birch", port)) is None
        assert findings(Hospital(root / "birch"))["operator"].words.endswith("takes this kit's certificate")


def test_handshake_of_another_generation_says_whose_kit_is_refused(root, provisioned):
    foreign = provisioned / "foreign/server"
    with listening(foreign, foreign / "rootCA.pem") as port:
        why = refusal(at(root / "birch", port))
        assert why is not None
        assert "the operator's certificate is of another authority than this kit" in why
        found = findings(Hospital(root / "birch"))["operator"]
        assert (found.state, found.words) == ("wrong", why)
    with listening(root / "server", foreign / "rootCA.pem") as port:
        why = refusal(at(root / "birch", port))
        assert why is not None
        assert why.startswith("the operator refuses this kit's certificate (")
        assert "python -m training.network renew" in why


def test_handshake_with_something_else_is_said(root):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert "closed the connection" in str(refusal(at(root / "birch", port)))
    with pytest.raises(OSError, match="refused"):
        refusal(at(root / "birch", port))


def test_check_reads_the_data_by_the_task_and_trains_a_step(root, tmp_path):
    data = write_federation(tmp_path / "phantom", ("aster",), patients_per_site=3, size=16)
    here = Hospital(data=data / "aster", task=data / "task.yaml", state=tmp_path / "state", device="cpu")
    found = findings(here)
    assert found["data"].words.startswith("3 cases of 3 patients (organ in 3")
    assert found["step"].state == "ok", found["step"].words
    assert "one step of fedavg on cpu took" in found["step"].words
    assert not (tmp_path / "state").exists()
    next((data / "aster/masks").iterdir()).unlink()
    found = findings(here)
    assert {found["data"].state, found["step"].state} == {"wrong"}


def test_check_tells_the_folder_of_a_federation_from_one_of_a_hospital(tmp_path):
    data = write_federation(tmp_path / "phantom", ("aster", "birch"), patients_per_site=3, size=16)
    found = findings(Hospital(data=data))["data"]
    assert (found.state, "give that of one hospital" in found.words) == ("warning", True)
    assert findings(Hospital(data=data / "aster"))["data"].state == "ok"


def test_check_writes_where_a_run_will_write(tmp_path, monkeypatch):
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    assert findings(Hospital(data=data, state=tmp_path / "state"))["folders"].state == "ok"
    below = findings(Hospital(data=data, state=data / "state"))["folders"]
    assert (below.state, "the data may become read-only" in below.words) == ("warning", True)

    def refused(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checking.tempfile, "NamedTemporaryFile", refused)
    found = findings(Hospital(data=data, state=tmp_path / "state"))["folders"]
    assert found.state == "wrong"
    assert "Read-only file system" in found.words
