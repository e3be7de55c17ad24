"""Versions in a folder, on a disk that all processes share.

ROOT/NAME/3/manifest.json        the artefact; its files are read-only
ROOT/NAME/3/manifest.sha256      its digest, which all references use
ROOT/NAME/3.withdrawn.json       its tombstone, if it was withdrawn
ROOT/.staging/                   staging folders of versions that are not yet visible
ROOT/.index                      see `model_store.index`; it grows with every change, by which others see it

A name is listed again when the modification time of its folder changed. Two changes within one tick of the
file system's clock could have one time: a writer therefore moves it forward, and for some ticks after a
change the folder is listed for every request. A tick is two seconds where times are whole seconds.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.artefact import Artefact
from model_store.backend import NOTHING, Earlier, Listed
from model_store.digest import sha256_of_file
from model_store.durable import sync_folder, write_durably
from model_store.errors import StoreUnavailable
from model_store.index import append
from model_store.reference import NAME
from model_store.staging import staging, sweep

_STAGING = ".staging"
_INDEX = ".index"
_WITHDRAWN = b".withdrawn.json"
# After so long, no other change has the modification time that was seen. A kernel ticks every 10 ms or
# sooner; some file systems keep whole seconds, or even ones.
_SETTLED_NS, _SETTLED_SECONDS_NS = 10**8, 2 * 10**9
# So many folders are looked at by every survey, more of them at most once in a second.
_FEW = 200
_SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """The listing of a folder, and the state of the folder before it was listed, at `at` or after."""

    at: float
    state: tuple[int, int]
    listed: Listed
    settled: bool


class Folder:
    """A `Backend` in a folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / _INDEX
        self._text = str(root)
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._survey: dict[str, Listed] = {}
        self._surveyed: tuple[object, ...] | None = None
        self._swept = 0.0
        self._settled = False

    def check(self) -> None:
        """List the folder: where it cannot be read, `survey` would take it for an empty one."""
        if os.path.lexists(self.root):
            next(self.root.iterdir(), None)

    def prepare(self) -> None:
        """Make the folder."""
        self.root.mkdir(parents=True, exist_ok=True)

    def survey(self, since: float, *, thorough: bool = False) -> Mapping[str, Listed]:
        """List every name that has a version.

        Raises StoreUnavailable where there were names: a folder that is no longer mounted looks empty.
        """
        with self._lock:
            state = (_state(self._text), _state(str(self.index)))
            now = time.monotonic()
            recent = len(self._survey) > _FEW and now - self._swept < _SWEEP_S
            if recent and not thorough and self._settled and state == self._surveyed:
                return self._survey
            found = self._sweep(since)
            if self._survey and not found:
                raise StoreUnavailable(
                    f"{self.root} had models and has none: mount it again, or restart the service"
                )
            # A name that was made in the same tick would not show in the root's time.
            self._settled = state[0] is None or _is_settled(state[0][0])
            self._surveyed, self._swept = state, now
            same = found.keys() == self._survey.keys() and all(
                listed is self._survey[name] for name, listed in found.items()
            )
            if not same:
                self._survey = found
            return self._survey

    def listed(self, name: str, since: float) -> Listed:
        """List the versions of a name."""
        seen = self._seen.get(name)
        if seen is not None and seen.at >= since:
            return seen.listed
        path, at = f"{self._text}/{name}", time.monotonic()
        try:
            about = os.stat(path)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            self._seen.pop(name, None)
            return NOTHING
        state = (about.st_mtime_ns, about.st_ino)
        if seen is not None and seen.settled and seen.state == state:
            return seen.listed
        settled = _is_settled(about.st_mtime_ns)
        listed = _list(path)
        if seen is not None and seen.listed == listed:
            listed = seen.listed
        self._seen[name] = _Seen(at, state, listed, settled)
        return listed

    def tell(self) -> None:
        """Let the index grow."""
        append(self.index, b"")

    def artefact(self, name: str, number: int) -> Artefact:
        """Read and check a version's manifest."""
        return Artefact.read_from(self.root / name / str(number), name, number)

    def publish(
        self, name: str, files: Mapping[str, bytes], earlier: Earlier, admit: Callable[[], None] | None
    ) -> int:
        """Write a staging folder, and rename it to the next number."""
        with self._locked(name) as folder:
            # For a view of an instant before the lock was got, too.
            self.listed(name, time.monotonic())
            found = earlier()
            if found is not None:
                return found
            with staging(self.root / _STAGING) as staged:
                for file, data in files.items():
                    write_durably(staged / file, data, mode=0o444)
                if admit is not None:
                    admit()
                number = self._next(name)
                with _later(folder):
                    staged.rename(folder / str(number))
            sync_folder(folder)
            # The folder itself may be new.
            sync_folder(self.root)
        return number

    def _next(self, name: str) -> int:
        """The number after the last of a locked name; `earlier` has just listed it."""
        seen, path = self._seen.get(name), self.root / name
        state = _state(str(path))
        if seen is not None and state is not None and seen.state == state[:2]:
            number = max(seen.listed.numbers, default=0) + 1
            # By hand, or by another user, it may have been made within a tick of the clock.
            if not os.path.lexists(path / str(number)):
                return number
        return max(_list(str(path)).numbers, default=0) + 1

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

    def tombstone(self, name: str, number: int, since: float = 0.0) -> bytes | None:  # noqa: ARG002
        """Read the tombstone of a version, if it has one."""
        try:
            return self._tombstone(name, number).read_bytes()
        except FileNotFoundError:
            return None

    def bury(self, name: str, number: int, tombstone: bytes) -> None:
        """Write the tombstone of a version."""
        with self._locked(name) as folder, _later(folder):
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

    def _sweep(self, since: float) -> dict[str, Listed]:
        try:
            inside = os.listdir(self._text)  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {name: self.listed(name, since) for name in sorted(inside) if NAME.fullmatch(name)}
        return {name: listed for name, listed in found.items() if listed.numbers}

    def _tombstone(self, name: str, number: int) -> Path:
        return self.root / name / f"{number}{_WITHDRAWN.decode()}"

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Lock a name against other writers, in all processes."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        about = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size


def _is_settled(modified_ns: int) -> bool:
    tick = _SETTLED_NS if modified_ns % 10**9 else _SETTLED_SECONDS_NS
    return time.time_ns() - modified_ns > tick


def _list(path: str) -> Listed:
    names: list[bytes] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        # As bytes, of which `isdigit` means 0 to 9.
        names = os.listdir(os.fsencode(path))  # noqa: PTH208
    buried = [name.removesuffix(_WITHDRAWN) for name in names if name.endswith(_WITHDRAWN)]
    return Listed(
        tuple(sorted(map(int, filter(bytes.isdigit, names)))),
        frozenset(map(int, filter(bytes.isdigit, buried))),
    )


@contextmanager
def _later(folder: Path) -> Iterator[None]:
    """Give a folder a later modification time than before, whatever the file system's clock says."""
    before = folder.stat().st_mtime_ns
    yield
    now = max(time.time_ns(), before + 1)
    # Only the owner may choose the time; for a change by another user, the two seconds have to do.
    with suppress(PermissionError):
        os.utime(folder, ns=(now, now))
