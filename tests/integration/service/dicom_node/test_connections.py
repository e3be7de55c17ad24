"""What peers can cost the DICOM node: real sockets on loopback, 127.0.0.1 and 127.0.0.2 as two hosts."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian
from pynetdicom import AE
from pynetdicom.association import Association
from pynetdicom.sop_class import Verification  # type: ignore[attr-defined]

from service.dicom_node.configuration import load_node
from service.dicom_node.scp import StorageScp
from service.dicom_node.spool import Spool
from tests.helpers.waiting import wait_for

HERE, THERE = "127.0.0.1", "127.0.0.2"
# pynetdicom's requestors leave the sockets of rejected associations to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Node = Callable[..., StorageScp]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """`node(**fields)`: the listening part of a node with the senders CT1 (HERE) and CT2 (THERE)."""
    with ExitStack() as stack:

        def start(**fields: Any) -> StorageScp:
            content = {
                "ae_title": "LOCUM",
                "port": 0,
                "service": "http://127.0.0.1:9",
                "senders": {
                    "CT1": {"hospital": "dune", "addresses": [HERE]},
                    "CT2": {"hospital": "dune", "addresses": [THERE]},
                },
                "hospitals": {"dune": {"model": "coded", "destination": "pacs"}},
                "destinations": {"pacs": {"ae_title": "PACS", "host": HERE, "port": 9}},
                "idle_seconds": 3600,
                **fields,
            }
            path = tmp_path / "node.yaml"
            path.write_text(yaml.safe_dump(content))
            configuration = load_node(path)
            spool = Spool(tmp_path / "queue", configuration.max_queue_bytes)
            stack.callback(spool.close)
            scp = StorageScp(configuration, spool)
            stack.callback(scp.close)
            return scp

        yield start


def associate(scp: StorageScp, title: str = "CT1", address: str = HERE) -> Association:
    ae = AE(title)
    ae.add_requested_context(Verification)
    ae.add_requested_context(CTImageStorage, [ExplicitVRLittleEndian])
    return ae.associate(HERE, scp.port, ae_title="LOCUM", bind_address=(address, 0))


def echoes(scp: StorageScp, title: str = "CT1", address: str = HERE) -> bool:
    """Whether an association is accepted, and C-ECHO answered."""
    with connect(scp, address) as line:
        line.sendall(_request(title))
        if _received(line)[0] != 2:  # A-ASSOCIATE-AC
            return False
        line.sendall(data(3, _echo_request(1)))
        answered = _received(line)[0] == 4  # P-DATA-TF
        line.sendall(struct.pack(">BBLL", 5, 0, 4, 0))
        return answered and _received(line)[0] == 6  # A-RELEASE-RP


def connect(scp: StorageScp, address: str = HERE) -> socket.socket:
    return socket.create_connection((HERE, scp.port), timeout=60, source_address=(address, 0))


def drip(line: socket.socket, patience_s: float = 60) -> bool:
    """Send a byte now and then until the peer ends the connection; whether it does."""
    until = time.monotonic() + patience_s
    line.settimeout(0.1)
    while time.monotonic() < until:
        try:
            line.sendall(b"\0")
            if line.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def flood(line: socket.socket, piece: bytes, most: int) -> int:
    """Send pieces until the peer ends the connection, at most `most` bytes; return what was sent."""
    sent = 0
    line.settimeout(60)
    try:
        while sent < most:
            line.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


def data(control: int, content: bytes) -> bytes:
    """A P-DATA-TF PDU with one fragment (PS3.8 9.3.5)."""
    item = struct.pack(">LBB", len(content) + 2, 1, control) + content
    return struct.pack(">BBL", 4, 0, len(item)) + item


def raw(association: Association) -> socket.socket:
    assert association.dul.socket is not None
    found = association.dul.socket.socket
    assert found is not None
    return found


@pytest.mark.parametrize("beginning", [b"", b"\x01\x00\x00\x00\x10\x00half"], ids=["silent", "in a request"])
def test_thirteen_slow_connections_do_not_keep_a_scanner_out(node: Node, beginning: bytes) -> None:
    scp = node()
    with ExitStack() as stack:
        for _ in range(13):
            stack.enter_context(connect(scp)).sendall(beginning)
        assert echoes(scp)
        assert echoes(scp, "CT2", THERE)


def test_more_silent_connections_than_are_kept_end_the_oldest_of_their_address(node: Node) -> None:
    scp = node()
    with ExitStack() as stack:
        quiet = stack.enter_context(connect(scp, THERE))
        lines = [stack.enter_context(connect(scp)) for _ in range(60)]
        assert lines[0].recv(1) == b""
        wait_for(lambda: echoes(scp))
        wait_for(lambda: echoes(scp, "CT2", THERE))
        quiet.settimeout(0.2)
        with pytest.raises(TimeoutError):
            quiet.recv(1)


def test_request_that_drips_ends_at_its_deadline(node: Node) -> None:
    scp = node(idle_seconds=1)
    with connect(scp) as line:
        line.sendall(b"\x01\x00\x00\x00\x10\x00")
        assert drip(line)


def test_pdu_that_drips_ends_at_its_deadline(node: Node) -> None:
    scp = node(idle_seconds=1)
    association = associate(scp)
    assert association.is_established
    raw(association).sendall(data(1, bytes(1000))[:20])
    assert drip(raw(association).dup())
    association.abort()


def test_command_set_beyond_64_kib_ends_the_association(node: Node) -> None:
    scp = node()
    association = associate(scp)
    assert association.is_established
    assert flood(raw(association).dup(), data(1, bytes(2**14)), 2**25) < 2**25
    association.abort()


def test_command_sets_after_one_another_are_each_within_the_limit(node: Node) -> None:
    with connect(node()) as line:
        line.sendall(_request("CT1"))
        assert _received(line)[0] == 2  # A-ASSOCIATE-AC
        for number in range(8):
            line.sendall(data(3, _echo_request(number)))
            assert _received(line)[0] == 4  # P-DATA-TF
        line.sendall(struct.pack(">BBLL", 5, 0, 4, 0))
        assert _received(line)[0] == 6  # A-RELEASE-RP


def _received(line: socket.socket) -> bytes:
    """The next PDU."""
    with line.makefile("rb", buffering=0) as stream:
        found = bytearray()
        while len(found) < 6 or len(found) < 6 + int.from_bytes(found[2:6], "big"):
            wanted = 6 if len(found) < 6 else 6 + int.from_bytes(found[2:6], "big")
            piece = stream.read(wanted - len(found))
            assert piece, "the connection has ended"
            found += piece
    return bytes(found)


def _echo_request(number: int) -> bytes:
    """A C-ECHO-RQ (PS3.7 9.3.5.1) with a comment of 16 KiB, in Implicit VR Little Endian."""

    def element(tag: int, value: bytes) -> bytes:
        return struct.pack("<HHL", 0, tag, len(value)) + value

    elements = (
        element(0x0002, b"1.2.840.10008.1.1\0")
        + element(0x0100, struct.pack("<H", 0x0030))
        + element(0x0110, struct.pack("<H", number))
        + element(0x0800, struct.pack("<H", 0x0101))
        + element(0x0902, b"x" * 2**14)
    )
    return element(0x0000, struct.pack("<L", len(elements))) + elements


def test_peer_from_an_address_of_no_sender_is_closed_at_once(node: Node) -> None:
    scp = node(senders={"CT2": {"hospital": "dune", "addresses": [THERE]}})
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(50):
            # The rest, of what is sent, is in buffers of the system.
            assert flood(stack.enter_context(connect(scp)), bytes(2**16), 2**26) < 2**26
        assert threading.active_count() == before
        assert echoes(scp, "CT2", THERE)


def test_title_of_another_address_is_rejected_and_costs_no_memory(node: Node) -> None:
    scp = node()
    association = associate(scp, "CT2", HERE)
    assert association.is_rejected
    with connect(scp) as line:
        line.sendall(_request("CT2"))
        assert line.recv(1) == b"\x03"  # A-ASSOCIATE-RJ
        assert flood(line, data(1, bytes(2**14)), 2**25) < 2**25
    assert echoes(scp)


def _request(title: str) -> bytes:
    """An A-ASSOCIATE-RQ for Verification (PS3.8 9.3.2)."""

    def item(kind: int, content: bytes) -> bytes:
        return struct.pack(">BBH", kind, 0, len(content)) + content

    context = item(0x30, b"1.2.840.10008.1.1") + item(0x40, b"1.2.840.10008.1.2")
    items = (
        item(0x10, b"1.2.840.10008.3.1.1.1")
        + item(0x20, b"\1\0\0\0" + context)
        + item(0x50, item(0x51, struct.pack(">L", 2**14)) + item(0x52, b"1.2.3"))
    )
    body = struct.pack(">HH16s16s32x", 1, 0, b"LOCUM".ljust(16), title.encode().ljust(16)) + items
    return struct.pack(">BBL", 1, 0, len(body)) + body


def test_an_address_has_a_share_of_the_associations(node: Node) -> None:
    scp = node(max_associations=3, max_associations_per_address=2)
    held = [associate(scp), associate(scp)]
    assert all(each.is_established for each in held)
    refused = associate(scp)
    assert refused.is_rejected
    assert refused.acceptor.primitive is not None
    assert refused.acceptor.primitive.result == 2  # transient
    assert echoes(scp, "CT2", THERE)
    held.pop().release()
    wait_for(lambda: echoes(scp))
    held.pop().release()


def test_connection_for_which_there_is_no_thread_is_closed_and_takes_no_place(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    scp = node(max_associations=1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) == scp._server.process_request_thread:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        # More than the places that there are.
        for _ in range(40):
            with connect(scp) as line:
                line.settimeout(60)
                assert line.recv(1) == b""
    assert scp._server.connections() == []
    assert echoes(scp)
