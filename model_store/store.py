"""The artefact store: immutable, numbered versions of artefacts in a folder.

ROOT/NAME/3/manifest.json        the artefact; its files are read-only
ROOT/NAME/3/manifest.sha256      its digest, which all references use
ROOT/NAME/3.withdrawn.json       its tombstone, if it was withdrawn
ROOT/.staging/                   staging folders of versions that are not yet visible
"""

from __future__ import annotations

import copy
import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import overload

from pydantic import BaseModel, ValidationError

from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact, Expected
from model_store.digest import sha256
from model_store.drafts import check_draft
from model_store.durable import sync_folder, write_durably
from model_store.errors import (
    ArtefactDamaged,
    ArtefactWithdrawn,
    PublishRefused,
    ReferenceInvalid,
    ReferenceNotFound,
    StoreError,
    UnknownKind,
)
from model_store.manifest import AnyManifest, FileEntry
from model_store.reference import NAME, parse_reference
from model_store.staging import staging, sweep

_STAGING = ".staging"


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
    """A folder of artefacts. Many processes can use it at once; the folder need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        # Versions never change, so manifests are cached.
        self._known: dict[Path, Artefact] = {}
        self._sees: Callable[[str], bool] | None = None

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
        this name, that version is returned.

        `admit` is called last: all files are written, the name is locked against other publications, and the
        version is not yet visible. If it raises, nothing is published and the error is raised.

        Raises:
            PublishRefused: the files do not fit the kind, a reference is not in the store or does not fit.
            ArtefactWithdrawn: the same content was published before and withdrawn.
        """
        check_draft(manifest, files, self.by_digest)
        entries = {name: FileEntry(size=len(data), sha256=sha256(data)) for name, data in files.items()}
        manifest = manifest.model_copy(update={"files": entries})
        content = manifest.to_bytes()
        digest = sha256(content)
        with self._locked(manifest.name) as folder:
            for published in self._readable(manifest.name):
                if published.digest == digest:
                    return self._refuse_withdrawn(published)
            with staging(self.root / _STAGING) as staged:
                for name, data in {**files, MANIFEST: content, DIGEST_FILE: digest.encode()}.items():
                    write_durably(staged / name, data, mode=0o444)
                if admit is not None:
                    admit()
                number = max(self.numbers(manifest.name), default=0) + 1
                staged.rename(folder / str(number))
            sync_folder(folder)
        return self._artefact(manifest.name, number)

    # ------------------------------------------------------------------ open

    def open(self, reference: str, *, verify: bool = True) -> Artefact:
        """Open an artefact by reference: `name`, `name@3` or `name@sha256:…`.

        `name` alone is its newest version that is not withdrawn. With `verify`, every file is hashed first.

        Raises:
            ReferenceInvalid, ReferenceNotFound, ArtefactWithdrawn, ArtefactDamaged, UnknownKind.
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
            numbers = [n for n in numbers if not self._tombstone_path(name, n).exists()] or numbers
        artefact = self._refuse_withdrawn(self._artefact(name, numbers[-1]))
        if verify:
            artefact.verify()
        return artefact

    @overload
    def by_digest(self, digest: str) -> Artefact: ...
    @overload
    def by_digest(self, digest: str, kind: type[Expected]) -> Artefact[Expected]: ...
    def by_digest(self, digest: str, kind: type[Expected] | None = None) -> Artefact | Artefact[Expected]:
        """Find the artefact with this digest, unverified. `kind` is the expected class of its manifest.

        Raises:
            KindMismatch: it is of another kind.
            ReferenceNotFound, ArtefactWithdrawn, ArtefactDamaged: as `open`.
        """
        for artefact in self._all():
            if artefact.digest == digest:
                found = self._refuse_withdrawn(artefact)
                return found if kind is None else found.expect(kind)
        raise ReferenceNotFound(f"'{digest}' is not in the store; publish or copy that artefact first")

    # ------------------------------------------------------------------ list

    def names(self) -> list[str]:
        """List the names that have a version, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if NAME.fullmatch(p.name) and self.numbers(p.name))

    def numbers(self, name: str) -> list[int]:
        """List the version numbers of a name, also damaged and withdrawn ones; empty for an unknown name."""
        folder = self.root / name
        if not folder.is_dir():
            return []
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
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
        return self._flags(artefact, self._by_digests())

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
        path = self._tombstone_path(name, version)
        try:
            return Tombstone.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ArtefactDamaged(
                f"{name}@{version}: its tombstone {path.name} cannot be read ({type(error).__name__}): "
                "restore that file, or remove it and withdraw the version again"
            ) from error

    # ------------------------------------------------------------------ withdraw, prune

    def withdraw(self, reference: str, *, actor: str, reason: str) -> list[Artefact]:
        """Withdraw a version, which then no longer opens. Returns the descendants that are now flagged."""
        if not actor.strip() or not reason.strip():
            raise PublishRefused(f"withdrawing '{reference}' needs an actor and a reason, found an empty one")
        artefact = self.open(reference, verify=False)
        tombstone = Tombstone(actor=actor, reason=reason, time=datetime.now(UTC))
        with self._locked(artefact.name):
            write_durably(
                self._tombstone_path(artefact.name, artefact.version), tombstone.model_dump_json().encode()
            )
        return self.descendants(artefact.digest)

    def prune(self) -> list[Path]:
        """Delete orphaned staging folders, and the files of withdrawn versions. Returns the deleted paths.

        Manifests and tombstones of withdrawn versions are kept, so their history stays readable.
        """
        deleted = sweep(self.root / _STAGING)
        for artefact in filter(self._is_withdrawn, self._all()):
            for name in artefact.manifest.files:
                path = artefact.path / name
                if path.exists():
                    path.unlink()
                    deleted.append(path)
        return deleted

    # ------------------------------------------------------------------ inside

    def _artefact(self, name: str, number: int) -> Artefact:
        path = self.root / name / str(number)
        if path not in self._known:
            self._known[path] = Artefact.read_from(path, name, number)
        return self._known[path]

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
        return tuple(str(a) for digest, a in known.items() if digest in reached and self._is_withdrawn(a))

    def _by_digests(self) -> dict[str, Artefact]:
        return {artefact.digest: artefact for artefact in self._all()}

    def _is_withdrawn(self, artefact: Artefact) -> bool:
        return self._tombstone_path(artefact.name, artefact.version).exists()

    def _tombstone_path(self, name: str, version: int) -> Path:
        return self.root / name / f"{version}.withdrawn.json"

    def _refuse_withdrawn(self, artefact: Artefact) -> Artefact:
        tombstone = self.tombstone(artefact.name, artefact.version)
        if tombstone is not None:
            raise ArtefactWithdrawn(
                f"'{artefact}' was withdrawn by {tombstone.actor} on {tombstone.time:%Y-%m-%d}: "
                f"{tombstone.reason}. Use another version"
            )
        return artefact

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Lock a name against other writers, in all processes."""
        if not NAME.fullmatch(name):
            raise ReferenceInvalid(f"'{name}': expected a name of letters, digits, '_', '.' and '-'")
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
