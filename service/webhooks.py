"""Webhooks: the addresses that the configuration names, and the signatures of what is sent to them.

Signed as Standard Webhooks 1.0 (standardwebhooks.com) says. Nothing else is ever an address: no request and
no row of the database names one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from standardwebhooks import Webhook as Signer

from service.validation import is_loopback

_PREFIX = "whsec_"
_FEWEST_BYTES, _MOST_BYTES = 24, 64
_EXPECTED = 'expected a JSON list of objects such as {"url": "https://…", "secret": "whsec_…"}'


@dataclass(frozen=True)
class Webhook:
    """An address, with the secret that it shares with the service.

    Both are hidden in a `repr`: addresses of chat systems have a secret in their path.
    """

    url: str = field(repr=False)
    secret: str = field(repr=False)

    @property
    def address(self) -> str:
        """A digest of the URL, 64 hex digits: what the database knows of it."""
        return hashlib.sha256(self.url.encode()).hexdigest()

    @property
    def host(self) -> str:
        """The URL's host, for logs."""
        return urlsplit(self.url).hostname or ""

    def headers(self, message: str, body: str, now: datetime) -> Mapping[str, str]:
        """The headers of a message: its id, the time (UTC) of this attempt, and the signature of both."""
        return {
            "content-type": "application/json",
            "webhook-id": message,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Signer(self.secret).sign(message, now, body),
        }


def read_webhooks(text: str) -> tuple[Webhook, ...]:
    """Read a JSON list of `{"url", "secret"}`.

    Raises ValueError, of which the message never repeats a value.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{_EXPECTED}, found no JSON") from None
    if not isinstance(found, list):
        raise ValueError(f"{_EXPECTED}, found no list")
    hooks = tuple(_webhook(each, f"webhook {number}") for number, each in enumerate(found, 1))
    if len({each.url for each in hooks}) < len(hooks):
        raise ValueError("expected each address once, found one twice")
    return hooks


def _webhook(found: Any, name: str) -> Webhook:
    known = isinstance(found, dict) and set(found) == {"url", "secret"}
    if not known or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{name}: expected an object of the texts `url` and `secret`, and no more")
    _check_url(found["url"], name)
    _check_secret(found["secret"], name)
    return Webhook(found["url"], found["secret"])


def _check_url(url: str, name: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"{name}: expected a URL, found none") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_near(host)):
        raise ValueError(
            f"{name}: expected https://, or http:// to loopback or to a private network's IP address"
        )
    printable = url.isascii() and url.isprintable() and " " not in url
    if not host or not printable or parts.username is not None or parts.fragment:
        raise ValueError(f"{name}: expected a URL with a host, without a user or fragment, in ASCII")


def _is_near(host: str) -> bool:
    try:
        return is_loopback(host) or ip_address(host).is_private
    except ValueError:
        return False


def _check_secret(secret: str, name: str) -> None:
    try:
        size = len(base64.b64decode(secret.removeprefix(_PREFIX), validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if not secret.startswith(_PREFIX) or not _FEWEST_BYTES <= size <= _MOST_BYTES:
        raise ValueError(
            f"{name}: expected the secret as {_PREFIX} and the base64 of {_FEWEST_BYTES} to {_MOST_BYTES} "
            f'random bytes: echo "{_PREFIX}$(openssl rand -base64 32)"'
        )
