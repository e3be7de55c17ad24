"""Which of NVFLARE's messages a cell lets in."""

from __future__ import annotations

import pytest

from training.network.cell import CHANNEL, CHUNK, Cell
from training.network.kits import Kit, provision

pytest.importorskip("nvflare")


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
