"""Requests and replies of bytes between a hospital and the operator, over NVFLARE's cells.

A cell is NVFLARE's process on its network: it listens (the operator) or connects and reconnects (a hospital)
with the certificates of a kit, over gRPC with mutual TLS. NVFLARE closes a connection if the certificate's
common name is not the cell's name. This module adds what a closed protocol needs:

- two processes of one hospital do not get each other's replies: a cell's name is NAME.RANDOM
- a message comes from the peer of its own connection, and is for this cell; nothing is forwarded between
  hospitals
- a payload is bytes. NVFLARE would also decode objects (FOBS); such a message is dropped before that
- only the channel of this module is open. NVFLARE's job system, admin console and bulk messages are not

A request that cannot be served raises `Rejected` at the requester, with the other side's reason.
"""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable
from typing import Any

from training.errors import TrainingError, no_network_engine
from training.network.kits import SERVER, Kit

CHANNEL = "locum"
CHUNK = 4 * 2**20  # bytes of a file in one message
_LONGEST = CHUNK + 2**20  # of any message
_ERROR_LENGTH = 2000

# Called with the peer's name, the topic and the request; returns the reply.
Handler = Callable[[str, str, bytes], bytes]


class Unreachable(TrainingError):
    """The peer did not answer in time; the request may or may not have been served."""


class Rejected(TrainingError):
    """The peer rejected the request. `code` says how, for programs."""

    def __init__(self, message: str, code: str = "rejected") -> None:
        super().__init__(message)
        self.code = code


class Cell:
    """One member on the network: the operator's cell listens at the kit's address, a hospital's connects.

    `handler` serves requests, in threads. Raises ConfigurationError when the extra is not installed.
    """

    def __init__(self, kit: Kit, handler: Handler, listen: str | None = None) -> None:
        self._make, self._parts = _nvflare()
        self._kit = kit
        self._handler = handler
        self._listen = listen or kit.content.address
        self._peer_gone: Callable[[str], None] = lambda _: None
        # A child of the hospital's own name, which NVFLARE accepts from the same certificate.
        self._name = kit.name if kit.name == SERVER else f"{kit.name}.{secrets.token_hex(4)}"
        self._cells: dict[str, str] = {}
        self._core: Any = None

    def start(self) -> None:
        """Listen, or connect. A lost connection is made again, within about ten seconds.

        Raises TrainingError when the kit's certificates are not valid.
        """
        self._kit.check()
        params, kit = self._parts.DriverParams, self._kit
        if kit.name == SERVER:
            own = {params.SERVER_CERT.value: str(kit.certificate), params.SERVER_KEY.value: str(kit.key)}
        else:
            own = {params.CLIENT_CERT.value: str(kit.certificate), params.CLIENT_KEY.value: str(kit.key)}
        # Without a path, NVFLARE searches the current folder and all below it for a file that configures it.
        self._parts.ConfigService.initialize({}, [str(kit.folder)])
        self._core = self._make(
            self._name, f"grpc://{self._listen}", True, {params.CA_CERT.value: str(kit.authority), **own}
        )
        self._core.register_request_cb(CHANNEL, "*", self._serve)
        self._core.add_incoming_filter("*", "*", self._screen)
        self._core.set_cell_disconnected_cb(self._lost)
        self._core.start()

    def stop(self) -> None:
        """Close all connections. The process cannot start a cell of this name again."""
        if self._core is not None:
            self._core.stop()

    def hand_over(self, handler: Callable[[str, str, bytes], bytes]) -> None:
        """Serve requests by another handler from now on."""
        self._handler = handler

    def on_disconnect(self, action: Callable[[str], None]) -> None:
        """Call `action` with the name of a peer that lost its connection."""
        self._peer_gone = action

    def request(self, topic: str, payload: bytes, timeout: float, target: str = SERVER) -> bytes:
        """Send a request and return the reply. Raises Unreachable, or Rejected with the peer's reason."""
        keys = self._parts.MessageHeaderKey
        reply = self._core.send_request(
            CHANNEL, topic, target, self._parts.Message(None, payload), timeout=timeout, optional=True
        )
        code = reply.get_header(keys.RETURN_CODE)
        if code == self._parts.ReturnCode.INVALID_REQUEST:
            reason, _, kind = str(reply.get_header(keys.ERROR) or "").partition("\0")
            raise Rejected(printable(reason) or "no reason was given", kind or "rejected")
        if code != self._parts.ReturnCode.OK:
            raise Unreachable(f"{target} at {self._kit.content.address} did not answer ({code})")
        return bytes(reply.payload or b"")

    def notify(self, topic: str, target: str) -> None:
        """Send a message without content to the latest process of a peer; it may be lost."""
        if cell := self._cells.get(target):
            message = self._parts.Message(None, b"")
            self._core.fire_and_forget(CHANNEL, topic, [cell], message, optional=True)

    def _serve(self, message: Any) -> Any:
        keys, codes = self._parts.MessageHeaderKey, self._parts.ReturnCode
        cell = str(message.get_header(keys.ORIGIN))
        peer = _member(cell)
        self._cells[peer] = cell
        try:
            reply = self._handler(
                peer,
                str(message.get_header(keys.TOPIC)),
                bytes(message.payload or b""),
            )
        except Rejected as error:
            text = f"{str(error)[:_ERROR_LENGTH]}\0{error.code}"
            return self._parts.make_reply(codes.INVALID_REQUEST, error=text)
        except Exception:
            logging.getLogger(__name__).exception("a request of %s failed", peer)
            return self._parts.make_reply(codes.PROCESS_EXCEPTION)
        return self._parts.make_reply(codes.OK, body=reply)

    def _screen(self, message: Any) -> Any:
        """Return a message to drop the incoming one, None to let it pass."""
        keys, props = self._parts.MessageHeaderKey, self._parts.MessagePropKey
        peer = str(getattr(message.get_prop(props.ENDPOINT), "name", ""))
        # gRPC shows the certificate's name on the listening side; NVFLARE compared it with the cell's name.
        certified = message.get_prop(props.COMMON_NAME) if self._kit.name == SERVER else SERVER
        channel, topic = message.get_header(keys.CHANNEL), message.get_header(keys.TOPIC)
        goodbye = (channel, topic) == (self._parts.CellChannel.CELLNET, self._parts.CellChannelTopic.Bye)
        encoding = message.get_header(keys.PAYLOAD_ENCODING)
        fine = (
            peer == message.get_header(keys.ORIGIN)
            and _member(peer) == certified
            and message.get_header(keys.DESTINATION) == self._name
            and (channel == CHANNEL or goodbye)
            and encoding in (None, self._parts.Encoding.BYTES, self._parts.Encoding.NONE)
            and not message.get_header(keys.ENCRYPTED, False)
            and len(message.payload or b"") <= _LONGEST
        )
        return None if fine else self._parts.make_reply(self._parts.ReturnCode.INVALID_REQUEST)

    def _lost(self, agent: Any) -> None:
        # The replies that were under way are lost; do not wait for them until their timeout.
        for waiter in list(self._core.waiters.values()):
            waiter.set()
        self._peer_gone(_member(agent.get_fqcn()))


