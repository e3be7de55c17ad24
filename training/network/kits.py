"""Kits: the certificate, key and address with which the operator and each hospital take part.

NVFLARE's provisioning makes the certificate authority of a consortium and the certificates of its members.
A kit is a folder with `client.crt`, `client.key` (`server.crt`, `server.key` for the operator), `rootCA.pem`
and `kit.json`. The common name of a hospital's certificate is the hospital's name in every run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_store.durable import write_durably
from training.data.segmentation.layout import check_name
from training.errors import ConfigurationError, in_words, no_network_engine

KIT_FILE = "kit.json"
REVOKED_FILE = "revoked.json"
SERVER = "server"
_AUTHORITY = ".authority"
_STATE = Path("state/cert.json")
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


class _Quiet:
    """A log for NVFLARE's provisioning that keeps its errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def debug(self, *_: object) -> None:
        """Ignore."""

    info = warning = debug

    def error(self, *message: object) -> None:
        """Keep an error for the exception."""
        self.errors.append(" ".join(map(str, message)))


def provision(root: Path, project: str, address: str, sites: Sequence[str]) -> dict[str, Path]:
    """Make the kits of a consortium under `root`, or add hospitals to it. Returns the new kits by name.

    The first call makes the certificate authority and the operator's kit. Later calls keep both, and make
    kits for the hospitals that have none. Hospitals' private keys are then only in their kits.

    Raises ConfigurationError for an invalid name or address, or for another project in `root`.
    """
    try:
        from nvflare.lighter.entity import Project
        from nvflare.lighter.impl.cert import CertBuilder
        from nvflare.lighter.impl.workspace import WorkspaceBuilder
        from nvflare.lighter.provisioner import Provisioner
    except ImportError as error:
        raise no_network_engine(error) from error

    host, port = _address(address)
    before = Kit.open(root / SERVER, server=True).content if (root / SERVER).exists() else None
    _check_names(project, host, sites, before.sites if before else ())
    _check_same(root, before, KitFile(project=project, name=SERVER, address=f"{host}:{port}"))
    new = [site for site in dict.fromkeys(sites) if before is None or site not in before.sites]
    plan = Project(project, f"Locum consortium {project}")
    names = [host, *(["localhost", "127.0.0.1"] if host in ("localhost", "127.0.0.1") else [])]
    plan.set_server(SERVER, project, {"default_host": host, "host_names": names, "fed_learn_port": port})
    for site in new:
        plan.add_client(site, site, {})
    authority = root / _AUTHORITY
    authority.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = _Quiet()
    made = Provisioner(str(authority), [WorkspaceBuilder(), CertBuilder()]).provision(plan, logger=log)
    folder = made.get("current_prod_dir")
    if folder is None or made.get("build_error"):
        raise ConfigurationError("the kits could not be made", log.errors or ["NVFLARE gave no reason"])
    everyone = (*(before.sites if before else ()), *new)
    kits: dict[str, Path] = {}
    for name in ([] if before else [SERVER]) + new:
        kits[name] = root / name
        shutil.move(Path(folder) / name / "startup", kits[name])
        kits[name].chmod(0o700)
        _write(kits[name], KitFile(project=project, name=name, address=f"{host}:{port}"))
    _write(
        root / SERVER, KitFile(project=project, name=SERVER, address=f"{host}:{port}", sites=tuple(everyone))
    )
    shutil.rmtree(folder)
    _forget_keys(authority / project / _STATE)
    return kits


def revoke(root: Path, site: str) -> int:
    """Revoke a hospital's certificate: the operator then rejects it. Returns its serial number.

    The certificate is forgotten, so the hospital can get a new kit under the same name from `provision`.
    Raises ConfigurationError when there is no such hospital.
    """
    from cryptography import x509

    kit = Kit.open(root / SERVER, server=True)
    state = root / _AUTHORITY / kit.content.project / _STATE
    members = json.loads(state.read_text())
    if site not in kit.content.sites or site not in members:
        raise ConfigurationError(
            f"'{site}' cannot be revoked",
            [f"expected one of {', '.join(kit.content.sites) or 'no hospital'}"],
        )
    serial = x509.load_pem_x509_certificate(members.pop(site)["cert"].encode()).serial_number
    listed = kit._revocations() | {f"{site}-{serial:x}": serial}
    write_durably(kit.folder / REVOKED_FILE, json.dumps(listed).encode())
    write_durably(state, json.dumps(members).encode(), mode=0o600)
    left = tuple(name for name in kit.content.sites if name != site)
    _write(kit.folder, kit.content.model_copy(update={"sites": left}))
    if (root / site).exists():
        (root / site).rename(root / f"{site}-revoked-{serial:x}"[:200])
    return serial


def _write(folder: Path, content: KitFile) -> None:
    write_durably(folder / KIT_FILE, (content.model_dump_json(indent=1) + "\n").encode())


def _forget_keys(state: Path) -> None:
    """Delete the hospitals' private keys from NVFLARE's state, which keeps those it made."""
    members: dict[str, Any] = json.loads(state.read_text())
    kept: Mapping[str, Any] = {
        name: {"cert": entry["cert"]} if isinstance(entry, dict) and name != SERVER else entry
        for name, entry in members.items()
    }
    write_durably(state, json.dumps(kept).encode(), mode=0o600)


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
        if site.lower() in (SERVER, host.lower()):
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
