"""The certificate authority of a consortium: it signs the certificates of the kits, and outlives them.

Its key stays. Its own certificate is made again, for the same key, before it ends sooner than the kits that
it signs: certificates under the earlier one are valid under the later one, and the reverse. Certificates have
the form of NVFLARE's provisioning: its cells compare the names in them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from model_store.durable import write_durably
from training.errors import no_network_engine

KIT_DAYS: Final = 360
_AUTHORITY_DAYS: Final = 3650
_CERTIFICATE, _KEY = "root_cert", "root_pri_key"
# Entries of the file that are no members'.
RESERVED: Final = (_CERTIFICATE, _KEY)
# The newest certificate, and the serial numbers of those before it.
_OF_MEMBER: Final = ("cert", "earlier")


@dataclass
class Authority:
    """An authority of a project, from its file. `content` has its key, and the members' certificates."""

    path: Path
    project: str
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, project: str) -> Authority:
        """Read the file, or begin it. Raises ConfigurationError without the network engine."""
        try:
            from nvflare.lighter import utils
        except ImportError as error:
            raise no_network_engine(error) from error
        made = cls(path, project, json.loads(path.read_text()) if path.exists() else {})
        if _KEY not in made.content:
            key, _ = utils.generate_keys()
            made.content[_KEY] = utils.serialize_pri_key(key).decode()
        made._extend()
        return made

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate (PEM)."""
        certificate: str = self.content[_CERTIFICATE]
        return certificate.encode()

    def save(self) -> None:
        """Write the file, for its owner alone. Members' private keys are in their kits only."""
        kept = {
            name: entry if name in RESERVED else {part: entry[part] for part in _OF_MEMBER if part in entry}
            for name, entry in self.content.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, json.dumps(kept).encode(), mode=0o600)

    def admit(self, name: str, organisation: str, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """Make a member's private key and certificate (PEM). `hosts` are the names of one that listens."""
        from nvflare.lighter import utils

        key, public = utils.generate_keys()
        certificate = self._certified(name, organisation, hosts, public)
        self.content[name] = {"cert": certificate.decode()}
        return utils.serialize_pri_key(key), certificate

    def renew(self, name: str, organisation: str, hosts: Sequence[str] = ()) -> bytes:
        """Make a member's certificate again, for the key that it has. Raises KeyError for another."""
        from cryptography import x509

        entry = self.content[name]
        before = x509.load_pem_x509_certificate(entry["cert"].encode())
        certificate = self._certified(name, organisation, hosts, before.public_key())
        earlier = [*entry.get("earlier", []), before.serial_number]
        self.content[name] = {"cert": certificate.decode(), "earlier": earlier}
        return certificate

    def forget(self, name: str) -> list[int]:
        """Forget a member; return the serial numbers of its certificates, the newest first."""
        from cryptography import x509

        entry = self.content.pop(name)
        newest = x509.load_pem_x509_certificate(entry["cert"].encode()).serial_number
        return [newest, *reversed(entry.get("earlier", []))]

    def _extend(self) -> None:
        """Make the authority's certificate, where there is none or it ends before a kit of today."""
        from cryptography import x509
        from nvflare.lighter import utils

        if _CERTIFICATE in self.content:
            ends = x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc
            if (ends - datetime.now(UTC)).days > KIT_DAYS:
                return
        key, own = self._key(), utils.Identity(self.project)
        made = utils.generate_cert(
            own,
            own,
            key,
            key.public_key(),
            valid_days=_AUTHORITY_DAYS,
            ca=True,
            not_valid_before=datetime.now(UTC),
        )
        self.content[_CERTIFICATE] = utils.serialize_cert(made).decode()

    def _certified(self, name: str, organisation: str, hosts: Sequence[str], public: Any) -> bytes:
        from nvflare.lighter import utils

        made = utils.generate_cert(
            utils.Identity(name, organisation),
            utils.Identity(self.project),
            self._key(),
            public,
            valid_days=KIT_DAYS,
            server_default_host=hosts[0] if hosts else None,
            server_additional_hosts=list(hosts) or None,
            not_valid_before=datetime.now(UTC),
        )
        pem: bytes = utils.serialize_cert(made)
        return pem

    def _key(self) -> Any:
        from cryptography.hazmat.primitives import serialization

        return serialization.load_pem_private_key(self.content[_KEY].encode(), None)
