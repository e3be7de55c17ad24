"""Read the files of a model from a folder or a zip file, within limits and without unpacking it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final, Self

from typing_extensions import override

from training.errors import ImportRefused
from training.weights.bounds import check_expanded

MOST_FILES: Final = 10_000
MIB: Final = 1 << 20
_MOST_NAMED = 8


class Source(AbstractContextManager["Source"]):
    """The files of a model by their path inside, as `configs/metadata.json`.

    A zip file may have all of its files in one folder: that is left out of the paths. Nothing is written to
    disk, so a path cannot lead out of a folder, and a member is decompressed only up to the limit of its
    reader.

    Raises ImportRefused for a path that does not exist, and for a zip file that is damaged, encrypted, or has
    too many members or names that lead out of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        self._inside = ""
        if path.is_dir():
            self._root = path.resolve()
            self.names = tuple(sorted(self._walk()))
        elif path.is_file():
            self.names = self._open_zip()
        else:
            raise ImportRefused(f"{path}: expected a folder or a zip file, found neither")

    def enter(self, *files: str, inside: str = "", fits: Callable[[str], bool] | None = None) -> str:
        """Go into the one folder that has all of `files`, and return its path: "" where they are at the top,
        or nowhere.

        `inside` is the path of that folder, or the end of it, where there are several; `fits` chooses
        by the folder's name. Raises ImportRefused that lists them.
        """
        if not inside and all(self.has(file) for file in files):
            return ""
        folders = {name.removesuffix(files[0]) for name in self.names if f"/{name}".endswith(f"/{files[0]}")}
        found = sorted(folder for folder in folders if all(self.has(folder + file) for file in files))
        wanted = inside.strip("/")
        chosen = [each for each in found if f"/{each}".endswith(f"/{wanted}/")] if wanted else found
        if fits is not None:
            chosen = [each for each in chosen if fits(each.rstrip("/").rpartition("/")[2])]
        if not found and not wanted:
            return ""
        if len(chosen) != 1:
            named = ", ".join(each.rstrip("/") or "." for each in (chosen or found)[:_MOST_NAMED]) or "none"
            more = (
                f" and {len(chosen or found) - _MOST_NAMED} more"
                if len(chosen or found) > _MOST_NAMED
                else ""
            )
            raise ImportRefused(
                f"{self.path}: expected one folder with "
                f"{' and '.join(files)}{f' called {wanted[:128]}' if wanted else ''}, found {named}{more}: "
                "name one with --inside"
            )
        (folder,) = chosen
        self._inside += folder
        self.names = tuple(name.removeprefix(folder) for name in self.names if name.startswith(folder))
        return folder.rstrip("/")

    def has(self, name: str) -> bool:
        """Whether there is a file of this path."""
        return name in self._set

    @property
    def _set(self) -> frozenset[str]:
        return frozenset(self.names)

    def read(self, name: str, most: int) -> bytes:
        """Read a file of at most `most` bytes. Raises ImportRefused when it is missing or larger."""
        where = f"{self.path}: {name}"
        if not self.has(name):
            raise ImportRefused(f"{where}: expected this file, found none")
        try:
            if self._zip is not None:
                packed = self._zip.getinfo(self._inside + name)
                check_expanded(packed.compress_size, min(packed.file_size, most + 1), "file")
                with self._zip.open(packed) as member:
                    content = member.read(most + 1)
            else:
                with (self._root / (self._inside + name)).open("rb") as file:
                    content = file.read(most + 1)
        except (OSError, ValueError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
            raise ImportRefused(f"{where}: cannot be read: {error}") from error
        if len(content) > most:
            raise ImportRefused(f"{where}: expected at most {_size(most)}, found more")
        return content

    def _walk(self) -> Iterator[str]:
        for count, path in enumerate(self._root.rglob("*"), start=1):
            if count > MOST_FILES:
                raise ImportRefused(
                    f"{self.path}: expected at most {MOST_FILES} files, found more: name the model's own "
                    "folder"
                )
            # A link out of the folder is no file of the model.
            if path.is_file() and path.resolve().is_relative_to(self._root):
                yield path.relative_to(self._root).as_posix()

    def _open_zip(self) -> tuple[str, ...]:
        try:
            self._zip = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise ImportRefused(f"{self.path}: expected a folder or a zip file: {error}") from error
        members = [member for member in self._zip.infolist() if not member.is_dir()]
        if len(members) > MOST_FILES:
            raise ImportRefused(f"{self.path}: expected at most {MOST_FILES} files, found {len(members)}")
        for member in members:
            parts = PurePosixPath(member.filename.replace("\\", "/")).parts
            if not parts or ".." in parts or parts[0].startswith("/") or ":" in parts[0]:
                raise ImportRefused(
                    f"{self.path}: expected paths inside of the zip file, found {member.filename[:128]!r}"
                )
            if member.flag_bits & 1:
                raise ImportRefused(
                    f"{self.path}: {member.filename[:128]!r} is encrypted: save it without a password"
                )
        names = [member.filename for member in members]
        first = {name.partition("/")[0] for name in names if "/" in name}
        if len(first) == 1 and all("/" in name for name in names):
            self._inside = f"{first.pop()}/"
        return tuple(sorted(name.removeprefix(self._inside) for name in names))

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._zip is not None:
            self._zip.close()


def _size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count} bytes"
