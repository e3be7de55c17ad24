"""Receive uploads: stream, count, hash and spool them until their request is answered.

with await receive(request, spool, limits) as form:
    form.fields["model"], form.files["scan"].read()

with await receive_body(request, spool, limits) as upload:
    upload.read()
"""

from __future__ import annotations

import asyncio
import base64
import errno
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from anyio import to_thread
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from model_store.errors import LocumStoreError
from service.errors import CohortError, HospitalUnknown, JobError, ServiceError
from service.http.problems import Problem
from service.http.uploads.body_limit import IDLE_SECONDS, lift, stalled
from service.http.uploads.multipart import FormReader, Sink, too_large
from service.runtime.spool import IN_MEMORY_BYTES, Upload

MEBIBYTE = 1024 * 1024
# What boundaries, part headers and text fields may add to the size of the files.
_FORM_BYTES = 256 * 1024
# A form up to this size is hashed on the event loop, in a fifth of a millisecond. Its files are in memory.
_AT_ONCE_BYTES = min(256 * 1024, IN_MEMORY_BYTES)
# What the header of each further part may.
_PART_BYTES = 1024
# This much of a rejected body is still read: most clients read an answer only after sending.
_DRAIN_BYTES = 8 * MEBIBYTE
_DRAIN_SECONDS = 2.0
# Rejections by the state of a hospital's records; a client with several scans continues with the next.
_KEEPS_CONNECTION = (HospitalUnknown, CohortError, JobError)
_SHA256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:,|$)")


@dataclass(frozen=True)
class UploadLimits:
    """What one request may send. `idle_seconds` is the longest pause between two chunks."""

    max_bytes: int
    max_files: int = 1
    idle_seconds: float = IDLE_SECONDS


@dataclass
class UploadForm:
    """A received form: text fields by name, files by field name. Leaving it as a context closes the files.

    `repeated` holds the files of fields that may be there more than once, in the order they came.
    """

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Upload] = field(default_factory=dict)
    repeated: dict[str, list[Upload]] = field(default_factory=dict)

    def close(self) -> None:
        """Give every file up."""
        for upload in (*self.files.values(), *(one for many in self.repeated.values() for one in many)):
            upload.close()

    def __enter__(self) -> UploadForm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def receive(
    request: Request,
    spool: Path,
    limits: UploadLimits,
    *,
    file_fields: Collection[str] = ("scan",),
    repeated_fields: Collection[str] = (),
    by_channel: str | None = None,
    admit: Callable[[], Awaitable[None]] | None = None,
) -> UploadForm:
    """Receive a `multipart/form-data` body.

    It is never held in memory as a whole, and reading stops at the limit whatever `Content-Length` said.

    Args:
        request: its body must be unread.
        spool: folder for large files.
        limits: what it may send.
        file_fields: fields that must hold a file; every other must not.
        repeated_fields: those of them that may be there `limits.max_files` times, together as large as one.
        by_channel: one of these that may also come as `FIELD.CHANNEL`, several times for each channel.
        admit: awaited before the body is read, and may refuse.

    Raises:
        Problem: 413 too large, 415 not multipart, 422 malformed, 408 stalled, 507 no room on the disk.
        ServiceError, LocumStoreError: from `admit`.
        ClientDisconnect: the client disconnected.
    """
    lift(request)
    stream = request.stream()
    form = UploadForm()
    try:
        if admit is not None:
            await admit()
        await _receive_into(form, request, stream, spool, limits, file_fields, repeated_fields, by_channel)
    except (ServiceError, LocumStoreError) as refusal:
        form.close()
        await _refuse(refusal, stream)
        raise
    except BaseException:
        form.close()
        raise
    return form


