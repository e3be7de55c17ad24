"""Kits: the certificate, key and address with which the operator and each hospital take part.

An authority of the consortium signs the certificates of its members, of the form that NVFLARE makes.
A kit is a folder with `client.crt`, `client.key` (`server.crt`, `server.key` for the operator), `rootCA.pem`
and `kit.json`. The common name of a hospital's certificate is the hospital's name in every run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_store.durable import write_durably
from training.data.segmentation.layout import check_name
from training.errors import ConfigurationError, TrainingError, in_words
from training.network.authority import RESERVED, Authority

if TYPE_CHECKING:
    from cryptography import x509

KIT_FILE = "kit.json"
REVOKED_FILE = "revoked.json"
SERVER = "server"
RENEWED = "renewed"
_AUTHORITY = ".authority"
_STATE = Path("state/cert.json")
# Before a certificate ends.
_SOON = timedelta(days=30)
# A cell's name is a path with dots, so a name has none. NVFLARE's own cells begin with a tilde or a dash.
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
# NVFLARE splits an address at its colons, so it cannot be one of IPv6.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]+)(:(?P<port>\d{1,5}))?")


class KitFile(BaseModel):
    """The content of kit.json. `sites` are the hospitals of the consortium, in the operator's kit only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str
    name: str
    address: str = Field(description="HOST:PORT of the operator, as the hospitals reach it")
    sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certified:
    """A member's certificate: the sha256 of its DER form, and when it ends."""

    fingerprint: str
    ends: datetime

    @classmethod
    def of(cls, pem: bytes) -> Certified:
        """That of a file."""
        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256

        found = x509.load_pem_x509_certificate(pem)
        return cls(found.fingerprint(SHA256()).hex(), found.not_valid_after_utc)


@dataclass(frozen=True)
class Kit:
    """An opened kit."""

    folder: Path
    content: KitFile

    @classmethod
    def open(cls, folder: Path, *, server: bool) -> Kit:
        """Open a kit of the operator (`server`) or of a hospital. Raises ConfigurationError."""
        path = folder / KIT_FILE
        try:
            content = KitFile.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{folder} is not a kit",
                [
                    f"it has no {KIT_FILE}: give the folder that the operator made, with "
                    "`python -m training.network provision`"
                ],
            ) from error
        except (OSError, ValidationError) as error:
            raise ConfigurationError(f"{folder} is not a kit", [in_words(error)]) from error
        kit = cls(folder, content)
        if server != (content.name == SERVER):
            whom = "the operator" if server else "a hospital"
            raise ConfigurationError(
                f"{folder} cannot be used here", [f"expected a kit of {whom}, found that of '{content.name}'"]
            )
        missing = [f.name for f in (kit.certificate, kit.key, kit.authority) if not f.is_file()]
        if missing:
            raise ConfigurationError(f"{folder} is not complete", [f"missing: {', '.join(missing)}"])
        return kit

    @property
    def name(self) -> str:
        """The hospital's name, or `server`."""
        return self.content.name

    def certified(self) -> Certified:
        """This member's certificate."""
        return Certified.of(self.certificate.read_bytes())

    @property
    def _base(self) -> str:
        return "server" if self.name == SERVER else "client"

    @property
    def certificate(self) -> Path:
        """The certificate of this member."""
        return self.folder / f"{self._base}.crt"

    @property
    def key(self) -> Path:
        """The private key of the certificate."""
        return self.folder / f"{self._base}.key"

    @property
    def authority(self) -> Path:
        """The certificate of the consortium's certificate authority."""
        return self.folder / "rootCA.pem"

    def warning(self, now: datetime | None = None) -> str | None:
        """A sentence where the first of its two certificates ends soon."""
        ends, path = min(
            (_certificate(path).not_valid_after_utc, path) for path in (self.certificate, self.authority)
        )
        if ends - (now or datetime.now(UTC)) > _SOON:
            return None
        return f"{path} is valid until {ends:%Y-%m-%d}: {self._renewal}"

    def check(self, now: datetime | None = None) -> None:
        """Check what TLS will check, which says it in many words or none.

        Raises TrainingError for a certificate that is not valid now, has another key, or was not signed by
        the authority in the kit.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        now = now or datetime.now(UTC)
        try:
            own, authority = _certificate(self.certificate), _certificate(self.authority)
            key = load_pem_private_key(self.key.read_bytes(), None)
            for path, found in ((self.certificate, own), (self.authority, authority)):
                begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
                if not begins <= now <= ends:
                    raise TrainingError(
                        f"{path} is not valid now: expected a time from {begins:%Y-%m-%d} to "
                        f"{ends:%Y-%m-%d}, found {now:%Y-%m-%d}; set the clock, or {self._renewal}"
                    )
            if key.public_key() != own.public_key():
                raise TrainingError(f"{self.key} is not the key of {self.certificate.name}; get a whole kit")
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError) as error:
            raise TrainingError(f"{self.folder} is damaged: {error}; get the kit again") from error
        except InvalidSignature as error:
            raise TrainingError(
                f"{self.certificate} was not signed by {self.authority.name} beside it; get a whole kit"
            ) from error

    @property
    def _renewal(self) -> str:
        if self.name == SERVER:
            return f"`python -m training.network renew --kits {self.folder.parent}` makes it again"
        return "ask the operator to renew it (`python -m training.network renew`)"

    def revoked(self) -> frozenset[int]:
        """Read the serial numbers of revoked certificates from the operator's kit."""
        return frozenset(self._revocations().values())

    def revoked_sites(self) -> frozenset[str]:
        """Read the names of the hospitals that were revoked and have no new kit from the operator's kit."""
        names = {entry.rpartition("-")[0] for entry in self._revocations()}
        return frozenset(names - {*self.content.sites})

    def _revocations(self) -> dict[str, int]:
        path = self.folder / REVOKED_FILE
        listed: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        return listed


