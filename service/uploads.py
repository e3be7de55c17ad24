"""Uploads: streamed, counted while they stream, kept in private nameless files that die with their request.

A scan is a patient's. So a small one stays in memory and a large one goes to a file that has no name from the
moment it is opened: when the request ends, however it ends (answered, refused, client gone, process killed),
the system takes it back.

    with await receive(request, spool, limits) as form:
        form.fields["model"], form.files["scan"].read()
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from anyio import to_thread
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from service.multipart import FormReader, Sink, too_large
from service.problems import Problem

MEBIBYTE = 1024 * 1024
# Up to this size an upload stays in memory and never touches the disk.
IN_MEMORY_BYTES = MEBIBYTE
# What boundaries, part headers and text fields may add to the size of the files.
_FORM_BYTES = 256 * 1024
# So much of a refused body is still read: most clients look for an answer only once they have sent.
_DRAIN_BYTES = 8 * MEBIBYTE
_DRAIN_SECONDS = 2.0
_PREFIX = "upload-"


@dataclass(frozen=True)
class UploadLimits:
    """What one request may send. `idle_seconds` is the longest pause between two chunks."""

    max_bytes: int
    idle_seconds: float = 60.0


class Upload:
    """One uploaded file: its size, its sha256, and its bytes until `close`."""

    def __init__(self, spool: Path) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed with its form
            max_size=IN_MEMORY_BYTES, dir=str(spool), prefix=_PREFIX
        )
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        """`sha256:` and the hexadecimal digest of what was received."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes, /) -> None:
        """Append. Blocking: call it in a thread."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def read(self) -> bytes:
        """All of it. Blocking: call it in a thread."""
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        """Give the bytes up."""
        self._file.close()


@dataclass
class UploadForm:
    """A received form: text fields by name, files by field name. Leaving it as a context closes the files."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Upload] = field(default_factory=dict)

    def close(self) -> None:
        """Give every file up."""
        for upload in self.files.values():
            upload.close()

    def __enter__(self) -> UploadForm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prepare_spool(spool: Path) -> None:
    """Make the folder, readable by its owner alone, and sweep what a killed process may have left in it."""
    spool.mkdir(parents=True, exist_ok=True)
    spool.chmod(0o700)
    # Where the system cannot open a file without a name, it has one for an instant before it is unlinked.
    for leftover in spool.glob(f"{_PREFIX}*"):
        leftover.unlink(missing_ok=True)


async def receive(
    request: Request,
    spool: Path,
    limits: UploadLimits,
    *,
    file_fields: Collection[str] = ("scan",),
    admit: Callable[[], None] = lambda: None,
) -> UploadForm:
    """Receive a `multipart/form-data` body.

    It is never held in memory as a whole, and reading stops at the limit whatever `Content-Length` said.

    Args:
        request: whose body has not been touched.
        spool: folder for large files.
        limits: what it may send.
        file_fields: fields that must hold a file; every other must not.
        admit: called before the body is read; refuses by raising a Problem.

    Raises:
        Problem: 413 too large, 415 not multipart, 422 malformed, 408 stalled, 507 no room on the disk.
        ClientDisconnect: the client went away.
    """
    stream = request.stream()
    form = UploadForm()
    try:
        admit()
        await _receive_into(form, request, stream, spool, limits, file_fields)
    except Problem as problem:
        form.close()
        problem.headers["Connection"] = "close"
        if problem.status != 408:
            await _drain(stream)
        raise
    except BaseException:
        form.close()
        raise
    return form


async def _receive_into(
    form: UploadForm,
    request: Request,
    stream: AsyncIterator[bytes],
    spool: Path,
    limits: UploadLimits,
    file_fields: Collection[str],
) -> None:
    boundary = _boundary(request)
    whole = limits.max_bytes + _FORM_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > whole:
        raise too_large(limits.max_bytes)

    def open_file(name: str) -> Upload:
        form.files[name] = Upload(spool)
        return form.files[name]

    reader = FormReader(boundary, open_file, file_fields, limits.max_bytes)
    total = 0
    while (chunk := await _next_chunk(stream, limits.idle_seconds)) is not None:
        total += len(chunk)
        if total > whole:
            raise too_large(limits.max_bytes)
        reader.feed(chunk)
        if reader.pending_bytes >= IN_MEMORY_BYTES:
            await _write(reader.take_pending())
    reader.finish()
    await _write(reader.take_pending())
    form.fields.update(reader.fields)


def _boundary(request: Request) -> bytes:
    content_type, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if content_type != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise Problem(
            415,
            "not-multipart",
            "Not a multipart form",
            "Expected a body of type multipart/form-data with a boundary, and the scan in its field 'scan'; "
            "with curl: -F scan=@FILE",
        )
    return boundary


async def _next_chunk(stream: AsyncIterator[bytes], idle_seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(idle_seconds):
            return await anext(stream, None)
    except TimeoutError:
        raise Problem(
            408,
            "upload-stalled",
            "The upload stalled",
            f"Nothing arrived for {idle_seconds:g} seconds; send the scan again.",
        ) from None


async def _write(pending: list[tuple[Sink, bytes]]) -> None:
    def write() -> None:
        for sink, data in pending:
            sink.write(data)

    try:
        await to_thread.run_sync(write)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Problem(
            507, "spool-full", "No room for the upload", "The service's disk is full; send the scan later."
        ) from error


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Read on for a while without keeping anything, so that the client is ready to hear why it is refused."""
    read = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in stream:
                read += len(chunk)
                if read > _DRAIN_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return
