"""Why a hospital and its operator do not connect: TLS refuses in many words, or in none.

The hospital finds out why, and says so at the operator's door.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime

from training.errors import TrainingError
from training.network.kits import Kit
from training.network.messages import KEPT_OUT, KeptOut, pack

_SECONDS = 5.0
# A client's preface of HTTP/2, and its settings: the other side answers once it takes the certificate.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_EXPIRED, _OTHER_ISSUERS, _OTHER_HOST = 10, (18, 19, 20, 21), 62


def refusal(kit: Kit) -> str | None:
    """Try the handshake of a hospital's kit: why it fails, with what mends it, or None.

    Raises OSError where nothing listens at the operator's address.
    """
    host, _, port = kit.content.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(kit.authority)
    context.load_cert_chain(kit.certificate, kit.key)
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), timeout=_SECONDS) as line:
        try:
            with context.wrap_socket(line, server_hostname=host) as secured:
                secured.sendall(_PREFACE)
                # In TLS 1.3 the word on our certificate comes with the first byte.
                if secured.recv(1):
                    return None
        except ssl.SSLCertVerificationError as error:
            return _of_operator(error, host)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
            pass
        except ssl.SSLError as error:
            return _of_hospital((error.reason or str(error)).lower().replace("_", " "))
        except TimeoutError:
            return f"{kit.content.address} takes connections and does not answer: is it the operator's port?"
    return _of_hospital("it closed the connection")


def check(kit: Kit) -> None:
    """Check a hospital's kit, and let the operator know what keeps it out. Raises TrainingError."""
    try:
        kit.check()
    except TrainingError:
        complain(kit)
        raise


def complain(kit: Kit) -> None:
    """Tell the operator, if it can be reached, that TLS keeps this hospital out.

    One of the two certificates is refused, so neither is checked: all that is said is this hospital's own,
    which has no secret. An operator of an earlier version has no door, and hears nothing.
    """
    host, _, port = kit.content.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([KEPT_OUT])
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), timeout=_SECONDS) as line,
        context.wrap_socket(line, server_hostname=host) as secured,
    ):
        if secured.selected_alpn_protocol() == KEPT_OUT:
            secured.sendall(pack(KeptOut(certificate=kit.certificate.read_text(), clock=datetime.now(UTC))))
            secured.recv(1)


def _of_operator(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return "the operator's certificate has ended: the operator runs `python -m training.network renew`"
    if error.verify_code in _OTHER_ISSUERS:
        return (
            "the operator's certificate is of another authority than this kit: one of the two kits is of an "
            "earlier generation; ask the operator for a new kit"
        )
    if error.verify_code == _OTHER_HOST:
        return f"the operator's certificate is not for '{host}': a proxy may end the connection on its way"
    return f"the operator's certificate cannot be checked: {error.verify_message}"


def _of_hospital(why: str) -> str:
    return (
        f"the operator refuses this kit's certificate ({why}): ask the operator to renew it (`python -m "
        "training.network renew`), or for a new kit"
    )
