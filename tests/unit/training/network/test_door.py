"""The operator's port: bytes pass through to the cell, and a hospital that TLS keeps out is heard."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.helpers.training.certificates import end
from training.errors import ConfigurationError, TrainingError
from training.network import handshake
from training.network.cell import Rejected
from training.network.door import Door, judged
from training.network.kits import KIT_FILE, Kit, certificates, provision
from training.network.messages import KEPT_OUT, KeptOut
from training.network.roster import Roster, rows

SITES = ("aster", "birch")


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kits")
    provision(root / "ours", "hearts", "localhost:8002", SITES)
    provision(root / "foreign", "hearts", "localhost:8002", [*SITES, "elm"])
    return root


@pytest.fixture
def root(provisioned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(provisioned, tmp_path / "kits"))


@pytest.fixture
def own(root: Path) -> Kit:
    return Kit.open(root / "ours/server", server=True)


def at(kit: Path, address: str) -> Kit:
    """A hospital's kit, of an operator at this address."""
    content = json.loads((kit / KIT_FILE).read_text())
    (kit / KIT_FILE).write_text(json.dumps(content | {"address": address}))
    return Kit.open(kit, server=False)


def said(kit: Path, **changes: object) -> KeptOut:
    content = KeptOut(certificate=(kit / "client.crt").read_text(), clock=datetime.now(UTC))
    return content.model_copy(update=changes)


def ended(line: socket.socket) -> bool:
    """Wait for the other side to end a connection without a word."""
    try:
        return line.recv(1) == b""
    except (ConnectionError, ssl.SSLEOFError):
        return True


class Heard:
    """What a door said to the operator."""

    def __init__(self) -> None:
        self.lines: list[tuple[str | None, str]] = []

    def __call__(self, site: str | None, why: str) -> None:
        self.lines.append((site, why))


@contextmanager
def door(own: Kit, heard: Heard) -> Iterator[tuple[str, str]]:
    """An open door; its address, and that of its cell."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    made = Door(own, address, heard)
    inside = made.open()
    try:
        yield address, inside
    finally:
        made.close()


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextmanager
def listening(inside: str) -> Iterator[socket.socket]:
    """Listen where the cell does, which shares the port with the door's reservation."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(split(inside))
        server.listen()
        yield server


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x00\x02hi", b"no TLS"])
def test_bytes_pass_through_in_both_directions_until_either_side_ends(own: Kit, first: bytes) -> None:
    content = bytes(range(256)) * 40_000

    def serve(server: socket.socket) -> None:
        line, _ = server.accept()
        with line:
            found = b""
            while piece := line.recv(2**16):
                found += piece
            line.sendall(found[::-1])

    with door(own, Heard()) as (address, inside), listening(inside) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        with socket.create_connection(split(address), 20) as line:
            line.sendall(first + content)
            line.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := line.recv(2**16):
                answer += piece
        thread.join(20)
    assert answer == (first + content)[::-1]


def test_connection_ends_where_the_cell_does_not_listen(own: Kit) -> None:
    with door(own, Heard()) as (address, _), socket.create_connection(split(address), 20) as line:
        line.sendall(b"no TLS")
        assert ended(line)


def test_port_that_is_taken_is_named(own: Kit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="cell cannot listen") as error:
            Door(own, address, Heard()).open()
    assert "ddress already in use; free the port, or use --listen" in str(error.value)


def test_kit_of_another_authority_is_heard_by_the_hospitals_name(root: Path, own: Kit) -> None:
    heard = Heard()
    with door(own, heard) as (address, _):
        handshake.complain(at(root / "foreign/aster", address))
        handshake.complain(at(root / "foreign/elm", address))
    (site, why), (stranger, whom) = heard.lines
    assert site == "aster"
    assert f"its kit, of {datetime.now(UTC):%Y-%m-%d}, is of another authority" in why
    assert "`locum federation revoke --site aster`, then `provision --site aster`" in why
    assert stranger is None
    assert "a kit of 'elm' was refused: that is no hospital of this consortium" in whom


def test_certificate_that_ended_is_heard_before_the_hospital_says_so(root: Path, own: Kit) -> None:
    heard, ended = Heard(), end(root / "ours", "aster")
    with door(own, heard) as (address, _), pytest.raises(TrainingError, match="is not valid now"):
        handshake.check(at(root / "ours/aster", address))
    ((site, why),) = heard.lines
    assert site == "aster"
    assert why.startswith(f"its certificate ended on {ended:%Y-%m-%d}: `locum federation renew --site aster`")


def test_operator_that_is_away_or_has_no_door_costs_nothing(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kit = at(root / "ours/aster", f"127.0.0.1:{server.getsockname()[1]}")
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        handshake.complain(kit)
    handshake.complain(kit)


@pytest.mark.parametrize("content", [b"\0\0\0\4{}{}", b"\xff\xff\xff\xff", b"\0\0\0\2{}"])
def test_what_is_no_message_is_dropped(own: Kit, content: bytes) -> None:
    heard = Heard()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([KEPT_OUT])
    with (
        door(own, heard) as (address, _),
        socket.create_connection(split(address), 20) as line,
        context.wrap_socket(line) as secured,
    ):
        secured.sendall(content)
        assert ended(secured)
    assert heard.lines == []


def test_reason_is_what_the_operators_own_files_say(root: Path, own: Kit) -> None:
    now, aster = datetime.now(UTC), root / "ours/aster"
    assert "hand over a new one" in judged(own, said(aster), now)[1]
    slow = said(aster, clock=now - timedelta(days=400))
    assert "and differs by" in judged(own, slow, now)[1]
    later = now + timedelta(days=361)
    assert judged(own, said(aster, clock=later), later)[1].startswith("its certificate ended on ")
    assert judged(own, said(root / "foreign/aster"), later)[1].startswith("its kit, of ")
    for damaged in ("", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(Rejected, match="not a certificate"):
            judged(own, said(aster, certificate=damaged), now)


def test_roster_has_the_reason_until_the_hospital_is_heard(root: Path, own: Kit) -> None:
    def state() -> str:
        return {row.site: row.state for row in rows(own, certificates(root / "ours"))}["aster"]

    roster = Roster(own)
    assert roster.kept_out("aster", "its certificate ended") == "aster cannot connect: its certificate ended"
    assert roster.kept_out("aster", "its certificate ended") is None
    assert state() == "mend why it cannot connect: its certificate ended"
    assert roster.kept_out(None, "a kit of 'elm' was refused") == "a kit of 'elm' was refused"
    assert roster.kept_out(None, "a kit of 'elm' was refused") is None
    assert sum(roster.kept_out(None, str(number)) is not None for number in range(100)) < 20
    roster.heard("aster")
    assert state() == "ready"