async def receive_body(
    request: Request,
    spool: Path,
    limits: UploadLimits,
    *,
    admit: Callable[[], Awaitable[None]] | None = None,
) -> Upload:
    """Receive a body that is one file, as it is. `admit` is awaited before it is read, and may reject it.

    Raises:
        Problem: 413 too large, 408 stalled, 507 no room on the disk.
        ServiceError, LocumStoreError: from `admit`.
        ClientDisconnect: the client disconnected.
    """
    lift(request)
    stream = request.stream()
    upload = Upload(spool)
    try:
        if admit is not None:
            await admit()
        if (declared_length(request) or 0) > limits.max_bytes:
            raise too_large(limits.max_bytes)
        pending: list[tuple[Sink, bytes]] = []
        received = waiting = 0
        while (chunk := await _next_chunk(stream, limits.idle_seconds)) is not None:
            received += len(chunk)
            if received > limits.max_bytes:
                raise too_large(limits.max_bytes)
            pending.append((upload, chunk))
            waiting += len(chunk)
            if waiting >= IN_MEMORY_BYTES:
                await _write(pending)
                pending, waiting = [], 0
        await _write(pending)
    except (ServiceError, LocumStoreError) as refusal:
        upload.close()
        await _refuse(refusal, stream)
        raise
    except BaseException:
        upload.close()
        raise
    return upload


def refuse_form(content_type: str | None) -> None:
    """Raises Problem 415 for a form where the body is the file itself."""
    if (content_type or "").lower().startswith("multipart/"):
        raise Problem(
            415,
            "not-the-file-itself",
            "Not the file itself",
            "Expected the file itself as the body, found a multipart form; with curl: -T FILE in place of -F",
        )


def check_digest(header: str | None, upload: Upload) -> None:
    """Compare with the sha-256 of `Repr-Digest` (RFC 9530), if it is there; other algorithms are ignored.

    Raises:
        Problem: 422 for other bytes than announced, and for a digest that cannot be read: its sender would
            believe that it was compared.
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


def declared_length(request: Request) -> int | None:
    """Return `Content-Length`, if it is a number."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else None


async def _refuse(refusal: ServiceError | LocumStoreError, stream: AsyncIterator[bytes]) -> None:
    if isinstance(refusal, ServiceError) and not isinstance(refusal, _KEEPS_CONNECTION):
        refusal.headers["Connection"] = "close"
    if not isinstance(refusal, Problem) or refusal.status != 408:
        await _drain(stream)


async def _receive_into(
    form: UploadForm,
    request: Request,
    stream: AsyncIterator[bytes],
    spool: Path,
    limits: UploadLimits,
    file_fields: Collection[str],
    repeated_fields: Collection[str],
    by_channel: str | None,
) -> None:
    boundary = _boundary(request)
    whole = limits.max_bytes + _FORM_BYTES + _PART_BYTES * limits.max_files
    if (declared_length(request) or 0) > whole:
        raise too_large(limits.max_bytes)

    def open_file(name: str) -> Upload:
        if name in repeated_fields or name not in file_fields:
            before = form.repeated.setdefault(name, [])
            before.append(Upload(spool, shared=before[0] if before else None))
            return before[-1]
        form.files[name] = Upload(spool)
        return form.files[name]

    repeated = dict.fromkeys(repeated_fields, limits.max_files)
    reader = FormReader(boundary, open_file, file_fields, limits.max_bytes, repeated, by_channel)
    total = 0
    while (chunk := await _next_chunk(stream, limits.idle_seconds)) is not None:
        total += len(chunk)
        if total > whole:
            raise too_large(limits.max_bytes)
        reader.feed(chunk)
        if reader.pending_bytes >= IN_MEMORY_BYTES:
            await _write(reader.take_pending())
    reader.finish()
    # A small form is in memory as a whole, and hashed sooner than a thread is woken.
    await _write(reader.take_pending(), at_once=total <= _AT_ONCE_BYTES)
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
        raise stalled(idle_seconds) from None


async def _write(pending: list[tuple[Sink, bytes]], *, at_once: bool = False) -> None:
    def write() -> None:
        for sink, data in pending:
            sink.write(data)

    try:
        if at_once:
            write()
        else:
            await to_thread.run_sync(write)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Problem(
            507,
            "spool-full",
            "No room for the upload",
            "The service's disk is full: delete cohorts that are not needed, then send the scan again.",
        ) from error


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Read and discard for a while, so that the client is ready to receive the rejection."""
    read = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in stream:
                read += len(chunk)
                if read > _DRAIN_BYTES:
                    return
    except (TimeoutError, ClientDisconnect):
        return
