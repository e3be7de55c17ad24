"""The artefact store: immutable, numbered versions of artefacts, in a folder or in an S3 bucket."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from model_store.index import Index, Record
from model_store.manifest import AnyManifest, FileEntry
from model_store.reference import NAME, parse_reference
from model_store.signing import SIGNATURE, Signer, TrustedKeys, key_id, named_key

_BUCKET = "s3://"
REPORT = "report.html"
_MOST_NAMED = 20
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
        self._index = Index(self._backend)
        self._sees: Callable[[str], bool] | None = None
        self._since: float | None = None

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

    def as_of_now(self) -> Store:
        """Return a view for one request: it has what is in the store now, and may not see what comes later.

        A bucket is asked once whether anything changed, by the first call that needs it.
        """
        view = copy.copy(self)
        view._since = time.monotonic()
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
            same = [each.number for each in self._of(manifest.name, digest) if each.digest == digest]
            # The index may have been of another content.
            found[:] = [each for each in same if self._index.artefact(manifest.name, each).digest == digest]
            return next(iter(found), None)

        number = self._backend.publish(
            _checked(manifest.name),
            {**files, **signed, MANIFEST: content, DIGEST_FILE: digest.encode()},
            earlier,
            admit,
        )
        artefact = self._artefact(manifest.name, number)
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

    def sign_parts(self, artefact: Artefact) -> tuple[list[Artefact], list[Artefact]]:
        """Sign what a composite is made of; returns the parts that were signed, and those that were not.

        A part may be of other composites, too: it keeps the signature of another key. Raises as `sign`.
        """
        parts = [self.by_digest(each) for each in dict.fromkeys(artefact.manifest.references().values())]
        own = None if self._signer is None else key_id(self._signer.public)
        signed, kept = [], []
        for part in parts:
            there = self._backend.attached(part.name, part.version, SIGNATURE)
            if there is None or named_key(there) == own:
                signed.append(self.sign(str(part)))
            else:
                kept.append(part)
        return signed, kept

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
            numbers = [record.number for record in self._of(name, digest) if record.digest == digest]
        elif number is not None:
            numbers = [n for n in numbers if n == number]
        if not numbers:
            known = some([str(n) for n in self.numbers(name)])
            raise ReferenceNotFound(
                f"'{reference}' is not in the store; "
                + (
                    f"'{name}' has the versions {known}"
                    if known
                    else f"names: {some(self.names()) or 'none'}"
                )
            )
        in_force: list[int] = []
        if number is None and digest is None:
            withdrawn = self._backend.listed(name, self._now()).withdrawn
            in_force = [n for n in numbers if n not in withdrawn] if withdrawn else numbers[:]
            # Another process may have withdrawn it since.
            while in_force and self._is_withdrawn(name, in_force[-1]):
                in_force.pop()
            numbers = in_force or numbers
            # Newest first: the signatures of the versions before it are not read.
            numbers = [next((n for n in reversed(numbers) if self._is_trusted(name, n)), numbers[-1])]
        artefact = self._artefact(name, numbers[-1])
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
        record = self.locate(digest)
        if record is not None and self._artefact(record.name, record.number).digest != digest:
            # The index was of another content; what was read has corrected it.
            record = self.locate(digest)
        if record is None:
            raise ReferenceNotFound(f"'{digest}' is not in the store; publish or copy that artefact first")
        found = self._admitted(self._artefact(record.name, record.number))
        return found if kind is None else found.expect(kind)

    def find(self, name: str, digest: str) -> Artefact | None:
        """The readable version of a name with this digest, withdrawn or not, unverified; None without one."""
        record = self.locate(digest)
        with suppress(ArtefactDamaged, UnknownKind):
            return None if record is None or record.name != name else self._artefact(name, record.number)
        return None

    # ------------------------------------------------------------------ list

    def names(self) -> list[str]:
        """List the names that have a version, sorted."""
        surveyed, sees = self._backend.survey(self._now()), self._sees
        if sees is None:
            return list(surveyed)
        return [name for name, listed in surveyed.items() if self._visible(name, listed.numbers, sees)]

    def numbers(self, name: str) -> list[int]:
        """List the version numbers of a name, also damaged and withdrawn ones; empty for an unknown name."""
        numbers = self._backend.listed(name, self._now()).numbers
        return list(numbers) if self._sees is None else self._visible(name, numbers, self._sees)

    def records(self) -> list[Record]:
        """List what lineage needs of every readable version, by name and number, from the index."""
        found = self._index.complete(self._now())
        return (
            list(found)
            if self._sees is None
            else [each for each in found if not self._hides(each.adapted_to)]
        )

    def shared(self) -> tuple[str, ...]:
        """List the names with a version that is neither a part nor adapted to a hospital, sorted."""
        return self._index.shared(self._now())

    def locate(self, digest: str, *, thorough: bool = True) -> Record | None:
        """Find the version with this digest, withdrawn or not; None if there is none.

        Without `thorough`, one that was copied into the store by hand may be found a second late.
        """
        record = self._index.find(digest, self._now(), thorough=thorough)
        return None if record is None or self._hides(record.adapted_to) else record

    def made_by(self, name: str, run: str) -> Artefact | None:
        """Find the first version of a name that this run, or this job, made, withdrawn or not."""
        for record in self._of(name, run):
            if record.run == run:
                return self._artefact(name, record.number)
        return None

    def version(self, name: str, number: int) -> Version:
        """Look at one version, withdrawn or not.

        Raises:
            ReferenceNotFound: it is not in the store.
            ArtefactDamaged, UnknownKind: its manifest or its tombstone cannot be read.
        """
        if number not in self.numbers(name):
            raise ReferenceNotFound(f"'{name}@{number}' is not in the store")
        artefact = self._artefact(name, number)
        return Version(artefact, self.tombstone(name, number), self.flagged(artefact))

    def versions(self, name: str) -> list[Version]:
        """List every readable version of a name, oldest first, including withdrawn ones.

        Raises ReferenceNotFound for an unknown name, and the first version's error if no version is readable.
        """
        numbers = self.numbers(name)
        if not numbers:
            raise self._unknown(name)
        found, unreadable = [], []
        for number in numbers:
            try:
                found.append(self.version(name, number))
            except StoreError as error:
                unreadable.append(error)
        if not found:
            raise unreadable[0]
        return found

    def flagged(self, artefact: Artefact) -> tuple[str, ...]:
        """List the withdrawn artefacts (`name@version`) that an artefact descends from."""
        reached: dict[str, Record] = {}
        seen: set[str] = set()
        left = [*artefact.ancestors()]
        while left:
            digest = left.pop()
            if digest in seen:
                continue
            seen.add(digest)
            record = self.locate(digest, thorough=False)
            if record is not None:
                reached[digest] = record
                left += record.ancestors
        return tuple(
            str(record)
            for record in sorted(reached.values(), key=lambda each: (each.name, each.number))
            if self._is_withdrawn(record.name, record.number)
        )

    def newest(self, name: str) -> tuple[Version, bool, bool, Record]:
        """Look at the version that `name` alone opens, else at the newest readable one.

        Returns:
            (version, whether it opens, whether no trusted key signed one that is newer or this one,
            record of the newest readable version).

        Raises ReferenceNotFound for an unknown name, and the newest version's error if none is readable.
        """
        numbers = self.numbers(name)
        if not numbers:
            raise self._unknown(name)
        withdrawn = self._backend.listed(name, self._now()).withdrawn
        last: tuple[Version, Record] | None = None
        untrusted = False
        errors: list[StoreError] = []
        for number in reversed(numbers):
            if last is not None and number in withdrawn:
                continue
            try:
                version = self.version(name, number)
            except StoreError as error:
                errors.append(error)
                continue
            last = last or (version, Record.of(version.artefact))
            if version.withdrawn is not None:
                continue
            if self._is_trusted(name, number):
                return version, True, untrusted, last[1]
            untrusted = True
        if last is None:
            raise errors[0]
        return last[0], False, untrusted, last[1]

    def unreadable(self, name: str, numbers: Sequence[int] | None = None) -> dict[int, StoreError]:
        """Map each version with an unreadable manifest or tombstone to its error. Listings leave it out.

        `numbers` are the versions to look at, all of them when None.
        """
        found: dict[int, StoreError] = {}
        for number in self.numbers(name) if numbers is None else numbers:
            try:
                self._artefact(name, number)
                self.tombstone(name, number)
            except StoreError as error:
                found[number] = error
        return found

    def descendants(self, digest: str) -> list[Record]:
        """List every artefact composed of or made from the one with this digest, transitively."""
        children: dict[str, list[Record]] = {}
        for record in self.records():
            for ancestor in record.ancestors:
                children.setdefault(ancestor, []).append(record)
        found: list[Record] = []
        reached, left = {digest}, [digest]
        while left:
            for child in children.get(left.pop(), ()):
                if child.digest not in reached:
                    reached.add(child.digest)
                    left.append(child.digest)
                    found.append(child)
        return sorted(found, key=lambda each: (each.name, each.number))

    def tombstone(self, name: str, version: int) -> Tombstone | None:
        """Read the tombstone of a version; None if it was not withdrawn.

        Raises ArtefactDamaged if the tombstone cannot be read.
        """
        try:
            content = self._backend.tombstone(name, version, self._now())
            return None if content is None else Tombstone.model_validate_json(content)
        except (OSError, ValidationError) as error:
            raise ArtefactDamaged(
                f"{name}@{version}: its tombstone {version}.withdrawn.json cannot be read "
                f"({type(error).__name__}): restore that file, or remove it and withdraw the version again"
            ) from error

    # ------------------------------------------------------------------ withdraw, prune

    def withdraw(self, reference: str, *, actor: str, reason: str) -> list[Record]:
        """Withdraw a version, which then no longer opens. Returns the descendants that are now flagged."""
        if not actor.strip() or not reason.strip():
            raise PublishRefused(f"withdrawing '{reference}' needs an actor and a reason, found an empty one")
        artefact = self.open(reference, verify=False)
        tombstone = Tombstone(actor=actor, reason=reason, time=datetime.now(UTC))
        self._backend.bury(artefact.name, artefact.version, tombstone.model_dump_json().encode())
        self._backend.tell()
        return self.descendants(artefact.digest)

    def prune(self) -> list[str]:
        """Delete orphaned files, and the files of withdrawn versions. Returns what was deleted.

        Manifests and tombstones of withdrawn versions are kept, so their history stays readable.
        """
        withdrawn = []
        for record in self.records():
            if self._is_withdrawn(record.name, record.number):
                with suppress(ArtefactDamaged, UnknownKind):
                    withdrawn.append(self._artefact(record.name, record.number))
        return self._backend.prune(withdrawn)

    # ------------------------------------------------------------------ inside

    def _artefact(self, name: str, number: int) -> Artefact:
        """Read a version. Raises ArtefactDamaged, UnknownKind, and ReferenceNotFound for a hidden one."""
        artefact = self._index.artefact(name, number)
        # The index may have been of another content: what was just read counts.
        if self._hides(artefact.manifest.adapted_to):
            raise ReferenceNotFound(f"'{name}@{number}' is not in the store")
        return artefact

    def _hides(self, hospital: str | None) -> bool:
        return hospital is not None and self._sees is not None and not self._sees(hospital)

    def _unknown(self, name: str) -> ReferenceNotFound:
        return ReferenceNotFound(f"'{name}' is not in the store; names: {some(self.names()) or 'none'}")

    def _now(self) -> float:
        return time.monotonic() if self._since is None else self._since

    def _visible(self, name: str, numbers: Sequence[int], sees: Callable[[str], bool]) -> list[int]:
        hidden, readable = set(), set()
        for number in numbers:
            record = self._index.record(name, number)
            if record is not None:
                readable.add(number)
                if record.adapted_to is not None and not sees(record.adapted_to):
                    hidden.add(number)
        return [n for n in numbers if n not in hidden] if readable - hidden else []

    def _of(self, name: str, sought: str) -> list[Record]:
        """Records of readable versions, each with the digest or the run that is sought among them.

        One damaged manifest must not make the whole store unusable.
        """
        return self._index.of(name, self.numbers(name), sought)

    def _is_withdrawn(self, name: str, version: int) -> bool:
        # An unreadable tombstone is one, too.
        with suppress(OSError):
            return self._backend.tombstone(name, version, self._now()) is not None
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


def some(names: Sequence[str]) -> str:
    """Name the last of them, for a message: a store may have thousands."""
    shown = ", ".join(names[-_MOST_NAMED:])
    return shown if len(names) <= _MOST_NAMED else f"{len(names)}, the last of them {shown}"


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
