"""Inflating gzip with a ceiling: nothing is ever decompressed that was not asked for."""

from __future__ import annotations

import zlib

from model_store.errors import DamagedScan

_CHUNK = 2**20
_GZIP = 16 + zlib.MAX_WBITS


class BoundedGunzip:
    """A reader over gzip bytes (one member or several) that produces as many bytes as it is asked for.

    zlib checks each member's CRC when its end is reached, so read to the end to know that it is whole.
    """

    def __init__(self, data: bytes) -> None:
        self._input = memoryview(data)
        self._position = 0
        self._member = zlib.decompressobj(_GZIP)
        self._ended = False

    def read_into(self, target: memoryview) -> int:
        """Fill `target` as far as the stream reaches; returns the bytes written. Raises DamagedScan."""
        written = 0
        while written < len(target) and not self._ended:
            produced = self._produce(min(_CHUNK, len(target) - written))
            target[written : written + len(produced)] = produced
            written += len(produced)
        return written

    def _produce(self, at_most: int) -> bytes:
        source = self._member.unconsumed_tail
        if not source:
            source = bytes(self._input[self._position : self._position + _CHUNK])
            self._position += len(source)
        try:
            produced = self._member.decompress(source, at_most)
        except zlib.error as error:
            raise DamagedScan(
                f"gzip: the compressed data are damaged ({error}); send the file again, unchanged"
            ) from error
        if self._member.eof:
            self._next_member()
        elif not produced and not source:
            raise DamagedScan("gzip: the file ends in the middle of its data; send the whole file")
        return produced

    def _next_member(self) -> None:
        self._position -= len(self._member.unused_data)
        rest = bytes(self._input[self._position : self._position + 2])
        if rest == b"\x1f\x8b":
            self._member = zlib.decompressobj(_GZIP)
        else:
            # What follows the last member is padding (tape blocks, zero fill) and no part of the data.
            self._ended = True
