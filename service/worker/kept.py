"""Keep what is read and prepared of a job's scans for the next pass, as far as memory goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from service.cohorts.files import ScanFile

# Bytes that are kept; what is beyond them is made again.
_MOST_KEPT = 2**28

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by the name of their scan; `size` gives the bytes of one."""

    def __init__(self, make: Callable[[str], Value], size: Callable[[Value], int]) -> None:
        self._make, self._size = make, size
        self._values: dict[str, Value] = {}
        self._room = _MOST_KEPT

    def __getitem__(self, name: str) -> Value:
        if name in self._values:
            return self._values[name]
        made = self._make(name)
        if (left := self._room - self._size(made)) >= 0:
            self._room = left
            self._values[name] = made
        return made


@dataclass(frozen=True)
class _KeptFile(ScanFile):
    contents: Kept[bytes] = field(kw_only=True)

    @override
    def read(self) -> bytes:
        return self.contents[self.key]


def read_once(files: Sequence[ScanFile]) -> list[ScanFile]:
    """Return the same files, of which each is read once from where it is stored, as far as memory goes."""
    stored = {file.key: file for file in files}
    contents = Kept(lambda key: stored[key].read(), len)
    return [_KeptFile(**vars(file), contents=contents) for file in files]
