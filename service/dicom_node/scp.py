"""The node's Storage SCP (PS3.4 annex B) and Verification SCP, for the senders of the configuration.

Who may connect is decided before anything is kept: the address when the connection is accepted, address and
AE title together when the association is requested. C-STORE is answered with success when the object is on
the disk. Memory and time are bounded: a request, a PDU, a command set, an object and the number of
associations have a limit each, which is compared before anything of that size is read, and a request and
a PDU have a deadline.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from socketserver import BaseServer
from typing import Any

from pydicom.uid import DeflatedExplicitVRLittleEndian
from pynetdicom import AE, AllStoragePresentationContexts, evt
from pynetdicom.association import Association
from pynetdicom.events import Event
from pynetdicom.sop_class import Verification  # type: ignore[attr-defined]
from pynetdicom.transport import ThreadedAssociationServer

from model_store.scan import TRANSFER_SYNTAXES, Limits, read_dataset
from service.dicom_node.configuration import NodeConfiguration, Sender
from service.dicom_node.spool import Spool
from service.errors import DiskFull

# It writes AE titles, addresses and attributes into the log.
logging.getLogger("pynetdicom").setLevel(logging.CRITICAL + 1)
_log = logging.getLogger("locum.node")

# Statuses of C-STORE and C-ECHO (PS3.4 B.2.3, PS3.7 annex C).
SUCCESS, NO_RESOURCES, MISMATCH, NOT_UNDERSTOOD = 0x0000, 0xA700, 0xA900, 0xC000
# Result, source and diagnostic of A-ASSOCIATE-RJ (PS3.8 9.3.4).
_CALLING_UNKNOWN, _CALLED_UNKNOWN, _LIMIT_EXCEEDED = (1, 1, 3), (1, 1, 7), (2, 3, 2)

_PDU_BYTES = 2**17
# An A-ASSOCIATE-RQ, which no maximum length bounds, with all its presentation contexts.
_MOST_PDU_BYTES = 2**20
_MOST_COMMAND_BYTES = 2**16
_OBJECT_OVERHEAD = 2**20
# Connections without an admitted association.
_MOST_PENDING = 16
_P_DATA = 4
_PDU_TYPES = range(1, 8)
_REPEAT_SECONDS = 60.0
_NO_SCAN = ("Video", "Whole Slide", "Tiled")

SOP_CLASSES = tuple(
    str(context.abstract_syntax)
    for context in AllStoragePresentationContexts
    if context.abstract_syntax is not None
    and "Image Storage" in context.abstract_syntax.name
    and not any(word in context.abstract_syntax.name for word in _NO_SCAN)
)
# A deflated object would be inflated to be read: a few bytes can become gigabytes. A sender that has one must
# propose a syntax that is not deflated beside it (PS3.5 10.1).
_SYNTAXES = [syntax for syntax in TRANSFER_SYNTAXES if syntax != DeflatedExplicitVRLittleEndian]


class StorageScp:
    """The listening node. `open_series` are those that an association in progress has sent objects of."""

    def __init__(self, node: NodeConfiguration, spool: Spool) -> None:
        """Listen. Raises OSError if the port or a certificate cannot be used."""
        self._node, self._spool = node, spool
        ae = AE(node.ae_title)
        # `_requested` compares the number of associations, which pynetdicom counts with those that wait.
        ae.maximum_associations = node.max_associations + 2 * _MOST_PENDING
        ae.maximum_pdu_size = _PDU_BYTES
        ae.acse_timeout = ae.network_timeout = ae.dimse_timeout = node.idle_seconds
        ae.add_supported_context(Verification)
        for sop_class in SOP_CLASSES:
            ae.add_supported_context(sop_class, _SYNTAXES)
        context = None if node.tls is None else node.tls.server_context()
        handlers: Any = [
            (evt.EVT_CONN_OPEN, self._opened),
            (evt.EVT_CONN_CLOSE, self._closed),
            (evt.EVT_REQUESTED, self._requested),
            (evt.EVT_C_ECHO, self._echo),
            (evt.EVT_C_STORE, self._store),
        ]
        server = ae.make_server((node.host, node.port), evt_handlers=handlers, server_class=_Server)
        assert isinstance(server, _Server)
        self._server = server
        self._server.prepare(node, context)
        self._thread = threading.Thread(target=self._server.serve_forever, name="dicom-scp", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    @property
    def open_series(self) -> set[str]:
        """Keys of the spool."""
        return set().union(*(connection.series for connection in self._server.connections()))

    def close(self) -> None:
        """End every association. An object that was not acknowledged is the sender's to send again."""
        BaseServer.shutdown(self._server)
        self._server.server_close()
        for connection in self._server.connections():
            if connection.association is not None and connection.association.is_established:
                connection.association.abort()
            connection.end()
        self._thread.join(30)

    # ------------------------------------------------------------------ handlers of pynetdicom

    def _opened(self, event: Event) -> None:
        transport = event.assoc.dul.socket
        assert transport is not None
        connection = self._server.connection(transport.socket)
        connection.association = event.assoc
        connection.read_by(transport.recv)
        transport.recv = connection.recv  # type: ignore[assignment, method-assign]

    def _closed(self, event: Event) -> None:
        association = event.assoc
        if association.requestor.primitive is None and association.dul.to_user_queue.empty():
            # pynetdicom waits the whole timeout for the request of a peer that is gone, as port scanners and
            # probes of load balancers are, and counts it among the associations. None ends the wait.
            association.dul.to_user_queue.put(None)  # type: ignore[arg-type]

    def _requested(self, event: Event) -> None:
        """Reject an association of no sender, or beyond the limits, before it is accepted."""
        association, connection = event.assoc, self._server.connection_of(event.assoc)
        request = association.requestor.primitive
        assert request is not None
        title = str(request.calling_ae_title).strip()
        sender = self._node.senders.get(title)
        if sender is None or not sender.admits(connection.address):
            if sender is not None:
                self._server.say("AE %s is not accepted from its address", title)
            rejection = _CALLING_UNKNOWN
        elif str(request.called_ae_title).strip() != self._node.ae_title:
            rejection = _CALLED_UNKNOWN
        elif not self._server.admit(connection):
            rejection = _LIMIT_EXCEEDED
        else:
            return
        association.acse.send_reject(*rejection)
        association.kill()

    def _sender(self, event: Event) -> Sender:
        """The sender of an admitted association."""
        request = event.assoc.requestor.primitive
        assert request is not None
        return self._node.senders[str(request.calling_ae_title).strip()]

    def _echo(self, event: Event) -> int:
        self._server.connection_of(event.assoc).begin_message()
        return SUCCESS

    def _store(self, event: Event) -> int:
        connection, sender = self._server.connection_of(event.assoc), self._sender(event)
        connection.begin_message()
        try:
            content = event.encoded_dataset()
            header = read_dataset(content, Limits(), "the object", pixels=False)
            series, instance = str(header.SeriesInstanceUID), str(header.SOPInstanceUID)
            announced = str(event.request.AffectedSOPInstanceUID)  # type: ignore[union-attr]
        except Exception as error:  # pydicom raises a dozen unrelated types
            _log.warning("an object for %s cannot be read: %s", sender.hospital, type(error).__name__)
            return NOT_UNDERSTOOD
        if instance != announced or not series:
            return MISMATCH
        try:
            key = self._spool.add(sender.hospital, series, instance, content)
        except (DiskFull, OSError) as error:
            _log.error("an object for %s is not accepted: %s", sender.hospital, _said(error))
            return NO_RESOURCES
        connection.series = connection.series | {key}
        return SUCCESS


