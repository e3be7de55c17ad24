"""Decode every scan that is kept for a job when it arrives, so that the client gets the error."""

from __future__ import annotations

from collections.abc import Sequence

from anyio import CapacityLimiter, to_thread

from model_store.errors import ScanError
from model_store.scan import Limits, decode
from service.runtime.spool import Upload


async def formats_of(uploads: Sequence[Upload], limits: Limits, decoding: CapacityLimiter) -> list[str]:
    """Decode each scan, and return its format; `decoding` bounds how many are decoded at once.

    Raises:
        ScanError: one cannot be read; of several the message says which.
    """

    def check(upload: Upload) -> str:
        return decode(upload.read(), limits).format

    formats = []
    for number, upload in enumerate(uploads, start=1):
        try:
            formats.append(await to_thread.run_sync(check, upload, limiter=decoding))
        except ScanError as error:
            if len(uploads) == 1:
                raise
            # By its place in the form: the names of files are not read.
            raise type(error)(f"scan {number} of {len(uploads)}: {error}") from error
    return formats