def provision(root: Path, project: str, address: str, sites: Sequence[str]) -> dict[str, Path]:
    """Make the kits of a consortium under `root`, or add hospitals to it. Returns the new kits by name.

    The first call makes the certificate authority and the operator's kit. Later calls keep both, and make
    kits for the hospitals that have none. Hospitals' private keys are then only in their kits.

    Raises ConfigurationError for an invalid name or address, or for another project in `root`.
    """
    host, port = _address(address)
    before = Kit.open(root / SERVER, server=True).content if (root / SERVER).exists() else None
    _check_names(project, host, sites, before.sites if before else ())
    server = KitFile(project=project, name=SERVER, address=f"{host}:{port}")
    _check_same(root, before, server)
    new = [site for site in dict.fromkeys(sites) if before is None or site not in before.sites]
    authority = _authority(root, project)
    kits: dict[str, Path] = {}
    for name in ([] if before else [SERVER]) + new:
        hosts = _hosts(host) if name == SERVER else ()
        key, certificate = authority.admit(name, project if name == SERVER else name, hosts)
        kit = Kit(root / name, server.model_copy(update={"name": name}))
        kit.folder.mkdir(mode=0o700, parents=True)
        write_durably(kit.key, key, mode=0o600)
        write_durably(kit.certificate, certificate)
        write_durably(kit.authority, authority.certificate)
        _write(kit.folder, kit.content)
        kits[name] = kit.folder
    everyone = (*(before.sites if before else ()), *new)
    own = Kit(root / SERVER, server.model_copy(update={"sites": everyone}))
    # It may be a later one, for the same key.
    write_durably(own.authority, authority.certificate)
    _write(own.folder, own.content)
    authority.save()
    return kits


def renew(root: Path, sites: Sequence[str] = ()) -> dict[str, Path]:
    """Make the certificates of the operator and of hospitals (by default all) again, for the keys they have.

    Returns the folders with the new certificates, by name: a kit that is still in `root`, or a new folder in
    `root/renewed`. Those have no secret: the hospital replaces both files of its kit. The earlier certificate
    is valid to its own end.

    Raises ConfigurationError for a hospital that is not in the consortium.
    """
    own = Kit.open(root / SERVER, server=True)
    project, known = own.content.project, own.content.sites
    if strange := [site for site in sites if site not in known]:
        raise ConfigurationError(
            f"'{strange[0]}' has no certificate to renew",
            [f"expected one of {', '.join(known) or 'no hospital'}; `provision` makes a kit"],
        )
    authority = _authority(root, project)
    renewed: dict[str, Path] = {}
    for name in (SERVER, *(sites or known)):
        hosts = _hosts(_address(own.content.address)[0]) if name == SERVER else ()
        there = root / name if (root / name).is_dir() else root / RENEWED / name
        kit = Kit(there, own.content.model_copy(update={"name": name}))
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(kit.certificate, authority.renew(name, project if name == SERVER else name, hosts))
        write_durably(kit.authority, authority.certificate)
        renewed[name] = there
    authority.save()
    return renewed


