"""Decode a job's scans on arrival, so that the client gets the error."""

from __future__ import annotations

from collections.abc import Sequence

from anyio import to_thread

from model_store.errors import ScanError
from model_store.scan import Limits, decode
from service.inference.admission import Admission
from service.runtime.spool import Upload


async def formats_of(uploads: Sequence[Upload], limits: Limits, admission: Admission) -> list[str]:
    """Decode each scan, and return its format; each takes its turn.

    Raises:
        ScanError: a scan cannot be read; of several scans the message says which.
    """

    def check(upload: Upload) -> str:
        return decode(upload.read(), limits).format

    formats = []
    for number, upload in enumerate(uploads, start=1):
        try:
            async with admission.turn():
                formats.append(await to_thread.run_sync(check, upload))
        except ScanError as error:
            if len(uploads) == 1:
                raise
            # Named by its position in the form, because file names are ignored.
            raise type(error)(f"scan {number} of {len(uploads)}: {error}") from error
    return formats
