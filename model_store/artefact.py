"""A published version of an artefact: a folder with a manifest, against which its files are verified."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, cast

from typing_extensions import TypeVar

from model_store.digest import sha256, sha256_of_file
from model_store.errors import ArtefactDamaged, KindMismatch
from model_store.graphs import SUFFIX, check_graph
from model_store.manifest import AnyManifest, BaseManifest, parse_manifest

MANIFEST = "manifest.json"
DIGEST_FILE = "manifest.sha256"

Manifest = TypeVar("Manifest", bound=BaseManifest, default=AnyManifest, covariant=True)
Expected = TypeVar("Expected", bound=BaseManifest)
Content = TypeVar("Content")


class Remote(Protocol):
    """Where a version's files are, if its folder is a cache."""

    def fetch(self, artefact: Artefact[BaseManifest], file: str) -> None:
        """Bring a file into the folder. Raises StoreError."""

    def digest_of(self, artefact: Artefact[BaseManifest], file: str, write: Callable[[bytes], object]) -> str:
        """Hash a file without keeping it; `write` receives its bytes, part by part. Raises StoreError."""


@dataclass(frozen=True)
class Artefact(Generic[Manifest]):
    """A version of a name, with its verified manifest.

    `Artefact[ModelManifest]` is an artefact of a known kind, `Artefact` one of any kind.
    """

    name: str
    version: int
    digest: str
    path: Path
    manifest: Manifest
    remote: Remote | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def published(self) -> datetime:
        """Time of publication (UTC): the manifest's modification time."""
        return datetime.fromtimestamp((self.path / MANIFEST).stat().st_mtime, UTC)

    def expect(self, kind: type[Expected]) -> Artefact[Expected]:
        """Return this artefact, typed by the manifest class `kind`. Raises KindMismatch."""
        if not isinstance(self.manifest, kind):
            expected, found = (cls.model_fields["kind"].default for cls in (kind, type(self.manifest)))
            raise KindMismatch(
                f"'{self}': expected an artefact of kind {expected}, found kind {found}; choose another"
            )
        return cast("Artefact[Expected]", self)

    @classmethod
    def read_from(cls, path: Path, name: str, version: int, remote: Remote | None = None) -> Artefact:
        """Read and check the manifest of a version's folder. Raises ArtefactDamaged, UnknownKind."""
        where = f"{name}@{version}"
        try:
            content = (path / MANIFEST).read_bytes()
            recorded = (path / DIGEST_FILE).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtefactDamaged(f"{where}: {error}; publish the artefact again") from error
        if sha256(content) != recorded:
            raise ArtefactDamaged(
                f"{where}: {MANIFEST} was changed: expected {recorded}, found {sha256(content)}; "
                "publish the artefact again"
            )
        manifest = parse_manifest(content, where)
        if manifest.name != name:
            raise ArtefactDamaged(
                f"{where}: expected the name '{name}' in {MANIFEST}, found '{manifest.name}': the folder was "
                "moved; move it back"
            )
        return Artefact(name, version, recorded, path, manifest, remote)

    def ancestors(self) -> set[str]:
        """Return the digests of this artefact's parts and parents (one step back)."""
        return {*self.manifest.references().values(), *self.manifest.lineage.parents}

    def path_of(self, file: str) -> Path:
        """Return the path of a file after checking its size. Raises ArtefactDamaged."""
        entry = self.manifest.files.get(file)
        if entry is None:
            raise ArtefactDamaged(
                f"{self}: expected a file {file}, found only {', '.join(sorted(self.manifest.files))}"
            )
        path = self.path / file
        if self.remote is not None:
            self.remote.fetch(self, file)
        with self._reading(file):
            size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            found = "no file" if size is None else f"{size} bytes"
            raise ArtefactDamaged(
                f"{self}: {file}: expected {entry.size} bytes, found {found}; publish the artefact again"
            )
        return path

    def read(self, file: str) -> bytes:
        """Read a file and verify it against the manifest. Raises ArtefactDamaged."""
        content = self._read(file, Path.read_bytes)
        if self._drop_damaged_copy(file, sha256(content)):
            content = self._read(file, Path.read_bytes)
        self._check(file, sha256(content))
        return content

    def verify(self, operators: Iterable[str] = ()) -> None:
        """Hash every file, in a bucket the bucket's, and check every graph.

        `operators` are what graphs may have beyond the built-in list. A damaged copy in the cache of a bucket
        is deleted, so that the next reader fetches the file again.

        Raises:
            ArtefactDamaged: a file is not as published.
            GraphRefused: a graph needs other files, or has an operator that is not allowed.
        """
        for file in self.manifest.files:
            is_graph = file.endswith(SUFFIX)
            content = self._verified(file, keep=is_graph)
            if is_graph:
                check_graph(content, f"{self}: {file}", operators)

    def _verified(self, file: str, *, keep: bool) -> bytes:
        """Hash a file where it is stored, and return its bytes if they are kept."""
        if self.remote is None:
            if keep:
                return self.read(file)
            self._check(file, self._read(file, sha256_of_file))
            return b""
        parts = io.BytesIO()
        found = self.remote.digest_of(self, file, parts.write if keep else _drop)
        with suppress(FileNotFoundError):
            self._drop_damaged_copy(file, sha256_of_file(self.path / file))
        self._check(file, found)
        return parts.getvalue()

    def _read(self, file: str, read: Callable[[Path], Content]) -> Content:
        path = self.path_of(file)
        with self._reading(file):
            return read(path)

    def _drop_damaged_copy(self, file: str, found: str) -> bool:
        """Delete a file of the cache that is not as published, and return whether it was deleted."""
        damaged = self.remote is not None and found != self.manifest.files[file].sha256
        if damaged:
            (self.path / file).unlink(missing_ok=True)
        return damaged

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        """Raise ArtefactDamaged for a file that cannot be read."""
        try:
            yield
        except OSError as error:
            raise ArtefactDamaged(
                f"{self}: {file}: cannot be read ({error.strerror}); make it readable, or publish the "
                "artefact again"
            ) from error

    def _check(self, file: str, found: str) -> None:
        expected = self.manifest.files[file].sha256
        if found != expected:
            raise ArtefactDamaged(
                f"{self}: {file}: expected {expected}, found {found}; publish the artefact again"
            )


def _drop(_part: bytes) -> None:
    """Take a part of a file that is only hashed."""
