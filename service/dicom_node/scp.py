"""The node's Storage SCP (PS3.4 annex B) and Verification SCP, for the senders of the configuration.

C-STORE is answered with success when the object is on the disk. Memory is bounded: a PDU, an object and the
number of associations have a limit each, which is compared before anything of that size is read.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from ipaddress import ip_address, ip_network
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
SUCCESS, NOT_AUTHORIZED, NO_RESOURCES, MISMATCH, NOT_UNDERSTOOD = 0x0000, 0x0124, 0xA700, 0xA900, 0xC000

_PDU_BYTES = 2**17
# An A-ASSOCIATE-RQ, which no maximum length bounds, with all its presentation contexts.
_MOST_PDU_BYTES = 2**20
_OBJECT_OVERHEAD = 2**20
_FOR_HANDSHAKES = 16
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
        self._lock = threading.Lock()
        self._peers: dict[Association, _Peer] = {}
        ae = AE(node.ae_title)
        ae.maximum_associations = node.max_associations
        ae.maximum_pdu_size = _PDU_BYTES
        ae.acse_timeout = ae.network_timeout = ae.dimse_timeout = node.idle_seconds
        ae.require_called_aet = True
        ae.require_calling_aet = list(node.senders)
        ae.add_supported_context(Verification)
        for sop_class in SOP_CLASSES:
            ae.add_supported_context(sop_class, _SYNTAXES)
        context = None if node.tls is None else node.tls.server_context()
        handlers: Any = [
            (evt.EVT_CONN_OPEN, self._opened),
            (evt.EVT_CONN_CLOSE, self._closed),
            (evt.EVT_C_ECHO, self._echo),
            (evt.EVT_C_STORE, self._store),
        ]
        server = ae.make_server((node.host, node.port), evt_handlers=handlers, server_class=_Server)
        assert isinstance(server, _Server)
        self._server = server
        self._server.prepare(context, node.idle_seconds, node.max_associations + _FOR_HANDSHAKES)
        self._thread = threading.Thread(target=self._server.serve_forever, name="dicom-scp", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    @property
    def open_series(self) -> set[str]:
        """Keys of the spool."""
        with self._lock:
            return set().union(*(peer.series for peer in self._peers.values()))

    def close(self) -> None:
        """End every association. An object that was not acknowledged is the sender's to send again."""
        BaseServer.shutdown(self._server)
        self._server.server_close()
        for association in self._server.active_associations:
            association.abort()
        self._thread.join(30)

    # ------------------------------------------------------------------ handlers of pynetdicom

    def _opened(self, event: Event) -> None:
        transport = event.assoc.dul.socket
        assert transport is not None
        peer = _Peer(transport.recv, self._node.max_object_bytes)
        transport.recv = peer.recv  # type: ignore[assignment, method-assign]
        with self._lock:
            self._peers[event.assoc] = peer

    def _closed(self, event: Event) -> None:
        with self._lock:
            self._peers.pop(event.assoc, None)
        association = event.assoc
        if association.requestor.primitive is None and association.dul.to_user_queue.empty():
            # pynetdicom waits the whole timeout for the request of a peer that is gone, as port scanners and
            # probes of load balancers are, and counts it among the associations. None ends the wait.
            association.dul.to_user_queue.put(None)  # type: ignore[arg-type]

    def _echo(self, event: Event) -> int:
        return SUCCESS if self._sender(event) is not None else NOT_AUTHORIZED

    def _store(self, event: Event) -> int:
        with self._lock:
            peer = self._peers[event.assoc]
        peer.begin_object()
        sender = self._sender(event)
        if sender is None:
            return NOT_AUTHORIZED
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
        with self._lock:
            peer.series.add(key)
        return SUCCESS

    def _sender(self, event: Event) -> Sender | None:
        """The configured sender, if it calls from one of its addresses."""
        title = event.assoc.requestor.ae_title.strip()
        sender = self._node.senders.get(title)
        if sender is None:
            return None
        address = ip_address(event.assoc.requestor.address or "0.0.0.0")
        if sender.addresses and not any(address in ip_network(one) for one in sender.addresses):
            _log.warning("AE %s is not accepted from its address", title)
            return None
        return sender


class _Server(ThreadedAssociationServer):
    """Does the TLS handshake in the connection's own thread, so that a slow peer stops no other."""

    def prepare(self, context: ssl.SSLContext | None, seconds: float, most: int) -> None:
        self._tls, self._seconds, self._most = context, seconds, most
        self._handshakes = 0

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - as the base class
        return len(self.active_associations) + self._handshakes < self._most

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, address = super().get_request()
        # A peer that is silent within a PDU would keep its thread for ever.
        connection.settimeout(self._seconds)
        return connection, address

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if self._tls is not None:
            self._handshakes += 1
            try:
                request = self._tls.wrap_socket(request, server_side=True)
            except OSError:
                self.shutdown_request(request)
                return
            finally:
                self._handshakes -= 1
        super().process_request_thread(request, client_address)


class _Peer:
    """One connection: how many bytes a PDU and an object may have, and the series that it sent objects of.

    pynetdicom takes an OSError for a closed connection.
    """

    def __init__(self, recv: Callable[[int], bytearray], most: int) -> None:
        self.series: set[str] = set()
        self._recv, self._most = recv, most + _OBJECT_OVERHEAD
        self.begin_object()

    def begin_object(self) -> None:
        self._left = self._most

    def recv(self, size: int) -> bytearray:
        self._left -= size
        if size > _MOST_PDU_BYTES or self._left < 0:
            _log.warning("an association is ended: it sends more than is accepted")
            raise ConnectionAbortedError("more than is accepted")
        return self._recv(size)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, DiskFull) else type(error).__name__
