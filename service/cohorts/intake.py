"""What is asked of every scan that is kept for a job: that it can be read, now, while its sender listens."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from anyio import to_thread

from model_store.errors import ScanError
from model_store.scan import decode
from service.context import ServiceContext
from service.http.problems import Problem
from service.http.uploads.spool import Upload
from service.settings import scan_limits

_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:,|$)")


def refuse_form(content_type: str | None) -> None:
    """Raises Problem 415 for a form where the body is the file itself."""
    if (content_type or "").lower().startswith("multipart/"):
        raise Problem(
            415,
            "not-the-file-itself",
            "Not the file itself",
            "Expected the file itself as the body, found a multipart form; with curl: -T FILE in place of -F",
        )


async def formats_of(context: ServiceContext, uploads: Sequence[Upload]) -> list[str]:
    """Decode each scan, and forget it: what its format is. As many at once as may be segmented at once.

    Raises:
        ScanError: one cannot be read; of several the message says which.
    """

    def check(upload: Upload) -> str:
        return decode(upload.read(), scan_limits(context.settings)).format

    formats = []
    for number, upload in enumerate(uploads, start=1):
        try:
            formats.append(await to_thread.run_sync(check, upload, limiter=context.decoding))
        except ScanError as error:
            if len(uploads) == 1:
                raise
            # By its place in the form: the names of files are not read.
            raise type(error)(f"scan {number} of {len(uploads)}: {error}") from error
    return formats


def check_digest(header: str | None, upload: Upload) -> None:
    """Compare with the sha-256 of `Repr-Digest` (RFC 9530), if it is there; other algorithms are ignored.

    Raises:
        Problem: 422 when something else arrived than was sent, or what was announced cannot be read: its
            sender would think that it was compared.
    """
    if header is None or "sha-256" not in header.lower():
        return
    announced = _SHA256.search(header)
    if announced is None:
        raise Problem(
            422,
            "digest-unreadable",
            "Not a digest that can be compared",
            "Expected Repr-Digest: sha-256=:BASE64: with the base64 of 32 bytes between the colons, found "
            "something else after sha-256: correct it, or leave it out.",
        )
    expected = base64.b64decode(announced[1]).hex()
    if f"sha256:{expected}" != upload.sha256:
        raise Problem(
            422,
            "digest-mismatch",
            "Not the bytes that were announced",
            f"Repr-Digest announces sha256:{expected}, received were {upload.size} bytes with "
            f"{upload.sha256}: send the file again.",
        )
