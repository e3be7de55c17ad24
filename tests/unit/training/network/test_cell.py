"""Which of NVFLARE's messages a cell lets in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from locum.demo.service_process import free_port
from training.network.cell import CHANNEL, CHUNK, Cell
from training.network.kits import Kit, provision

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", ["birch"])
    return root


def message(payload=b"{}", peer="birch.1a", certificate="birch", **changes):
    """A request of birch to the operator, with changed headers."""
    from nvflare.fuel.f3.cellnet.defs import Encoding, MessageHeaderKey, MessagePropKey, MessageType
    from nvflare.fuel.f3.endpoint import Endpoint
    from nvflare.fuel.f3.message import Message

    headers = {
        "ORIGIN": "birch.1a",
        "DESTINATION": "server",
        "CHANNEL": CHANNEL,
        "TOPIC": "next",
        "MSG_TYPE": MessageType.REQ,
        "PAYLOAD_ENCODING": Encoding.BYTES,
    } | changes
    made = Message({getattr(MessageHeaderKey, name): value for name, value in headers.items()}, payload)
    made.set_prop(MessagePropKey.ENDPOINT, Endpoint(peer))
    made.set_prop(MessagePropKey.COMMON_NAME, certificate)
    return made


def passes(kits, made) -> bool:
    cell = Cell(Kit.open(kits / "server", server=True), lambda *_: b"")
    return cell._screen(made) is None


def test_request_of_bytes_from_its_own_connection_passes(kits):
    assert passes(kits, message())
    assert passes(kits, message(payload=b"x" * CHUNK))


@pytest.mark.parametrize(
    "changes",
    [
        {"certificate": "cedar"},
        {"certificate": None},
        {"peer": "cedar.1a"},
        {"ORIGIN": "cedar.1a"},
        {"ORIGIN": "birch.1b"},
        {"ORIGIN": "server"},
        {"DESTINATION": "cedar"},
        {"DESTINATION": "server.job"},
        {"CHANNEL": "server_command"},
        {"CHANNEL": "cellnet.channel", "TOPIC": "bulk"},
        {"CHANNEL": "credential_manager", "TOPIC": "key_exchange"},
        {"PAYLOAD_ENCODING": "fobs"},
        {"ENCRYPTED": True},
        {"payload": b"x" * (CHUNK + 2**20 + 1)},
    ],
)
def test_any_other_message_is_dropped(kits, changes):
    assert not passes(kits, message(**changes))


def test_objects_are_dropped_before_nvflare_decodes_them(kits):
    """NVFLARE decodes a payload after the incoming filters; if it did before, the screen came too late."""
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell

    names = CoreCell._process_received_msg.__code__.co_names
    assert names.index("in_filter_reg") < names.index("_process_request")
    assert "decode_payload" not in names


@pytest.mark.process
def test_a_file_in_the_current_folder_does_not_configure_nvflare(tmp_path):
    """NVFLARE would obey it, and search every folder below for it: minutes in a home directory."""
    provision(tmp_path / "kits", "hearts", f"localhost:{free_port()}", ["birch"])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/comm_config.json").write_text('{"heartbeat_interval": 86399}')
    code = """if True:
        import os, sys
        from pathlib import Path
        from nvflare.fuel.f3.comm_config import CommConfigurator
        from training.network.cell import Cell
        from training.network.kits import Kit

        cell = Cell(Kit.open(Path(sys.argv[1]), server=True), lambda *_: b"")
        cell.start()
        print(CommConfigurator().get_config(), flush=True)
        os._exit(0)  # NVFLARE's threads outlive the cell.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kits/server")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None"]
