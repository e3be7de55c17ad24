"""Bounded decompression: only as many bytes as requested, at a cost that grows with the number of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from model_store.errors import DamagedScan

_STEP = 2**20
# zlib copies input beyond the end of a member, so the size of one input bounds the cost of a tiny member.
_SLICE = 2**14
# BGZF files end with one member without data, and may be concatenated. A long run of them only costs time.
_MOST_EMPTY = 1024
_GZIP = 16 + zlib.MAX_WBITS
# zlib copies input that it cannot use yet, so it gets little at a time.
_PART = 2**16


def inflated(stream: zlib._Decompress, packed: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield what `stream` makes of the packed data, at most 1 MiB at a time. Raises zlib.error.

    It stops behind the end of the stream, with `unused_data` if there are more data.
    """
    for data in packed:
        for start in range(0, len(data), _PART):
            rest: bytes | memoryview = data[start : start + _PART]
            while rest and not stream.unused_data:
                yield stream.decompress(rest, _STEP)
                rest = stream.unconsumed_tail


class BoundedGunzip:
    """Reader of gzip bytes (one member or several) that decompresses as many bytes as requested.

    Its work grows with the number of bytes plus the number of members, not with their product. zlib checks
    the CRC at the end of each member, so only reading to the end shows that the data are complete.
    """

    def __init__(self, data: bytes) -> None:
        self._input = memoryview(data)
        self._position = 0
        self._member = zlib.decompressobj(_GZIP)
        self._ended_since_data = 0
        self._ended = False
        self._members = 1

    @property
    def is_one_member(self) -> bool:
        """Whether the input was one member and nothing else, once it is read to its end."""
        return self._members == 1 and self._ended and self._position == len(self._input)

    def read_into(self, target: memoryview) -> int:
        """Fill `target` as far as the stream goes and return the number of bytes. Raises DamagedScan."""
        written = 0
        while written < len(target) and not self._ended:
            produced = self._produce(min(_STEP, len(target) - written))
            target[written : written + len(produced)] = produced
            written += len(produced)
        return written

    def _produce(self, at_most: int) -> bytes:
        source = self._input[self._position : self._position + _SLICE]
        try:
            produced = self._member.decompress(source, at_most)
        except zlib.error as error:
            raise DamagedScan(
                f"gzip: the compressed data are damaged ({error}); send the file again, unchanged"
            ) from error
        # At the end of a member `unconsumed_tail` may repeat the bytes of `unused_data`.
        unread = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        self._position += len(source) - len(unread)
        if produced:
            self._ended_since_data = 0
        if self._member.eof:
            self._next_member()
        elif not produced and not source:
            raise DamagedScan("gzip: the file ends in the middle of its data; send the whole file")
        return produced

    def _next_member(self) -> None:
        self._ended_since_data += 1
        if self._ended_since_data > _MOST_EMPTY:
            raise DamagedScan(
                f"gzip: expected members that hold data, found more than {_MOST_EMPTY} empty ones in a row; "
                "compress the volume again"
            )
        if bytes(self._input[self._position : self._position + 2]) == b"\x1f\x8b":
            self._member = zlib.decompressobj(_GZIP)
            self._members += 1
        else:
            # The bytes after the last member are padding (tape blocks, zero fill), not data.
            self._ended = True