class _Server(ThreadedAssociationServer):
    """Knows every connection from its acceptance to the end of its threads.

    The TLS handshake is done in the connection's own thread, so that a slow peer stops no other.
    """

    # What `close` leaves behind ends with the process.
    daemon_threads = True

    def prepare(self, node: NodeConfiguration, context: ssl.SSLContext | None) -> None:
        self._node, self._tls = node, context
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._said: dict[str, float] = {}

    def say(self, message: str, *arguments: object) -> None:
        """Log a warning that peers can cause, at most once a minute."""
        now, line = time.monotonic(), message % arguments
        if now - self._said.get(line, -math.inf) >= _REPEAT_SECONDS:
            self._said[line] = now
            _log.warning(line)

    def connections(self) -> list[_Connection]:
        with self._lock:
            return [*self._connections.values()]

    def connection(self, request: Any) -> _Connection:
        with self._lock:
            return self._connections[request]

    def connection_of(self, association: Association) -> _Connection:
        (found,) = (each for each in self.connections() if each.association is association)
        return found

    def admit(self, connection: _Connection) -> bool:
        """Let an association begin if there is room for it, and for its address."""
        with self._lock:
            admitted = [each.address for each in self._connections.values() if each.admitted]
            room = len(admitted) < self._node.max_associations
            share = admitted.count(connection.address) < self._node.most_per_address
            if room and share:
                connection.admit()
            return room and share

    # ------------------------------------------------------------------ of the accepting thread

    def verify_request(self, request: Any, client_address: Any) -> bool:
        address = str(client_address[0])
        if not any(sender.admits(address) for sender in self._node.senders.values()):
            self.say("a connection is closed: its address is that of no sender")
            return False
        with self._lock:
            if len(self._connections) >= self._node.max_associations + 2 * _MOST_PENDING:
                return False
            try:
                self._connections[request] = _Connection(request, address, self._node)
            except OSError:  # no descriptor is left
                return False
            pending = [each for each in self._connections.values() if not each.admitted and not each.ended]
            if len(pending) > _MOST_PENDING:
                # The oldest, since requests take milliseconds, of the address that has most of them.
                ((crowded, _),) = Counter(each.address for each in pending).most_common(1)
                min(
                    (each for each in pending if each.address == crowded), key=lambda each: each.deadline
                ).end()
        return True

    def service_actions(self) -> None:
        super().service_actions()
        now = time.monotonic()
        for connection in self.connections():
            if connection.deadline < now and not connection.ended:
                self.say("a connection is ended: a request or PDU took longer than `idle_seconds`")
                connection.end()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread; where there can be none, the connection ends here."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self.say("a connection is closed: the system gives no thread for it")
            connection = self.connection(request)
            self._forget(connection)
            self.shutdown_request(request)
            connection.close()

    # ------------------------------------------------------------------ of the connection's thread

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        connection = self.connection(request)
        try:
            if self._tls is not None:
                accepted, request = request, self._tls.wrap_socket(request, server_side=True)
                with self._lock:
                    self._connections[request] = self._connections.pop(accepted)
            self.finish_request(request, client_address)
            if connection.association is not None:
                connection.association.join()
                connection.association.dul.join()
        except Exception as error:  # `ssl` raises several kinds in a handshake that is ended
            _log.debug("a connection ends: %s", type(error).__name__)
        finally:
            self._forget(connection)
            self.shutdown_request(request)
            connection.close()

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections = {
                key: value for key, value in self._connections.items() if value is not connection
            }


