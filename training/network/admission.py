"""Who may join a run: hospitals of the consortium that would run the same, on the same data as before."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import VerificationError

from training.network.cell import Rejected
from training.network.kits import Kit
from training.network.messages import PROTOCOL, Announcement, Invitation, differences, other_wire
from training.network.runs import NetworkRecord

_MOST_SLICES = 2**14  # of one file: several times the longest scans


class Admission:
    """Invites hospitals, checks what they announce, and keeps it in the run's record.

    `changed` is the operator's lock: it guards the invitations that were sent, and the announcements.
    """

    def __init__(
        self, kit: Kit, invitation: Invitation, record: NetworkRecord, changed: threading.Condition
    ) -> None:
        self._kit = kit
        self._authority = x509.load_pem_x509_certificate(kit.authority.read_bytes())
        self._invitation = invitation
        self._record = record
        self._changed = changed
        self._fixed = record.began
        # The last few of each hospital: one that was restarted may ask again before it joins.
        self._nonces: dict[str, deque[str]] = {}

    @property
    def announced(self) -> dict[str, Announcement]:
        """What each hospital announced."""
        return self._record.announced

    @property
    def fixed(self) -> bool:
        """Whether a hospital that joins again must have the data that it announced."""
        return self._fixed

    def fix(self) -> None:
        """Go on with what the hospitals have announced."""
        with self._changed:
            self._fixed = True

    def invite(self, site: str) -> Invitation:
        """Invite a hospital to join, with a nonce that it signs."""
        nonce = secrets.token_hex(32)
        with self._changed:
            self._nonces.setdefault(site, deque(maxlen=4)).append(nonce)
        return self._invitation.model_copy(update={"nonce": nonce})

    def check(self, site: str, said: Announcement) -> int:
        """Return the serial number of the certificate of a hospital that may join. Raises Rejected.

        TLS has checked a certificate already, but does not show its serial number, which revocation needs.
        """
        if problems := self._mismatches(site, said):
            raise Rejected("; ".join(problems), "mismatch")
        certificate = self._certificate(site, said)
        self.check_revoked(certificate.serial_number)
        return certificate.serial_number

    def check_revoked(self, serial: int) -> None:
        """Raise Rejected for the serial number of a revoked certificate."""
        if serial in self._kit.revoked():
            raise Rejected("the certificate was revoked; ask the operator for a new kit", "revoked")

    def enter(self, site: str, said: Announcement) -> None:
        """Record what a hospital that may join announced.

        Once the run began, only its consent may change. Raises Rejected for other data than before.
        """
        with self._changed:
            before = self.announced.get(site)
            if self._fixed and before is not None:
                if (before.digest, before.splits_digest) != (said.digest, said.splits_digest):
                    raise Rejected(
                        "the hospital's data changed since this run began; restore it, or ask the operator "
                        "to start another run",
                        "mismatch",
                    )
                said = before.model_copy(update={"consents": said.consents})
            if said != before:
                self.announced[site] = said
                self._record.write()

    def differences(self) -> list[str]:
        """Say which versions of the hospitals differ from the operator's, and what that means."""
        ours = self._invitation.software
        said = sorted(self.announced.items())
        return [each for site, own in said for each in differences(ours, own.software, site)]

    def _mismatches(self, site: str, said: Announcement) -> list[str]:
        """How a hospital's Locum differs from the operator's, and what of its counts cannot be."""
        ours = self._invitation
        problems = []
        if problem := other_wire(said.protocol, site, PROTOCOL, "the operator"):
            problems.append(problem)
        for name in ("plan_digest", "configuration_digest"):
            if getattr(ours, name) != getattr(said, name):
                problems.append(
                    f"{name}: expected {getattr(ours, name)[:12]}, found {getattr(said, name)[:12]}"
                )
        files = said.files.get("train", 0)
        if files < 1:
            problems.append("there is no case to train on")
        elif said.images is None or not 1 <= said.images <= files * _MOST_SLICES:
            problems.append(
                f"images: expected 1 to {files * _MOST_SLICES} training images of {files} files, found "
                f"{said.images}"
            )
        return problems

    def _certificate(self, site: str, said: Announcement) -> x509.Certificate:
        """The certificate, after checking that the hospital holds its key."""
        from nvflare.lighter.utils import verify_cert_chain, verify_content

        with self._changed:
            nonces = self._nonces.get(site, deque())
            if said.nonce not in nonces:
                raise Rejected("the invitation is not known any more; ask again", "session")
            nonces.remove(said.nonce)
        try:
            certificate = x509.load_pem_x509_certificate(said.certificate.encode())
            if (ends := certificate.not_valid_after_utc) < datetime.now(UTC):
                raise Rejected(
                    f"the certificate ended on {ends:%Y-%m-%d}; ask the operator to renew it", "revoked"
                )
            verify_cert_chain(certificate, [], self._authority)
            verify_content(said.nonce, said.signature, certificate.public_key())
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except (ValueError, TypeError, InvalidSignature, VerificationError) as error:
            raise Rejected("the certificate or its signature is not valid", "revoked") from error
        if [name.value for name in names] != [site]:
            raise Rejected(f"the certificate is not that of '{site}'", "revoked")
        return certificate
