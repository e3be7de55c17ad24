"""The artefact store: immutable, numbered versions of artefacts, in a folder or in an S3 bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import overload

from pydantic import BaseModel, ValidationError

from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact, Expected
from model_store.backend import Backend
from model_store.digest import sha256
from model_store.drafts import check_draft
from model_store.errors import (
    ArtefactDamaged,
    ArtefactUntrusted,
    ArtefactWithdrawn,
    PublishRefused,
    ReferenceInvalid,
    ReferenceNotFound,
    StoreError,
    StoreUnavailable,
    UnknownKind,
)
from model_store.folder import Folder
from model_store.manifest import AnyManifest, FileEntry
from model_store.reference import NAME, parse_reference
from model_store.signing import SIGNATURE, Signer, TrustedKeys

_BUCKET = "s3://"
REPORT = "report.html"
# Of files of a bucket, on this machine.
DEFAULT_CACHE = Path(".locum/cache")


class Tombstone(BaseModel):
    """Why, by whom and when (UTC) a version was withdrawn."""

    actor: str
    reason: str
    time: datetime


@dataclass(frozen=True)
class Version:
    """One version in a listing. `flagged` has the withdrawn artefacts (`name@version`) it descends from."""

    artefact: Artefact
    withdrawn: Tombstone | None
    flagged: tuple[str, ...]


class Store:
    """A folder of artefacts, which need not exist yet, or a bucket. Many processes can use it at once."""

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
        self._signer, self._trusted = signer, trusted
        self._operators = frozenset(operators)
        self._signed: set[str] = set()
        # Versions never change, so manifests are cached.
        self._known: dict[tuple[str, int], Artefact] = {}
        self._sees: Callable[[str], bool] | None = None

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
        view = copy.copy(self)
        view._sees = sees
        return view

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
        if self._trusted is not None and (self._signer is None or self._signer.public not in self._trusted):
            raise PublishRefused(
                f"'{manifest.name}': only versions that a trusted key signed are opened, and this store has "
                "no trusted key to sign with: set LOCUM_SIGNING_KEY"
            )
        check_draft(manifest, files, self.by_digest, self._operators)
        entries = {name: FileEntry(size=len(data), sha256=sha256(data)) for name, data in files.items()}
        manifest = manifest.model_copy(update={"files": entries})
        content = manifest.to_bytes()
        digest = sha256(content)
        signed = {} if self._signer is None else {SIGNATURE: self._signer.sign(manifest.name, digest)}
        found: list[int] = []

        def earlier() -> int | None:
            found[:] = [a.version for a in self._readable(manifest.name) if a.digest == digest]
            return next(iter(found), None)

        number = self._backend.publish(
            _checked(manifest.name),
            {**files, **signed, MANIFEST: content, DIGEST_FILE: digest.encode()},
            earlier,
            admit,
        )
        artefact = self._admitted(self._artefact(manifest.name, number))
        if found:
            self._backend.restore(artefact, files)
        return artefact

    def sign(self, reference: str) -> Artefact:
        """Sign a published version with the store's signer, in place of an earlier signature.

        Raises as `open`, without regard to trust, and PublishRefused without a signer.
        """
        if self._signer is None:
            raise PublishRefused(
                f"'{reference}': expected a key to sign with, found none; name one with --key"
            )
        unguarded = copy.copy(self)
        unguarded._trusted, unguarded._signed = None, set()
        artefact = unguarded.open(reference)
        signature = self._signer.sign(artefact.name, artefact.digest)
        self._backend.attach(artefact.name, artefact.version, SIGNATURE, signature)
        return artefact

    def signed_by(self, artefact: Artefact) -> str | None:
        """Return the id of the trusted key that signed a version; None in a store without trusted keys.

        Raises ArtefactUntrusted.
        """
        if self._trusted is None:
            return None
        signature = self._backend.attached(artefact.name, artefact.version, SIGNATURE)
        return self._trusted.check(str(artefact), artefact.name, artefact.digest, signature)

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
        numbers = self.numbers(name)
        if digest is not None:
            numbers = [a.version for a in self._readable(name) if a.digest == digest]
        elif number is not None:
            numbers = [n for n in numbers if n == number]
        if not numbers:
            known = ", ".join(str(n) for n in self.numbers(name))
            raise ReferenceNotFound(
                f"'{reference}' is not in the store; "
                + (
                    f"'{name}' has the versions {known}"
                    if known
                    else f"names: {', '.join(self.names()) or 'none'}"
                )
            )
        if number is None and digest is None:
            numbers = [n for n in numbers if not self._is_withdrawn(name, n)] or numbers
            # Newest first: the signatures of the versions before it are not read.
            numbers = [next((n for n in reversed(numbers) if self._is_trusted(name, n)), numbers[-1])]
        artefact = self._admitted(self._artefact(name, numbers[-1]))
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
        for artefact in self._all():
            if artefact.digest == digest:
                found = self._admitted(artefact)
                return found if kind is None else found.expect(kind)
        raise ReferenceNotFound(f"'{digest}' is not in the store; publish or copy that artefact first")

    def find(self, name: str, digest: str) -> Artefact | None:
        """The readable version of a name with this digest, withdrawn or not, unverified; None without one."""
        return next((artefact for artefact in self._readable(name) if artefact.digest == digest), None)

    # ------------------------------------------------------------------ list

    def names(self) -> list[str]:
        """List the names that have a version, sorted."""
        return [name for name in self._backend.names() if self._sees is None or self.numbers(name)]

    def numbers(self, name: str) -> list[int]:
        """List the version numbers of a name, also damaged and withdrawn ones; empty for an unknown name."""
        numbers = self._backend.numbers(name)
        return numbers if self._sees is None else self._visible(name, numbers, self._sees)

    def versions(self, name: str) -> list[Version]:
        """List every readable version of a name, oldest first, including withdrawn ones.

        Raises ReferenceNotFound for an unknown name, and the first version's error if no version is readable.
        """
        if not self.numbers(name):
            raise ReferenceNotFound(
                f"'{name}' is not in the store; names: {', '.join(self.names()) or 'none'}"
            )
        unreadable = self.unreadable(name)
        artefacts = [a for a in self._readable(name) if a.version not in unreadable]
        if not artefacts:
            raise next(iter(unreadable.values()))
        known = self._by_digests()
        return [Version(a, self.tombstone(a.name, a.version), self._flags(a, known)) for a in artefacts]

    def flagged(self, artefact: Artefact) -> tuple[str, ...]:
        """List the withdrawn artefacts (`name@version`) that an artefact descends from."""
        return self._flags(artefact, self._by_digests()) if artefact.ancestors() else ()

    def unreadable(self, name: str) -> dict[int, StoreError]:
        """Map each version with an unreadable manifest or tombstone to its error. Listings leave it out."""
        found: dict[int, StoreError] = {}
        for number in self.numbers(name):
            try:
                self._artefact(name, number)
                self.tombstone(name, number)
            except StoreError as error:
                found[number] = error
        return found

    def descendants(self, digest: str) -> list[Artefact]:
        """List every artefact composed of or made from the one with this digest, transitively."""
        found: list[Artefact] = []
        reached = {digest}
        everything = list(self._all())
        grown = True
        while grown:
            grown = False
            for artefact in everything:
                if artefact.digest not in reached and reached & artefact.ancestors():
                    reached.add(artefact.digest)
                    found.append(artefact)
                    grown = True
        return found

    def tombstone(self, name: str, version: int) -> Tombstone | None:
        """Read the tombstone of a version; None if it was not withdrawn.

        Raises ArtefactDamaged if the tombstone cannot be read.
        """
        try:
            content = self._backend.tombstone(name, version)
            return None if content is None else Tombstone.model_validate_json(content)
        except (OSError, ValidationError) as error:
            raise ArtefactDamaged(
                f"{name}@{version}: its tombstone {version}.withdrawn.json cannot be read "
                f"({type(error).__name__}): restore that file, or remove it and withdraw the version again"
            ) from error

    # ------------------------------------------------------------------ withdraw, prune

    def withdraw(self, reference: str, *, actor: str, reason: str) -> list[Artefact]:
        """Withdraw a version, which then no longer opens. Returns the descendants that are now flagged."""
        if not actor.strip() or not reason.strip():
            raise PublishRefused(f"withdrawing '{reference}' needs an actor and a reason, found an empty one")
        artefact = self.open(reference, verify=False)
        tombstone = Tombstone(actor=actor, reason=reason, time=datetime.now(UTC))
        self._backend.bury(artefact.name, artefact.version, tombstone.model_dump_json().encode())
        return self.descendants(artefact.digest)

    def prune(self) -> list[str]:
        """Delete orphaned files, and the files of withdrawn versions. Returns what was deleted.

        Manifests and tombstones of withdrawn versions are kept, so their history stays readable.
        """
        return self._backend.prune([a for a in self._all() if self._is_withdrawn(a.name, a.version)])

    # ------------------------------------------------------------------ inside

    def _artefact(self, name: str, number: int) -> Artefact:
        if (name, number) not in self._known:
            self._known[name, number] = self._backend.artefact(name, number)
        return self._known[name, number]

    def _visible(self, name: str, numbers: list[int], sees: Callable[[str], bool]) -> list[int]:
        hidden, readable = set(), set()
        for number in numbers:
            with suppress(ArtefactDamaged, UnknownKind):
                manifest = self._artefact(name, number).manifest
                readable.add(number)
                hospital = manifest.adapted_to
                if hospital is not None and not sees(hospital):
                    hidden.add(number)
        return [n for n in numbers if n not in hidden] if readable - hidden else []

    def _all(self) -> Iterator[Artefact]:
        for name in self.names():
            yield from self._readable(name)

    def _readable(self, name: str) -> Iterator[Artefact]:
        """Yield the readable versions: one damaged manifest must not make the whole store unusable."""
        for number in self.numbers(name):
            with suppress(ArtefactDamaged, UnknownKind):
                yield self._artefact(name, number)

    def _flags(self, artefact: Artefact, known: Mapping[str, Artefact]) -> tuple[str, ...]:
        """List the withdrawn ancestors of an artefact, the inverse of `descendants`."""
        reached: set[str] = set()
        left = {*artefact.ancestors()}
        while left:
            digest = left.pop()
            reached.add(digest)
            if digest in known:
                left |= known[digest].ancestors() - reached
        return tuple(
            str(a)
            for digest, a in known.items()
            if digest in reached and self._is_withdrawn(a.name, a.version)
        )

    def _by_digests(self) -> dict[str, Artefact]:
        return {artefact.digest: artefact for artefact in self._all()}

    def _is_withdrawn(self, name: str, version: int) -> bool:
        # An unreadable tombstone is one, too.
        with suppress(OSError):
            return self._backend.tombstone(name, version) is not None
        return True

    def _is_trusted(self, name: str, version: int) -> bool:
        # A damaged version is not hidden by an older one.
        with suppress(ArtefactDamaged, UnknownKind):
            artefact = self._artefact(name, version)
            if artefact.digest in self._signed:
                return True
            try:
                self.signed_by(artefact)
            except ArtefactUntrusted:
                return False
        return True

    def _admitted(self, artefact: Artefact) -> Artefact:
        """Return an artefact that may be opened. Raises ArtefactWithdrawn, ArtefactUntrusted."""
        tombstone = self.tombstone(artefact.name, artefact.version)
        if tombstone is not None:
            raise ArtefactWithdrawn(
                f"'{artefact}' was withdrawn by {tombstone.actor} on {tombstone.time:%Y-%m-%d}: "
                f"{tombstone.reason}. Use another version"
            )
        if artefact.digest not in self._signed:
            self.signed_by(artefact)
            self._signed.add(artefact.digest)
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
