"""The YAML file of `LOCUM_DICOM_NODE`: who may send, for which hospital, and where SEGs go."""

from __future__ import annotations

import ssl
from functools import cache
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from service.validation import HOSPITAL_ID, is_loopback, read_yaml

# PS3.8 7.1.1.9: up to 16 characters of the default repertoire, without backslash.
Title = Annotated[str, StringConstraints(pattern=r"^[\x21-\x5b\x5d-\x7e]([\x20-\x5b\x5d-\x7e]{0,15})$")]
Port = Annotated[int, Field(ge=1, le=65535)]
_Hospital = Annotated[str, StringConstraints(pattern=HOSPITAL_ID)]
MEBIBYTE = 1024 * 1024


def _network(text: str) -> str:
    ip_network(text)
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsFiles(_Strict):
    """Files (PEM) of a certificate with its key, and of the authorities that sign the peer's."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """TLS of the node: with `ca`, a peer without a certificate is refused. Raises OSError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(str(self.certificate), None if self.key is None else str(self.key))
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS of a sender: the destination's certificate and name are checked. Raises OSError."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


class Sender(_Strict):
    """An AE that may send. `addresses` bound where it may connect from; an AE title alone proves nothing."""

    hospital: _Hospital
    addresses: tuple[Annotated[str, AfterValidator(_network)], ...] = ()

    def admits(self, address: str) -> bool:
        """Whether it may connect from this address."""
        found = ip_address(address)
        if isinstance(found, IPv6Address):
            # A socket that takes both gives IPv6, while the network is written as IPv4.
            found = found.ipv4_mapped or found
        return not self.addresses or any(found in ip_network(one) for one in self.addresses)


class Route(_Strict):
    """How a hospital's series are segmented, and where the SEG or RTSTRUCT goes.

    Attributes:
        model: as in `POST /segment`.
        output: what is sent, as in `POST /segment`.
        destination: name of the AE that it is sent to.
        key_file, key_env: the hospital's API key, in a file or an environment variable; read for each
            request.
        personalization, guard: as in `POST /segment`; the answer to a scan that the guard warns of is sent
            only with `guard: warn`.
    """

    model: str
    output: Literal["dicom-seg", "dicom-rtstruct"] = "dicom-seg"
    destination: str
    key_file: Path | None = None
    key_env: str | None = None
    personalization: Literal["auto", "global", "member", "hospital"] = "auto"
    guard: Literal["warn", "refuse"] = "refuse"


class Destination(_Strict):
    """An AE that takes segmentations. With `tls`, TLS is used."""

    ae_title: Title
    host: str
    port: Port
    tls: TlsFiles | None = None


class NodeConfiguration(_Strict):
    """The node.

    Attributes:
        service: URL of the API.
        ca: file (PEM) of the certificates that sign the API's.
        plain_http: whether an http:// URL of the API is accepted beyond loopback.
        silence_seconds: after the last object, when a series is complete although its association is open.
        settle_seconds: after the last object, when it is complete once its associations have ended.
        max_queue_bytes: of all objects on the disk; above that, C-STORE answers A700H.
        max_object_bytes: of one object; a longer one ends its association.
        max_associations: at the same time.
        max_associations_per_address: of these, from one address; by default half.
        idle_seconds: for the whole request of an association and for each PDU, and without a byte, when an
            association ends.
        retry_seconds: the first pause after a failure; each is twice as long, up to ten minutes.
        give_up_hours: after completion, when a series fails that could not be segmented or delivered.
        failed_days: how long a failed series is kept.
    """

    ae_title: Title
    host: str = "127.0.0.1"
    port: int = Field(11112, ge=0, le=65535)
    service: str
    ca: Path | None = None
    plain_http: bool = False
    senders: dict[Title, Sender] = Field(min_length=1)
    hospitals: dict[_Hospital, Route]
    destinations: dict[str, Destination]
    tls: TlsFiles | None = None
    silence_seconds: float = Field(60, gt=0)
    settle_seconds: float = Field(5, ge=0)
    max_queue_bytes: int = Field(20 * 1024 * MEBIBYTE, gt=0)
    max_object_bytes: int = Field(512 * MEBIBYTE, gt=0)
    max_associations: int = Field(8, gt=0, le=100)
    max_associations_per_address: int | None = Field(None, gt=0)
    idle_seconds: float = Field(60, gt=0)
    retry_seconds: float = Field(5, gt=0)
    give_up_hours: float = Field(72, ge=0)
    failed_days: float = Field(7, ge=0)

    @property
    def most_per_address(self) -> int:
        """Associations at the same time from one address."""
        return self.max_associations_per_address or (self.max_associations + 1) // 2

    @model_validator(mode="after")
    def _consistent(self) -> NodeConfiguration:
        found = urlsplit(self.service)
        plain = found.scheme == "http" and (self.plain_http or is_loopback(found.hostname or ""))
        if not (found.scheme == "https" or plain) or found.username is not None:
            raise ValueError(
                "service: expected an https:// URL without credentials (http:// on loopback, or with "
                "plain_http)"
            )
        for hospital, route in self.hospitals.items():
            if route.key_file is not None and route.key_env is not None:
                raise ValueError(f"hospitals: expected one key of '{hospital}': key_file or key_env")
        for name in {sender.hospital for sender in self.senders.values()} - {*self.hospitals}:
            raise ValueError(f"senders: hospital '{name}' is not among hospitals")
        for name in {route.destination for route in self.hospitals.values()} - {*self.destinations}:
            raise ValueError(f"hospitals: destination '{name}' is not among destinations")
        if self.tls is not None and self.tls.certificate is None:
            raise ValueError("tls: the node needs a certificate")
        # TLS without `ca` asks no sender for a certificate.
        if not is_loopback(self.host) and (self.tls is None or self.tls.ca is None):
            unbound = [title for title, sender in self.senders.items() if not sender.addresses]
            if unbound:
                raise ValueError(
                    f"senders: {', '.join(unbound)} would prove only an AE title; set addresses, or tls with "
                    "ca"
                )
        return self


@cache
def load_node(path: Path) -> NodeConfiguration:
    """Read the file, once. Raises SettingsInvalid, which names every wrong field without its value."""
    return read_yaml(path, NodeConfiguration)
