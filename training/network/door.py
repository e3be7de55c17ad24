"""The operator's port: TLS goes through to the cell, and a hospital that TLS keeps out is heard.

gRPC ends a handshake without a word to the process that listens, and in TLS 1.3 the certificate that it
refuses is encrypted. So the port is the door's, and the cell's is one of this machine:

    a connection's first record     ALPN `locum-kept-out`: a listener of the door, which takes a certificate
    (the ClientHello, RFC 8446)     anything else: the cell; byte by byte, so mutual TLS is between the two

What is said at the door proves nothing, since nothing proves who says it: it is a line for the operator, and
stands in the roster until the hospital is heard.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from training.errors import ConfigurationError
from training.network.cell import Rejected, printable
from training.network.kits import Kit
from training.network.messages import KEPT_OUT, KeptOut, unpack
from training.progress.format import duration

_SECONDS = 10.0  # for the first record of a connection, and for what is said at the door
_HERE = "127.0.0.1"
_PIECE = 2**19
_LONGEST = 2**15
_HANDSHAKE = 0x16  # the type of a TLS record
# gRPC's own for a server: a peer that acknowledges nothing is gone.
_UNACKNOWLEDGED_MS = 20_000
_CLOCKS_DIFFER = timedelta(minutes=5)

# Called with a hospital of the consortium, or None, and a sentence.
Heard = Callable[[str | None, str], None]


class Door:
    """Listens at HOST:PORT for the cell of the operator's kit; `heard` is called in the door's thread."""

    def __init__(self, kit: Kit, address: str, heard: Heard) -> None:
        self._kit = kit
        self._address = address
        self._heard = heard
        self._loop = asyncio.new_event_loop()
        self._opened = ExitStack()
        self._cell = self._own = ("", 0)
        self._lines: set[asyncio.Task[None]] = set()

    def open(self) -> str:
        """Begin to listen; returns the address at which the cell listens.

        Raises ConfigurationError where the port is taken.
        """
        host, _, port = self._address.rpartition(":")
        with ExitStack() as opened:
            opened.callback(self._loop.close)
            try:
                outside = opened.enter_context(socket.create_server((host, int(port)), backlog=128))
            except (OSError, ValueError, OverflowError) as error:
                why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
                raise ConfigurationError(
                    "the operator's cell cannot listen",
                    [f"{self._address}: {why}; free the port, or use --listen"],
                ) from error
            # It keeps the cell's port: gRPC shares it with a socket of the same user that does not listen.
            kept = opened.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.bind((_HERE, 0))
            self._cell = kept.getsockname()
            listens = self._loop.create_task(self._listen(outside))
            thread = threading.Thread(target=self._run, args=(listens,), name="door", daemon=True)
            thread.start()
            opened.callback(thread.join)
            opened.callback(lambda: self._loop.call_soon_threadsafe(listens.cancel))
            self._opened = opened.pop_all()
        return f"{_HERE}:{self._cell[1]}"

    def close(self) -> None:
        """Close all connections."""
        self._opened.close()

    def _run(self, listens: asyncio.Task[None]) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(listens)

    async def _listen(self, outside: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._kit.certificate, self._kit.key)
        context.set_alpn_protocols([KEPT_OUT])
        own = await asyncio.start_server(self._hear, _HERE, 0, ssl=context)
        self._own = own.sockets[0].getsockname()
        outside.setblocking(False)
        try:
            while True:
                line, _ = await self._loop.sock_accept(outside)
                task = self._loop.create_task(self._enter(line))
                self._lines.add(task)
                task.add_done_callback(self._lines.discard)
        finally:
            own.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, line: socket.socket) -> None:
        """Pass a connection on to the cell, or to the door's own listener, until both sides ended it."""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        with line, socket.socket() as inside, suppress(OSError, TimeoutError, EOFError):
            inside.setblocking(False)
            inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_SECONDS):
                first = await self._read(line, 5)
                if first[0] == _HANDSHAKE:
                    first += await self._read(line, int.from_bytes(first[3:5], "big"))
                there = self._own if KEPT_OUT.encode() in first else self._cell
                await self._loop.sock_connect(inside, there)
                await self._loop.sock_sendall(inside, first)
            ways = {
                self._loop.create_task(self._pass_on(line, inside)),
                self._loop.create_task(self._pass_on(inside, line)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _read(self, line: socket.socket, size: int) -> bytes:
        found = b""
        while len(found) < size:
            if not (more := await self._loop.sock_recv(line, size - len(found))):
                raise EOFError
            found += more
        return found

    async def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        piece = memoryview(bytearray(_PIECE))
        while size := await self._loop.sock_recv_into(source, piece):
            await self._loop.sock_sendall(sink, piece[:size])
        sink.shutdown(socket.SHUT_WR)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, Rejected):
            async with asyncio.timeout(_SECONDS):
                size = int.from_bytes(await reader.readexactly(4), "big")
                if size <= _LONGEST:
                    content = size.to_bytes(4, "big") + await reader.readexactly(size)
                    self._heard(*judged(self._kit, unpack(KeptOut, content)[0], datetime.now(UTC)))
                    writer.write(b"\0")
                    await writer.drain()
        writer.close()


def judged(kit: Kit, said: KeptOut, now: datetime) -> tuple[str | None, str]:
    """Which hospital of the consortium TLS keeps out, if one, and why, with what mends it.

    Raises Rejected for what is no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(said.certificate.encode())
        authority, own = (
            x509.load_pem_x509_certificate(path.read_bytes()) for path in (kit.authority, kit.certificate)
        )
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, TypeError) as error:
        raise Rejected("not a certificate") from error
    name = printable(str(names[0].value))[:64] if names else ""
    if name not in kit.content.sites:
        return None, (
            f"a kit of '{name}' was refused: that is no hospital of this consortium; `locum federation "
            "provision --site NAME` makes a kit for one that joins"
        )
    ahead = now - said.clock
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return name, (
            f"its kit, of {certificate.not_valid_before_utc:%Y-%m-%d}, is of another authority, an earlier "
            f"generation: hand over the kit of this consortium, or make a new one (`locum federation revoke "
            f"--site {name}`, then `provision --site {name}`)"
        )
    if certificate.not_valid_after_utc < now:
        return name, (
            f"its certificate ended on {certificate.not_valid_after_utc:%Y-%m-%d}: `locum federation renew "
            f"--site {name}`, and hand client.crt and rootCA.pem over"
        )
    if own.not_valid_after_utc < now:
        return name, (
            f"the operator's certificate ended on {own.not_valid_after_utc:%Y-%m-%d}: `locum federation "
            f"renew`, and start this command again"
        )
    if abs(ahead) > _CLOCKS_DIFFER:
        return name, (
            f"its clock says {said.clock:%Y-%m-%d %H:%M} UTC and differs by "
            f"{duration(abs(ahead.total_seconds()))}: it is set there"
        )
    return name, (
        "its certificate is valid here, so its rootCA.pem or its key is of another kit: hand over a new one "
        f"(`locum federation revoke --site {name}`, then `provision --site {name}`)"
    )
