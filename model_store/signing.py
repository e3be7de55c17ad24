"""Signatures of artefacts: Ed25519 over a manifest's digest, which covers every file.

A version's folder has `manifest.sig`: JSON with the signer's public key and the signature of

    locum-artefact/1 NAME DIGEST

A store with trusted keys opens only versions that one of them signed. The name is in the digest, too; it is
in the message so that a person can read what was signed.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from model_store.digest import sha256
from model_store.durable import write_durably
from model_store.errors import ArtefactUntrusted, KeyUnusable

SIGNATURE = "manifest.sig"
_PUBLIC_END = b"-----END PUBLIC KEY-----"


def key_id(key: Ed25519PublicKey) -> str:
    """A public key's name for people: the first 16 digits of its digest."""
    return _id_of(_raw(key))


@dataclass(frozen=True)
class Signer:
    """Signs with a private key."""

    key: Ed25519PrivateKey

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read a private key (PEM, PKCS 8, not encrypted). Raises KeyUnusable."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise KeyUnusable(f"{path}: expected a private key in PEM without a password: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyUnusable(f"{path}: expected an Ed25519 key, found {type(key).__name__}")
        return cls(key)

    @property
    def public(self) -> Ed25519PublicKey:
        """The public key."""
        return self.key.public_key()

    def sign(self, name: str, digest: str) -> bytes:
        """The content of `manifest.sig`."""
        return (json.dumps(self._signed(_message(name, digest))) + "\n").encode()

    def sign_document(self, kind: str, digest: str) -> dict[str, str]:
        """The public key and the signature of `locum-document/1 KIND DIGEST`, each in base64."""
        return self._signed(_message_of_document(kind, digest))

    def _signed(self, message: bytes) -> dict[str, str]:
        return {
            "key": base64.b64encode(_raw(self.public)).decode(),
            "signature": base64.b64encode(self.key.sign(message)).decode(),
        }


def named_key(signature: bytes) -> str | None:
    """The id of the key that a `manifest.sig` names, without checking it; None where it cannot be read."""
    try:
        return _id_of(base64.b64decode(json.loads(signature)["key"], validate=True))
    except (ValueError, KeyError, TypeError, binascii.Error):
        return None


def _id_of(raw: bytes) -> str:
    return sha256(raw).removeprefix("sha256:")[:16]


class TrustedKeys:
    """The public keys that a store opens versions of."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys = {_raw(key): key for key in keys}

    @classmethod
    def load(cls, path: Path) -> TrustedKeys:
        """Read the public keys (PEM) of a file, or of every *.pem in a folder. Raises KeyUnusable."""
        files = sorted(path.glob("*.pem")) if path.is_dir() else [path]
        keys = [key for file in files for key in _public_keys(file)]
        if not keys:
            raise KeyUnusable(f"{path}: expected a public key in PEM, found none")
        return cls(keys)

    def __contains__(self, key: Ed25519PublicKey) -> bool:
        return _raw(key) in self._keys

    def check(self, where: str, name: str, digest: str, signature: bytes | None) -> str:
        """Return the id of the trusted key that signed the version. Raises ArtefactUntrusted."""
        if signature is None:
            raise ArtefactUntrusted(
                f"'{where}' is not signed, and only versions that a trusted key signed are opened: sign it "
                "with `python -m model_store sign`, or use another version"
            )
        try:
            content = json.loads(signature)
        except ValueError as error:
            raise ArtefactUntrusted(f"'{where}': {SIGNATURE} cannot be read: sign it again") from error
        return self._check(where, SIGNATURE, content, _message(name, digest))

    def check_document(self, where: str, kind: str, digest: str, signature: Mapping[str, str]) -> str:
        """Return the id of the trusted key that signed a document. Raises ArtefactUntrusted."""
        return self._check(where, "the signature", signature, _message_of_document(kind, digest))

    def _check(self, where: str, what: str, content: Mapping[str, str], message: bytes) -> str:
        try:
            raw, signed = (base64.b64decode(content[part], validate=True) for part in ("key", "signature"))
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise ArtefactUntrusted(f"'{where}': {what} cannot be read: sign it again") from error
        key = self._keys.get(raw)
        if key is None:
            raise ArtefactUntrusted(
                f"'{where}' was signed by a key that is not trusted ({_id_of(raw)}): trusted are "
                f"{', '.join(sorted(map(key_id, self._keys.values())))}"
            )
        try:
            key.verify(signed, message)
        except InvalidSignature as error:
            raise ArtefactUntrusted(
                f"'{where}': its signature is not of this content: restore {what}, or sign it again"
            ) from error
        return key_id(key)


def make_key(private: Path) -> str:
    """Write a new private key and, beside it as `NAME.pub.pem`, its public key; returns the key's id.

    Raises KeyUnusable if a file exists already.
    """
    public = private.with_name(f"{private.stem}.pub.pem")
    for path in (private, public):
        if path.exists():
            raise KeyUnusable(f"{path} exists already; choose another name")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_durably(private, pem, mode=0o600)
    write_durably(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return key_id(key.public_key())


def _public_keys(path: Path) -> list[Ed25519PublicKey]:
    try:
        parts = path.read_bytes().split(_PUBLIC_END)[:-1]
        keys = [load_pem_public_key(part.lstrip() + _PUBLIC_END) for part in parts]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise KeyUnusable(f"{path}: expected public keys in PEM: {error}") from error
    found = [key for key in keys if isinstance(key, Ed25519PublicKey)]
    if len(found) < len(keys):
        raise KeyUnusable(f"{path}: expected Ed25519 keys only")
    return found


def _message(name: str, digest: str) -> bytes:
    return f"locum-artefact/1 {name} {digest}".encode()


def _message_of_document(kind: str, digest: str) -> bytes:
    return f"locum-document/1 {kind} {digest}".encode()


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)