def certificates(root: Path) -> dict[str, Certified]:
    """The newest certificate of each hospital of the consortium, by name; none without its authority.

    Raises ConfigurationError.
    """
    own = Kit.open(root / SERVER, server=True).content
    if not (root / _AUTHORITY / own.project / _STATE).is_file():
        return {}
    made = _authority(root, own.project).content
    return {name: Certified.of(made[name]["cert"].encode()) for name in own.sites if name in made}


def revoke(root: Path, site: str) -> int:
    """Revoke a hospital's certificates: the operator then rejects it. Returns the newest one's serial number.

    They are forgotten, so the hospital can get a new kit under the same name from `provision`.
    Raises ConfigurationError when there is no such hospital.
    """
    kit = Kit.open(root / SERVER, server=True)
    authority = _authority(root, kit.content.project)
    if site not in kit.content.sites or site not in authority.content:
        raise ConfigurationError(
            f"'{site}' cannot be revoked",
            [f"expected one of {', '.join(kit.content.sites) or 'no hospital'}"],
        )
    serials = authority.forget(site)
    listed = kit._revocations() | {f"{site}-{serial:x}": serial for serial in serials}
    write_durably(kit.folder / REVOKED_FILE, json.dumps(listed).encode())
    authority.save()
    left = tuple(name for name in kit.content.sites if name != site)
    _write(kit.folder, kit.content.model_copy(update={"sites": left}))
    if (root / site).exists():
        (root / site).rename(root / f"{site}-revoked-{serials[0]:x}"[:200])
    return serials[0]


def _authority(root: Path, project: str) -> Authority:
    (root / _AUTHORITY).mkdir(mode=0o700, parents=True, exist_ok=True)
    return Authority.open(root / _AUTHORITY / project / _STATE, project)


def _hosts(host: str) -> list[str]:
    """The names in the operator's certificate."""
    return [host, *(["localhost", "127.0.0.1"] if host in ("localhost", "127.0.0.1") else [])]


def _write(folder: Path, content: KitFile) -> None:
    write_durably(folder / KIT_FILE, (content.model_dump_json(indent=1) + "\n").encode())


def _certificate(path: Path) -> x509.Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes())


def _address(text: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or 8002) if match else 0
    if not match or not 0 < port < 65536:
        raise ConfigurationError(
            "the address cannot be used",
            [f"expected HOST or HOST:PORT, with a name or an IPv4 address, found '{text}'"],
        )
    return match["host"], port


def _check_names(project: str, host: str, sites: Sequence[str], known: Sequence[str]) -> None:
    """Check the names of new kits, beside those of the `known` hospitals. Raises ConfigurationError."""
    problems = [
        f"'{name}': expected at most 63 letters, digits, '_' and '-', beginning with a letter or digit"
        for name in (project, *sites)
        if not _SITE_NAME.fullmatch(name)
    ]
    spelled = {site.lower(): site for site in known}
    for site in sites:
        check_name(site, problems)
        # A certificate is valid for its own name as a host, so a hospital could pose as this one. TLS and
        # some file systems ignore case.
        if site.lower() in (SERVER, RENEWED, *RESERVED, host.lower()):
            problems.append(f"'{site}': the name is reserved for the operator")
        other = spelled.setdefault(site.lower(), site)
        if other != site:
            problems.append(f"'{site}': differs from '{other}' in case only, use another name")
    if problems:
        raise ConfigurationError("the kits cannot be made", list(dict.fromkeys(problems)))


def _check_same(root: Path, before: KitFile | None, now: KitFile) -> None:
    if before is not None and (before.project, before.address) != (now.project, now.address):
        raise ConfigurationError(
            f"{root} holds the kits of another consortium",
            [
                f"expected {before.project} at {before.address}, found {now.project} at {now.address}; "
                "use another folder"
            ],
        )
