"""The store: immutable, numbered versions of artefacts in a folder.

ROOT/NAME/3/manifest.json        the artefact, files read-only
ROOT/NAME/3/manifest.sha256      its digest, by which everything refers to it
ROOT/NAME/3.withdrawn.json       a tombstone beside it, if it was withdrawn
ROOT/.staging/                   where a version is written before one rename makes it visible
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
from model_store.manifest import AnyManifest, FileEntry, ModelManifest
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
    """One version as listed. `flagged` holds the withdrawn artefacts (`name@version`) it descends from."""

    artefact: Artefact
    withdrawn: Tombstone | None
    flagged: tuple[str, ...]


class Store:
    """A folder of artefacts. Safe for many processes at once; the folder need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        # Versions never change, so a manifest read once stays read.
        self._known: dict[Path, Artefact] = {}
        self._sees: Callable[[str], bool] | None = None

    def visible_to(self, sees: Callable[[str], bool]) -> Store:
        """This store, for reading, without the versions adapted to a hospital for which `sees` is false.

        They are not listed, found or named, as if they had never been published. A version that cannot be
        read is visible where a readable one of its name is.
        """
        view = copy.copy(self)
        view._sees = sees
        return view

    # ------------------------------------------------------------------ publish

    def publish(
        self, manifest: AnyManifest, files: Mapping[str, bytes], admit: Callable[[], None] | None = None
    ) -> Artefact:
        """Make `files` the next version of `manifest.name`; the manifest's own `files` are filled in here.

        Atomic and idempotent: nobody ever sees half a version, and content that is already a version of this
        name is returned as that version.

        `admit` is asked last, when all is written and nobody else can publish under this name, right before
        the version becomes visible: what it raises is raised, and nothing becomes visible.

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
        """The artefact a reference stands for: `name` (its newest version not withdrawn), `name@3`,
        `name@sha256:…`. With `verify`, every file is hashed first.

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
        """The artefact with this digest, whatever its name; not verified. `kind` is its manifest's class.

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
        """Names that have a version, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if NAME.fullmatch(p.name) and self.numbers(p.name))

    def numbers(self, name: str) -> list[int]:
        """The version numbers of a name, damaged and withdrawn ones too; none for an unknown name."""
        folder = self.root / name
        if not folder.is_dir():
            return []
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
        return numbers if self._sees is None else self._visible(name, numbers, self._sees)

    def versions(self, name: str) -> list[Version]:
        """Every readable version of a name, oldest first, withdrawn ones too.

        Raises ReferenceNotFound for an unknown name, and the first version's error when none can be read.
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
        """The withdrawn artefacts (`name@version`) that an artefact descends from."""
        return self._flags(artefact, self._by_digests())

    def unreadable(self, name: str) -> dict[int, StoreError]:
        """Version numbers whose manifest or tombstone cannot be read, and why; left out of every listing."""
        found: dict[int, StoreError] = {}
        for number in self.numbers(name):
            try:
                self._artefact(name, number)
                self.tombstone(name, number)
            except StoreError as error:
                found[number] = error
        return found

    def descendants(self, digest: str) -> list[Artefact]:
        """Every artefact that is composed of, or was made from, the one with this digest, transitively."""
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
        """The tombstone of a version, if it was withdrawn. Raises ArtefactDamaged where it cannot be read."""
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
        """Put a tombstone on a version: it no longer opens. Returns the descendants that are now flagged."""
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
        """Delete what nobody can open: abandoned staging, and the files of withdrawn versions (their manifest
        and tombstone stay, so history keeps its answers). Returns what was deleted."""
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
                hospital = manifest.hospital if isinstance(manifest, ModelManifest) else None
                if hospital is not None and not sees(hospital):
                    hidden.add(number)
        return [n for n in numbers if n not in hidden] if readable - hidden else []

    def _all(self) -> Iterator[Artefact]:
        for name in self.names():
            yield from self._readable(name)

    def _readable(self, name: str) -> Iterator[Artefact]:
        """One damaged manifest must not take the whole store with it."""
        for number in self.numbers(name):
            with suppress(ArtefactDamaged, UnknownKind):
                yield self._artefact(name, number)

    def _flags(self, artefact: Artefact, known: Mapping[str, Artefact]) -> tuple[str, ...]:
        """The withdrawn among all that the artefact descends from; the inverse of `descendants`."""
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
        """One writer per name at a time, over all processes."""
        if not NAME.fullmatch(name):
            raise ReferenceInvalid(f"'{name}' cannot name an artefact: letters, digits, '_', '.', '-' only")
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
