"""The signatures of a store's versions: by whom each was signed, and whether that is enough to open it."""

from __future__ import annotations

from model_store.artefact import Artefact
from model_store.backend import Backend
from model_store.errors import ArtefactUntrusted, PublishRefused
from model_store.signing import SIGNATURE, Signer, TrustedKeys, key_id, named_key


class Signatures:
    """Signs with `signer`, and asks for a signature by one of `trusted`, or, when that is None, for none."""

    def __init__(self, backend: Backend, signer: Signer | None, trusted: TrustedKeys | None) -> None:
        self._backend = backend
        self._signer, self._trusted = signer, trusted
        self._checked: set[str] = set()

    @property
    def signer(self) -> Signer | None:
        """What signs; None without a key."""
        return self._signer

    def without_trust(self) -> Signatures:
        """The same, but every version is trusted."""
        return Signatures(self._backend, self._signer, None)

    def check_publishes(self, name: str) -> None:
        """Raise PublishRefused if what is published now could not be opened."""
        if self._trusted is not None and (self._signer is None or self._signer.public not in self._trusted):
            raise PublishRefused(
                f"'{name}': only versions that a trusted key signed are opened, and this store has "
                "no trusted key to sign with: set LOCUM_SIGNING_KEY"
            )

    def files(self, name: str, digest: str) -> dict[str, bytes]:
        """The files that a new version has beside its manifest: its signature, if this store signs."""
        return {} if self._signer is None else {SIGNATURE: self._signer.sign(name, digest)}

    def check_signs(self, reference: str) -> None:
        """Raise PublishRefused without a signer."""
        if self._signer is None:
            raise PublishRefused(
                f"'{reference}': expected a key to sign with, found none; name one with --key"
            )

    def sign(self, artefact: Artefact) -> None:
        """Sign a version with the signer, in place of an earlier signature."""
        for file, signature in self.files(artefact.name, artefact.digest).items():
            self._backend.attach(artefact.name, artefact.version, file, signature)

    def of(self, artefact: Artefact) -> bytes | None:
        """Read the signature of a version; None without one. It is not verified."""
        return self._backend.attached(artefact.name, artefact.version, SIGNATURE)

    def by_another(self, artefact: Artefact) -> bool:
        """Whether a version has the signature of another key than the signer's."""
        own = None if self._signer is None else key_id(self._signer.public)
        there = self._backend.attached(artefact.name, artefact.version, SIGNATURE)
        return there is not None and named_key(there) != own

    def signed_by(self, artefact: Artefact) -> str | None:
        """Return the id of the trusted key that signed a version; None in a store without trusted keys.

        Raises ArtefactUntrusted.
        """
        if self._trusted is None:
            return None
        signature = self._backend.attached(artefact.name, artefact.version, SIGNATURE)
        return self._trusted.check(str(artefact), artefact.name, artefact.digest, signature)

    def check(self, artefact: Artefact) -> None:
        """Raise ArtefactUntrusted for a version that is not signed as asked for. It is read once."""
        if artefact.digest not in self._checked:
            self.signed_by(artefact)
            self._checked.add(artefact.digest)

    def trusts(self, artefact: Artefact) -> bool:
        """Whether a version is signed as asked for."""
        if artefact.digest in self._checked:
            return True
        try:
            self.signed_by(artefact)
        except ArtefactUntrusted:
            return False
        return True