class _Connection:
    """One connection: until when it must go on, how many bytes it may send, and the series that it sent.

    A connection that is not admitted has one deadline from its beginning, and sends no more than a request.
    An admitted one has a deadline for each PDU.
    """

    def __init__(self, request: socket.socket, address: str, node: NodeConfiguration) -> None:
        self.address = address
        self.series: frozenset[str] = frozenset()
        self.association: Association | None = None
        self.admitted = self.ended = False
        self._seconds, self._most = node.idle_seconds, node.max_object_bytes + _OBJECT_OVERHEAD
        # A peer that takes no answer would keep its thread for ever.
        request.settimeout(node.idle_seconds)
        self.deadline = time.monotonic() + self._seconds
        # It ends the connection from any thread, whatever TLS makes of the accepted socket.
        self._line = request.dup()
        self._left, self._command = _MOST_PDU_BYTES + 6, 0
        self._is_header = True

    def read_by(self, recv: Callable[[int], bytearray]) -> None:
        """Set what reads so many bytes."""
        self._recv = recv

    def admit(self) -> None:
        """Lift the deadline and the limit of a request."""
        self.admitted, self.deadline = True, math.inf
        self.begin_message()

    def begin_message(self) -> None:
        """Count the bytes of a message from now on: the one before it is complete."""
        self._left, self._command = self._most, 0

    def end(self) -> None:
        """End it: what reads or writes fails."""
        self.ended = True
        with suppress(OSError):  # where it has ended
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket."""
        self._line.close()

    def recv(self, size: int) -> bytearray:
        """Read a PDU's header, then its body. pynetdicom takes an OSError for a closed connection."""
        self._take(size)
        if self._is_header:
            if self.admitted:
                self.deadline = time.monotonic() + self._seconds
            header = self._recv(size)
            # pynetdicom reads no body of another type.
            self._is_header = header[:1] not in [bytes([kind]) for kind in _PDU_TYPES]
            self._kind = header[0] if header else 0
            return header
        body = self._recv(size)
        self._is_header = True
        if self.admitted:
            self.deadline = math.inf
            if self._kind == _P_DATA:
                self._count_command(body)
        return body

    def _take(self, size: int) -> None:
        self._left -= size
        if size > _MOST_PDU_BYTES or self._left < 0 or self._command > _MOST_COMMAND_BYTES:
            _log.warning("an association is ended: it sends more than is accepted")
            raise ConnectionAbortedError("more than is accepted")

    def _count_command(self, body: bytearray) -> None:
        """Add up the fragments of a command set (PS3.8 9.3.5.1, annex E.2)."""
        at = 0
        while at + 6 <= len(body):
            length = int.from_bytes(body[at : at + 4], "big")
            self._command += length if body[at + 5] & 1 else 0
            at += 4 + length
        self._take(0)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, DiskFull) else type(error).__name__
