"""Versions in a folder, on a disk that all processes share.

ROOT/NAME/3/manifest.json        the artefact; its files are read-only
ROOT/NAME/3/manifest.sha256      its digest, which all references use
ROOT/NAME/3.withdrawn.json       its tombstone, if it was withdrawn
ROOT/.staging/                   staging folders of versions that are not yet visible
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from model_store.artefact import Artefact
from model_store.backend import Earlier
from model_store.digest import sha256_of_file
from model_store.durable import sync_folder, write_durably
from model_store.errors import StoreUnavailable
from model_store.reference import NAME
from model_store.staging import staging, sweep

_STAGING = ".staging"


class Folder:
    """A `Backend` in a folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._had_names = False

    def check(self) -> None:
        """List the folder: where it cannot be read, `names` would take it for an empty one."""
        if os.path.lexists(self.root):
            next(self.root.iterdir(), None)

    def prepare(self) -> None:
        """Make the folder."""
        self.root.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """List the names that have a version, sorted.

        Raises StoreUnavailable where there were names: a folder that is no longer mounted looks empty.
        """
        inside = self.root.iterdir() if self.root.is_dir() else ()
        found = sorted(p.name for p in inside if NAME.fullmatch(p.name) and self.numbers(p.name))
        if self._had_names and not found:
            raise StoreUnavailable(
                f"{self.root} had models and has none: mount it again, or restart the service"
            )
        self._had_names = bool(found)
        return found

    def numbers(self, name: str) -> list[int]:
        """List the version numbers of a name."""
        folder = self.root / name
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []

    def artefact(self, name: str, number: int) -> Artefact:
        """Read and check a version's manifest."""
        return Artefact.read_from(self.root / name / str(number), name, number)

    def publish(
        self, name: str, files: Mapping[str, bytes], earlier: Earlier, admit: Callable[[], None] | None
    ) -> int:
        """Write a staging folder, and rename it to the next number."""
        with self._locked(name) as folder:
            found = earlier()
            if found is not None:
                return found
            with staging(self.root / _STAGING) as staged:
                for file, data in files.items():
                    write_durably(staged / file, data, mode=0o444)
                if admit is not None:
                    admit()
                number = max(self.numbers(name), default=0) + 1
                staged.rename(folder / str(number))
            sync_folder(folder)
            # The folder itself may be new.
            sync_folder(self.root)
        return number

    def restore(self, artefact: Artefact, files: Mapping[str, bytes]) -> None:
        """Write those of a version's files again that are missing or not as published."""
        with self._locked(artefact.name):
            for file, entry in artefact.manifest.files.items():
                path = artefact.path / file
                try:
                    whole = sha256_of_file(path) == entry.sha256
                except OSError:
                    whole = False
                if not whole:
                    write_durably(path, files[file], mode=0o444)

    def attached(self, name: str, number: int, file: str) -> bytes | None:
        """Read a file that was attached to a version, if it was."""
        try:
            return (self.root / name / str(number) / file).read_bytes()
        except FileNotFoundError:
            return None

    def is_attached(self, name: str, number: int, file: str) -> bool:
        """Return whether a file was attached to a version, without reading it."""
        return (self.root / name / str(number) / file).is_file()

    def attach(self, name: str, number: int, file: str, content: bytes) -> None:
        """Write a file beside a version's manifest."""
        with self._locked(name):
            write_durably(self.root / name / str(number) / file, content, mode=0o444)

    def tombstone(self, name: str, number: int) -> bytes | None:
        """Read the tombstone of a version, if it has one."""
        try:
            return self._tombstone(name, number).read_bytes()
        except FileNotFoundError:
            return None

    def bury(self, name: str, number: int, tombstone: bytes) -> None:
        """Write the tombstone of a version."""
        with self._locked(name):
            write_durably(self._tombstone(name, number), tombstone)

    def prune(self, withdrawn: Sequence[Artefact]) -> list[str]:
        """Delete orphaned staging folders, and the files of the withdrawn versions."""
        deleted = sweep(self.root / _STAGING)
        for artefact in withdrawn:
            for file in artefact.manifest.files:
                path = artefact.path / file
                if path.exists():
                    path.unlink()
                    deleted.append(path)
        return [str(path) for path in deleted]

    def _tombstone(self, name: str, number: int) -> Path:
        return self.root / name / f"{number}.withdrawn.json"

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Lock a name against other writers, in all processes."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