class _Parts:
    """The names of NVFLARE that a cell uses."""

    def __init__(self) -> None:
        from nvflare.fuel.f3.cellnet import defs
        from nvflare.fuel.f3.cellnet.utils import make_reply
        from nvflare.fuel.f3.drivers.driver_params import DriverParams
        from nvflare.fuel.f3.message import Message
        from nvflare.fuel.utils.config_service import ConfigService

        self.CellChannel = defs.CellChannel
        self.CellChannelTopic = defs.CellChannelTopic
        self.Encoding = defs.Encoding
        self.MessageHeaderKey = defs.MessageHeaderKey
        self.MessagePropKey = defs.MessagePropKey
        self.ReturnCode = defs.ReturnCode
        self.ConfigService = ConfigService
        self.DriverParams = DriverParams
        self.Message = Message
        self.make_reply = make_reply


def _nvflare() -> tuple[Any, _Parts]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from nvflare.fuel.f3.cellnet.core_cell import CoreCell

            parts = _Parts()
    except ImportError as error:
        raise no_network_engine(error) from error
    log = logging.getLogger("nvflare")
    if not log.handlers:
        # It logs every lost connection as an error; the commands say so in their own words.
        log.addHandler(logging.NullHandler())
        log.propagate = False
    return CoreCell, parts


def _member(cell: str) -> str:
    return cell.partition(".")[0]


def printable(text: str) -> str:
    """Leave out control characters, which a terminal would obey."""
    return "".join(c for c in text[:_ERROR_LENGTH] if c.isprintable() or c == "\n")
