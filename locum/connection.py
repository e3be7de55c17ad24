"""Which service is asked, with which key: arguments, LOCUM_URL and LOCUM_KEY, or the file of `locum login`.

The file has a key per address, and a key is sent to its own address alone. Its mode is 0600: a file that
others can read is refused, as ssh does.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from locum.errors import SettingInvalid

URL, KEY = "LOCUM_URL", "LOCUM_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Connection:
    """The address of a service, and the key for it."""

    url: str
    key: str | None

    @classmethod
    def find(cls, url: str | None = None, key: str | None = None) -> Connection:
        """Choose address and key: those given come before the environment, which comes before the file.

        Raises:
            SettingInvalid: no address of a service, or a file that others can read.
        """
        url = url or os.environ.get(URL)
        key = key or os.environ.get(KEY)
        if url and key:
            return cls(_address(url), key)
        kept = _Kept.read(credentials_file())
        found = _address(url or kept.default or DEFAULT_URL)
        return cls(found, key or kept.keys.get(found))

    @property
    def in_the_open(self) -> bool:
        """Whether the key and the scans leave this machine without TLS."""
        parts = urlsplit(self.url)
        return parts.scheme == "http" and not _on_loopback(parts.hostname or "")


def credentials_file() -> Path:
    """The file of `locum login`: in XDG_CONFIG_HOME, or ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "locum" / "credentials.json"


def remember(connection: Connection) -> Path:
    """Keep a connection as the default one; return the file. Raises SettingInvalid."""
    path = credentials_file()
    kept = _Kept.read(path)
    keys = {**kept.keys, **({connection.url: connection.key} if connection.key else {})}
    if not connection.key:
        keys.pop(connection.url, None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f".{path.name}.part")
        beside.unlink(missing_ok=True)
        # Private from its first byte on.
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"default": connection.url, "keys": keys}, file, indent=2)
        beside.replace(path)
    except OSError as error:
        raise SettingInvalid(f"{path}: cannot be written: {error.strerror}") from None
    return path


def forget(url: str | None = None) -> Path:
    """Delete what is kept of an address, or everything. Raises SettingInvalid."""
    path = credentials_file()
    if url is None:
        path.unlink(missing_ok=True)
        return path
    address, kept = _address(url), _Kept.read(path)
    if address in kept.keys or kept.default == address:
        return remember(Connection(address, None))
    return path


@dataclass(frozen=True)
class _Kept:
    default: str | None
    keys: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> _Kept:
        try:
            with path.open() as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if os.name == "posix" and mode & 0o077:
                    raise SettingInvalid(
                        f"{path}: expected mode 0600, found {mode:04o}: others can read the keys in it; "
                        "chmod 600 it, and have the keys rotated"
                    )
                found = json.load(file)
            return cls(found["default"], {str(url): str(key) for url, key in found["keys"].items()})
        except FileNotFoundError:
            return cls(None, {})
        except OSError as error:
            raise SettingInvalid(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SettingInvalid(
                f"{path}: expected the file of `locum login`, found another: delete it"
            ) from None


def _address(url: str) -> str:
    """The address without a final slash. Raises SettingInvalid."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingInvalid(
            f"{url!r:.200}: expected the service's address, such as https://locum.hospital.example"
        )
    if parts.username or parts.password:
        raise SettingInvalid(
            f"{parts.hostname}: expected an address without a password in it: give the key in {KEY}"
        )
    return url.strip().rstrip("/")


def _on_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
