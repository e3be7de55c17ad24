"""A backup: a folder, or the same files in one tar.

database.sqlite3         a copy of SQLite's file, or database.pgdump: what pg_dump wrote
files/cohorts/…          files of patients, see `service.files`
store/NAME/3/…           the versions, as a store in a folder has them
backup.sha256            the digest of backup.json
backup.json              every file with size and sha256; written last: without it the backup is half written
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from typing_extensions import override

from model_store.digest import sha256, sha256_of_file
from model_store.durable import sync_folder, write_durably
from service.errors import BackupError

MANIFEST, _DIGEST = "backup.json", "backup.sha256"
FILES, STORE = "files/", "store/"
DATABASES = {"sqlite": "database.sqlite3", "postgresql": "database.pgdump"}
TAR = ".tar"
"""How the name of a backup ends that is one file."""
_FORMAT = 1
_PIECE = 2**20


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
    """A backup that is being written into a new or empty folder, which only its owner can read.

    `scratch` is a folder for what other programs write.
    """

    def __init__(self, root: Path) -> None:
        self.root = self.scratch = root
        self.began = datetime.now(UTC)
        self._entries: dict[str, Entry] = {}
        self._begin()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A folder that is half written stays, without its manifest."""

    def _begin(self) -> None:
        root = self.root
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise BackupError(
                f"{root}: expected a new or empty folder, found "
                + ("a half-written backup" if _is_half_written(root) else "something in it")
                + ": name another one"
            )
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)

    def add(self, path: str, content: bytes, modified: int | None = None) -> None:
        """Write a file durably."""
        self._write(_inside(path), content)
        self._entries[path] = Entry(size=len(content), sha256=sha256(content), modified=modified)

    def written(self, path: str) -> None:
        """Take in a file that another program wrote into `scratch`."""
        place = self.scratch / path
        place.chmod(0o600)
        self._entries[path] = Entry(size=place.stat().st_size, sha256=sha256_of_file(place))
        self._take(path)

    def finish(self, **about: object) -> Manifest:
        """Write the manifest; the fields that are given are its own."""
        manifest = Manifest(began=self.began, ended=datetime.now(UTC), files=self._entries, **about)
        content = manifest.model_dump_json(indent=1).encode()
        self._write(_DIGEST, sha256(content).encode())
        self._write(MANIFEST, content)
        self._end()
        return manifest

    def _write(self, path: str, content: bytes) -> None:
        place = self.root / path
        for each in reversed(place.relative_to(self.root).parents):
            (self.root / each).mkdir(mode=0o700, exist_ok=True)
        write_durably(place, content, mode=0o600)

    def _take(self, path: str) -> None:
        """Nothing: it was written where it stays."""

    def _end(self) -> None:
        sync_folder(self.root.parent)


class TarWriter(Writer):
    """A backup that is being written into one tar. It has its name once it is whole, and is removed else."""

    @override
    def _begin(self) -> None:
        if self.root.exists():
            raise BackupError(f"{self.root}: expected no file of this name, found one: name another one")
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        # Beside it: whole, it is renamed.
        place = self._stack.enter_context(TemporaryDirectory(prefix=".locum-backup-", dir=self.root.parent))
        self.scratch = Path(place)
        self._part = self.scratch / "whole.tar"
        opened = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: IO[bytes] = self._stack.enter_context(os.fdopen(opened, "w+b"))
        self._tar = self._stack.enter_context(tarfile.TarFile.open(fileobj=self._file, mode="w"))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @override
    def _write(self, path: str, content: bytes) -> None:
        self._append(path, len(content), io.BytesIO(content))

    @override
    def _take(self, path: str) -> None:
        place = self.scratch / path
        with place.open("rb") as file:
            self._append(path, place.stat().st_size, file)
        place.unlink()

    @override
    def _end(self) -> None:
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.rename(self.root)
        sync_folder(self.root.parent)

    def _append(self, path: str, size: int, file: IO[bytes]) -> None:
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode, entry.mtime = size, 0o600, int(self.began.timestamp())
        self._tar.addfile(entry, file)


def writer_of(root: Path) -> Writer:
    """A backup that is to be written: one file where its name ends with `.tar`, else a folder."""
    return TarWriter(root) if root.suffix == TAR else Writer(root)


class Backup:
    """A backup that was written. Raises BackupError for what is none, or only half of one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Where each file of a tar begins, and its size.
        self._places = _places(root) if root.is_file() else None
        try:
            content, noted = (b"".join(self._pieces(name)) for name in (MANIFEST, _DIGEST))
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
            content = b"".join(self._pieces(path))
        except OSError as error:
            raise BackupError(f"{path}: cannot be read ({error.strerror})") from error
        self._check(path, sha256(content))
        return content

    def check(self, path: str) -> None:
        """Compare a file with its digest. Raises as `read`."""
        digest = hashlib.sha256()
        try:
            for piece in self._pieces(path):
                digest.update(piece)
        except OSError as error:
            raise BackupError(f"{path}: cannot be read ({error.strerror})") from error
        self._check(path, f"sha256:{digest.hexdigest()}")

    @contextmanager
    def on_disk(self, path: str) -> Iterator[Path]:
        """A file for another program: where it is, or a copy that is deleted at the end."""
        if self._places is None:
            yield self.root / path
            return
        with TemporaryDirectory(prefix="locum-restore-") as folder:
            copy = Path(folder) / "copy"
            with copy.open("wb") as file:
                file.writelines(self._pieces(path))
            yield copy

    def _pieces(self, path: str) -> Iterator[bytes]:
        """The content of a file, in pieces. Raises OSError."""
        place, begin, left = self.root / path, 0, None
        if self._places is not None:
            if path not in self._places:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            place, (begin, left) = self.root, self._places[path]
        with place.open("rb") as file:
            file.seek(begin)
            while piece := file.read(_PIECE if left is None else min(left, _PIECE)):
                left = None if left is None else left - len(piece)
                yield piece

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


def _places(root: Path) -> dict[str, tuple[int, int]]:
    """Where the files of a tar begin, and their sizes. Raises BackupError."""
    try:
        with tarfile.open(root, "r:") as tar:
            return {each.name: (each.offset_data, each.size) for each in tar if each.isreg()}
    except (tarfile.TarError, EOFError) as error:
        raise BackupError(f"{root}: expected a backup as a whole tar, found none ({error})") from error


def _is_half_written(root: Path) -> bool:
    there = {each.name for each in root.iterdir()} if root.is_dir() else set()
    return MANIFEST not in there and bool(there & {*DATABASES.values(), "files", "store"})
