"""The artefact store: immutable, numbered versions of artefacts, in a folder or in an S3 bucket."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import overload

from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact, Expected
from model_store.backend import Backend
from model_store.digest import sha256
from model_store.drafts import check_draft
from model_store.errors import (
    ArtefactDamaged,
    ArtefactWithdrawn,
    PublishRefused,
    ReferenceInvalid,
    ReferenceNotFound,
    StoreUnavailable,
    UnknownKind,
)
from model_store.folder import Folder
from model_store.index import Index, Record
from model_store.manifest import AnyManifest, FileEntry
from model_store.reference import NAME, parse_reference
from model_store.signatures import Signatures
from model_store.signing import Signer, TrustedKeys
from model_store.versions import Lineage, Tombstone, Versions, View, some

_BUCKET = "s3://"
REPORT = "report.html"
# Of files of a bucket, on this machine.
DEFAULT_CACHE = Path(".locum/cache")


class Store:
    """A folder of artefacts, which need not exist yet, or a bucket. Many processes can use it at once.

    The store publishes, opens and withdraws. `versions` lists and looks at what is in it, `lineage` says what
    descends from what, `signatures` by whom a version was signed.
    """

    versions: Versions
    lineage: Lineage
    signatures: Signatures

    def __init__(
        self,
        root: Path | str,
        cache: Path = DEFAULT_CACHE,
        *,
        signer: Signer | None = None,
        trusted: TrustedKeys | None = None,
        operators: Iterable[str] = (),
    ) -> None:
        """Open the store.

        Args:
            root: a folder, or `s3://BUCKET/PREFIX`.
            cache: folder for what is read of a bucket.
            signer: signs what is published.
            trusted: keys of which one must have signed a version that is opened; None opens every version.
            operators: what graphs may have beyond the built-in list, see `model_store.graphs`.
        """
        self._backend = _backend(located(root), cache)
        self._operators = frozenset(operators)
        self._index = Index(self._backend)
        self._look(View(self._backend), Signatures(self._backend, signer, trusted))

    def _look(self, view: View, signatures: Signatures) -> None:
        self._view, self.signatures = view, signatures
        self.lineage = Lineage(view, self._index)
        self.versions = Versions(view, self._index, self.lineage, signatures)

    def _seen(self, view: View) -> Store:
        seen = copy.copy(self)
        seen._look(view, self.signatures)
        return seen

    @property
    def root(self) -> Path | str:
        """The folder, or the bucket's URL."""
        return self._backend.root

    def check(self) -> None:
        """Raise OSError or StoreUnavailable if versions cannot be read; a folder need not exist."""
        self._backend.check()

    def prepare(self) -> None:
        """Make a folder that does not exist. Raises OSError or StoreError if nothing could be published."""
        self._backend.prepare()

    def visible_to(self, sees: Callable[[str], bool]) -> Store:
        """Return a read-only view without the versions adapted to a hospital for which `sees` is false.

        Hidden versions are not listed, found or named, as if they had never been published. An unreadable
        version is visible if a readable version of its name is.
        """
        return self._seen(replace(self._view, sees=sees))

    def as_of_now(self) -> Store:
        """Return a view for one request: it has what is in the store now, and may not see what comes later.

        A bucket is asked once whether anything changed, by the first call that needs it.
        """
        return self._seen(replace(self._view, since=time.monotonic()))

    # ------------------------------------------------------------------ publish

    def publish(
        self, manifest: AnyManifest, files: Mapping[str, bytes], admit: Callable[[], None] | None = None
    ) -> Artefact:
        """Publish `files` as the next version of `manifest.name`. The manifest's `files` are filled in here.

        Atomic and idempotent: a partial version is never visible, and if the content is already a version of
        this name, that version is returned, and its missing and damaged files are written again.

        `admit` is called last: all files are written, the name is locked against other publications, and the
        version is not yet visible. If it raises, nothing is published and the error is raised.

        Raises:
            PublishRefused: the files do not fit the kind, a reference is not in the store or does not fit; or
                the version could not be opened, for want of a trusted signer.
            GraphRefused: a graph needs other files, or has an operator that is not allowed.
            ArtefactWithdrawn: the same content was published before and withdrawn.
        """
        self.signatures.check_publishes(manifest.name)
        check_draft(manifest, files, self.by_digest, self._operators)
        entries = {name: FileEntry(size=len(data), sha256=sha256(data)) for name, data in files.items()}
        manifest = manifest.model_copy(update={"files": entries})
        content = manifest.to_bytes()
        digest = sha256(content)
        signed = self.signatures.files(manifest.name, digest)
        found: list[int] = []

        def earlier() -> int | None:
            sought = self.versions.sought(manifest.name, digest)
            same = [each.number for each in sought if each.digest == digest]
            # The index may have been of another content.
            found[:] = [each for each in same if self._index.artefact(manifest.name, each).digest == digest]
            return next(iter(found), None)

        number = self._backend.publish(
            _checked(manifest.name),
            {**files, **signed, MANIFEST: content, DIGEST_FILE: digest.encode()},
            earlier,
            admit,
        )
        artefact = self.versions.artefact(manifest.name, number)
        if not found:
            self._index.published(artefact)
            self._backend.tell()
        self._admitted(artefact)
        if found:
            self._backend.restore(artefact, files)
        return artefact

    def sign(self, reference: str) -> Artefact:
        """Sign a published version with the store's signer, in place of an earlier signature.

        Raises as `open`, without regard to trust, and PublishRefused without a signer.
        """
        self.signatures.check_signs(reference)
        unguarded = copy.copy(self)
        unguarded._look(self._view, self.signatures.without_trust())
        artefact = unguarded.open(reference)
        self.signatures.sign(artefact)
        return artefact

    def sign_parts(self, artefact: Artefact) -> tuple[list[Artefact], list[Artefact]]:
        """Sign what a composite is made of; returns the parts that were signed, and those that were not.

        A part may be of other composites, too: it keeps the signature of another key. Raises as `sign`.
        """
        parts = [self.by_digest(each) for each in dict.fromkeys(artefact.manifest.references().values())]
        signed, kept = [], []
        for part in parts:
            if self.signatures.by_another(part):
                kept.append(part)
            else:
                signed.append(self.sign(str(part)))
        return signed, kept

    def attach_report(self, artefact: Artefact, report: bytes) -> None:
        """Keep the report (HTML) of the run that made a version beside it, in place of an earlier one.

        It has times, which a run's content must not depend on, so neither the digest nor the signature
        covers it.
        """
        self._backend.attach(artefact.name, artefact.version, REPORT, report)

    def report(self, artefact: Artefact) -> bytes | None:
        """Read the report (HTML) of the run that made a version; None if none was attached."""
        return self._backend.attached(artefact.name, artefact.version, REPORT)

    def has_report(self, artefact: Artefact) -> bool:
        """Return whether a report was attached to a version, without reading it."""
        return self._backend.is_attached(artefact.name, artefact.version, REPORT)

    # ------------------------------------------------------------------ open

    def open(self, reference: str, *, verify: bool = True) -> Artefact:
        """Open an artefact by reference: `name`, `name@3` or `name@sha256:…`.

        `name` alone is its newest version that is not withdrawn, and that a trusted key signed where that is
        asked for. With `verify`, every file is hashed and every graph checked first.

        Raises:
            ReferenceInvalid, ReferenceNotFound, ArtefactWithdrawn, ArtefactUntrusted, ArtefactDamaged,
            GraphRefused, UnknownKind.
        """
        name, number, digest = parse_reference(reference)
        if digest is not None:
            numbers = self._numbers_of(name, digest)
        else:
            numbers = self.versions.numbers(name)
            if number is not None:
                numbers = [n for n in numbers if n == number]
        if not numbers:
            known = some([str(n) for n in self.versions.numbers(name)])
            raise ReferenceNotFound(
                f"'{reference}' is not in the store; "
                + (
                    f"'{name}' has the versions {known}"
                    if known
                    else f"names: {some(self.versions.names()) or 'none'}"
                )
            )
        in_force: list[int] = []
        if number is None and digest is None:
            withdrawn = self._view.listed(name).withdrawn
            in_force = [n for n in numbers if n not in withdrawn] if withdrawn else numbers[:]
            # Another process may have withdrawn it since.
            while in_force and self._view.is_withdrawn(name, in_force[-1]):
                in_force.pop()
            numbers = in_force or numbers
            # Newest first: the signatures of the versions before it are not read.
            numbers = [next((n for n in reversed(numbers) if self._is_trusted(name, n)), numbers[-1])]
        artefact = self.versions.artefact(name, numbers[-1])
        if digest is not None and artefact.digest != digest:
            return self.open(reference, verify=verify)
        try:
            artefact = self._admitted(artefact)
        except ArtefactWithdrawn:
            # Withdrawn since that look: the version before it is the newest now.
            if number is not None or digest is not None or not in_force:
                raise
            return self.open(reference, verify=verify)
        if verify:
            artefact.verify(self._operators)
        return artefact

    @overload
    def by_digest(self, digest: str) -> Artefact: ...
    @overload
    def by_digest(self, digest: str, kind: type[Expected]) -> Artefact[Expected]: ...
    def by_digest(self, digest: str, kind: type[Expected] | None = None) -> Artefact | Artefact[Expected]:
        """Find the artefact with this digest, unverified. `kind` is the expected class of its manifest.

        Raises:
            KindMismatch: it is of another kind.
            ReferenceNotFound, ArtefactWithdrawn, ArtefactUntrusted, ArtefactDamaged: as `open`.
        """
        record = self.lineage.locate(digest)
        if record is not None and self.versions.artefact(record.name, record.number).digest != digest:
            # The index was of another content; what was read has corrected it.
            record = self.lineage.locate(digest)
        if record is None:
            raise ReferenceNotFound(f"'{digest}' is not in the store; publish or copy that artefact first")
        found = self._admitted(self.versions.artefact(record.name, record.number))
        return found if kind is None else found.expect(kind)

    # ------------------------------------------------------------------ withdraw, prune

    def withdraw(self, reference: str, *, actor: str, reason: str) -> list[Record]:
        """Withdraw a version, which then no longer opens. Returns the descendants that are now flagged."""
        if not actor.strip() or not reason.strip():
            raise PublishRefused(f"withdrawing '{reference}' needs an actor and a reason, found an empty one")
        artefact = self.open(reference, verify=False)
        tombstone = Tombstone(actor=actor, reason=reason, time=datetime.now(UTC))
        self._backend.bury(artefact.name, artefact.version, tombstone.model_dump_json().encode())
        self._backend.tell()
        return self.lineage.descendants(artefact.digest)

    def prune(self) -> list[str]:
        """Delete orphaned files, and the files of withdrawn versions. Returns what was deleted.

        Manifests and tombstones of withdrawn versions are kept, so their history stays readable.
        """
        withdrawn = []
        for record in self.lineage.records():
            if self._view.is_withdrawn(record.name, record.number):
                with suppress(ArtefactDamaged, UnknownKind):
                    withdrawn.append(self.versions.artefact(record.name, record.number))
        return self._backend.prune(withdrawn)

    # ------------------------------------------------------------------ inside

    def _numbers_of(self, name: str, digest: str) -> list[int]:
        record = self.lineage.locate(digest, thorough=False)
        if record is not None and record.name == name:
            return [record.number]
        # What was copied into the name by hand is found at once, too.
        sought = self.versions.sought(name, digest)
        return [record.number for record in sought if record.digest == digest]

    def _is_trusted(self, name: str, number: int) -> bool:
        # A damaged version is not hidden by an older one.
        with suppress(ArtefactDamaged, UnknownKind):
            return self.signatures.trusts(self.versions.artefact(name, number))
        return True

    def _admitted(self, artefact: Artefact) -> Artefact:
        """Return an artefact that may be opened. Raises ArtefactWithdrawn, ArtefactUntrusted."""
        tombstone = self.versions.tombstone(artefact.name, artefact.version)
        if tombstone is not None:
            raise ArtefactWithdrawn(
                f"'{artefact}' was withdrawn by {tombstone.actor} on {tombstone.time:%Y-%m-%d}: "
                f"{tombstone.reason}. Use another version"
            )
        self.signatures.check(artefact)
        return artefact


def located(location: Path | str) -> Path | str:
    """A store's location as a path, or as the URL of a bucket."""
    text = str(location)
    return text if text.startswith(_BUCKET) else Path(text).expanduser()


def _backend(location: Path | str, cache: Path) -> Backend:
    if isinstance(location, Path):
        return Folder(location)
    # Imported late: most stores are folders, and do without the extra.
    try:
        from model_store.bucket import Bucket
    except ModuleNotFoundError as error:
        raise StoreUnavailable(f"{location}: a store in a bucket needs 'pip install locum[s3]'") from error

    return Bucket(location, cache)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ReferenceInvalid(f"'{name}': expected a name of letters, digits, '_', '.' and '-'")
    return name
