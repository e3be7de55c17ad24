"""The folder of a backup.

database.sqlite3         a copy of SQLite's file, or database.pgdump: what pg_dump wrote
files/cohorts/…          files of patients, see `service.files`
store/NAME/3/…           the versions, as a store in a folder has them
backup.sha256            the digest of backup.json
backup.json              every file with size and sha256; written last: without it the backup is half written
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from model_store.digest import sha256, sha256_of_file
from model_store.durable import sync_folder, write_durably
from service.errors import BackupError

MANIFEST, _DIGEST = "backup.json", "backup.sha256"
FILES, STORE = "files/", "store/"
DATABASES = {"sqlite": "database.sqlite3", "postgresql": "database.pgdump"}
_FORMAT = 1


def _inside(path: str) -> str:
    parts = path.split("/")
    if not all(re.fullmatch(r"[A-Za-z0-9_.-]+", part) and part.strip(".") for part in parts):
        raise ValueError("expected a path inside the backup")
    return path


class Entry(BaseModel):
    """A file; `modified` (ns since 1970) of those that have a time of their own."""

    size: int
    sha256: str
    modified: int | None = None


class Manifest(BaseModel):
    """What a backup has.

    `trail` is number and digest of the audit trail's last row. `gone` are files that were deleted between the
    copy of the database and their own; `unreadable` says what is wrong with files that could not be copied.
    """

    model_config = ConfigDict(frozen=True)

    format: int = _FORMAT
    locum: str
    revision: str
    database: Literal["sqlite", "postgresql"]
    began: datetime
    ended: datetime
    trail: str
    files: dict[Annotated[str, AfterValidator(_inside)], Entry]
    gone: list[str] = []
    unreadable: dict[str, str] = {}

    def below(self, folder: str) -> dict[str, Entry]:
        """The files of `FILES` or `STORE`, by their paths in it."""
        return {p.removeprefix(folder): e for p, e in self.files.items() if p.startswith(folder)}


class Writer:
    """A backup that is being written into a new or empty folder, which only its owner can read."""

    def __init__(self, root: Path) -> None:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise BackupError(
                f"{root}: expected a new or empty folder, found "
                + ("a half-written backup" if _is_half_written(root) else "something in it")
                + ": name another one"
            )
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        self.root = root
        self.began = datetime.now(UTC)
        self._entries: dict[str, Entry] = {}

    def add(self, path: str, content: bytes, modified: int | None = None) -> None:
        """Write a file durably."""
        place = self.root / _inside(path)
        for each in reversed(place.relative_to(self.root).parents):
            (self.root / each).mkdir(mode=0o700, exist_ok=True)
        write_durably(place, content, mode=0o600)
        self._entries[path] = Entry(size=len(content), sha256=sha256(content), modified=modified)

    def written(self, path: str) -> None:
        """Take in a file that another program wrote here."""
        place = self.root / path
        place.chmod(0o600)
        self._entries[path] = Entry(size=place.stat().st_size, sha256=sha256_of_file(place))

    def finish(self, **about: object) -> Manifest:
        """Write the manifest; the fields that are given are its own."""
        manifest = Manifest(began=self.began, ended=datetime.now(UTC), files=self._entries, **about)
        content = manifest.model_dump_json(indent=1).encode()
        write_durably(self.root / _DIGEST, sha256(content).encode(), mode=0o600)
        write_durably(self.root / MANIFEST, content, mode=0o600)
        sync_folder(self.root.parent)
        return manifest


class Backup:
    """A backup that was written. Raises BackupError for a folder that is none, or only half of one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            content = (root / MANIFEST).read_bytes()
            noted = (root / _DIGEST).read_bytes()
        except FileNotFoundError as error:
            what = "a half-written backup" if _is_half_written(root) else "no backup"
            raise BackupError(
                f"{root}: expected a backup, with {MANIFEST} and {_DIGEST} written last, found {what}"
            ) from error
        if sha256(content).encode() != noted:
            raise BackupError(f"{root / MANIFEST}: it has another sha256 than {_DIGEST} says: it was changed")
        try:
            self.manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise BackupError(f"{root / MANIFEST}: this version of Locum cannot read it") from error
        if self.manifest.format > _FORMAT:
            raise BackupError(
                f"{root}: its format is {self.manifest.format}, and this version of Locum knows {_FORMAT}: "
                "restore it with the newer one"
            )

    def read(self, path: str) -> bytes:
        """Read a file. Raises BackupError if it is not the one that was written."""
        try:
            content = (self.root / path).read_bytes()
        except OSError as error:
            raise BackupError(f"{path}: cannot be read ({error.strerror})") from error
        self._check(path, sha256(content))
        return content

    def check(self, path: str) -> Path:
        """Compare a file with its digest, and return its path. Raises as `read`."""
        try:
            found = sha256_of_file(self.root / path)
        except OSError as error:
            raise BackupError(f"{path}: cannot be read ({error.strerror})") from error
        self._check(path, found)
        return self.root / path

    def damaged(self) -> Iterator[BackupError]:
        """What is wrong with each file that is not the one that was written."""
        for path in self.manifest.files:
            try:
                self.check(path)
            except BackupError as error:
                yield error

    def _check(self, path: str, found: str) -> None:
        expected = self.manifest.files[path].sha256
        if found != expected:
            raise BackupError(f"{path}: expected {expected}, found {found}: it was changed since the backup")


def _is_half_written(root: Path) -> bool:
    there = {each.name for each in root.iterdir()} if root.is_dir() else set()
    return MANIFEST not in there and bool(there & {*DATABASES.values(), "files", "store"})
