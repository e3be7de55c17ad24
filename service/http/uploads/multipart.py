"""Parse and validate a streamed multipart form.

Text fields are few and short; files are expected by field name and counted while they stream in. The client's
file names are read past: never used, kept or logged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from model_store.volume import CHANNEL_NAME
from service.http.problems import Problem

MAX_FIELDS = 32
MAX_FIELD_BYTES = 4096
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')
_EXTENDED = re.compile(rb";[ \t]*filename\*[ \t]*=", re.IGNORECASE)
_CHANNEL = re.compile(CHANNEL_NAME)
_EXPECTED = "expected multipart/form-data (RFC 7578)"


class Sink(Protocol):
    """Where the bytes of one file go."""

    def write(self, data: bytes, /) -> None:
        """Take the next bytes."""


class FormReader:
    """Feeds a multipart body, chunk by chunk, into `fields` and the sinks that `open_file` makes.

    A file's bytes are only queued by `feed`; `take_pending` hands them out, to be written away from the event
    loop.
    """

    def __init__(
        self,
        boundary: bytes,
        open_file: Callable[[str], Sink],
        file_fields: Collection[str],
        max_bytes: int,
        repeated: Mapping[str, int] | None = None,
        by_channel: str | None = None,
    ) -> None:
        """`repeated` maps file fields that may occur more than once to how often.

        `by_channel` is one of the file fields that may also come as `FIELD.CHANNEL`, for each channel.
        """
        self.fields: dict[str, str] = {}
        self.pending_bytes = 0
        self._pending: list[tuple[Sink, bytes]] = []
        self._open_file = open_file
        self._file_fields = file_fields
        self._max_bytes = max_bytes
        self._received_bytes = 0
        self._seen: Counter[str] = Counter()
        self._repeated = repeated or {}
        self._by_channel = by_channel
        self._header_name = b""
        self._header_value = b""
        self._disposition: bytes | None = None
        self._name = ""
        self._value: bytearray | None = None
        self._sink: Sink | None = None
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_text,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body. Raises Problem 413, 422."""
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise malformed(f"the multipart framing is broken; {_EXPECTED}") from None

    def finish(self) -> None:
        """End the body. Raises Problem 422 if the form is incomplete."""
        if not self._ended:
            raise malformed(f"the body ends before its last boundary; {_EXPECTED}")

    def take_pending(self) -> list[tuple[Sink, bytes]]:
        """Return the bytes to write, with their files."""
        pending, self._pending, self.pending_bytes = self._pending, [], 0
        return pending

    def _part_begin(self) -> None:
        self._disposition = None
        self._sink = None
        self._value = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_text(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        # RFC 5987's form, which the parser passes over; clients send it for names that are not ASCII.
        extended = _EXTENDED.search(_QUOTED.sub(b"", self._disposition or b""))
        is_file = b"filename" in options or extended is not None
        if not name:
            raise malformed(f"a part has no field name in its Content-Disposition; {_EXPECTED}")
        field = self._field_of(name)
        most = self._repeated.get(field)
        if self._seen[name] >= (most or 1):
            counts = (
                "expected once, found twice: send it once"
                if most is None
                else f"expected at most {most} times, found more: send at most {most}"
            )
            raise malformed(f"field '{shown(name)}': {counts}")
        if name not in self._seen and len(self._seen) >= MAX_FIELDS:
            raise malformed(
                f"the form: expected at most {MAX_FIELDS} fields, found more: leave out those that /docs "
                "does not list"
            )
        if is_file != (field in self._file_fields):
            expected = ", ".join(sorted(self._file_fields))
            raise malformed(
                f"field '{shown(name)}' is sent as a file; a file is expected in: {expected}"
                if is_file
                else f"field '{shown(name)}' is sent as a text field, and takes a file; {with_curl(name)}"
            )
        self._seen[name] += 1
        self._name = name
        if is_file:
            self._sink = self._open_file(name)
        else:
            self._value = bytearray()

    def _field_of(self, name: str) -> str:
        """The field of a part, without its channel."""
        field, dot, channel = name.partition(".")
        if not dot or field != self._by_channel:
            return name
        if not _CHANNEL.fullmatch(channel):
            raise malformed(
                f"field '{shown(name)}': expected the name of a channel of the task after the dot, such as "
                f"{field}.T1; found other characters"
            )
        return field

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._sink is not None:
            self._received_bytes += end - start
            if self._received_bytes > self._max_bytes:
                raise too_large(self._max_bytes)
            self._pending.append((self._sink, data[start:end]))
            self.pending_bytes += end - start
        elif self._value is not None:
            if len(self._value) + end - start > MAX_FIELD_BYTES:
                raise malformed(f"field '{shown(self._name)}' is longer than {MAX_FIELD_BYTES} bytes")
            self._value += data[start:end]

    def _part_end(self) -> None:
        if self._value is not None:
            try:
                self.fields[self._name] = self._value.decode("utf-8")
            except UnicodeDecodeError:
                raise malformed(f"field '{shown(self._name)}' is not UTF-8 text") from None

    def _end(self) -> None:
        self._ended = True


def too_large(max_bytes: int) -> Problem:
    """413: more bytes than one scan may have."""
    return Problem(
        413,
        "upload-too-large",
        "The upload is too large",
        f"An upload may have {max_bytes} bytes here, this one has more; LOCUM_MAX_UPLOAD_BYTES is the limit.",
        max_bytes=max_bytes,
    )


def malformed(what: str) -> Problem:
    """Make a 422: the body is not a valid form."""
    return Problem(422, "malformed-form", "The form cannot be read", what)


def missing(name: str) -> Problem:
    """Make a 422: the form has no file."""
    return malformed(f"the field '{name}' is missing, and takes a file; {with_curl(name)}")


def with_curl(name: str) -> str:
    """How a file is sent in this field."""
    return f"with curl: -F {name}=@FILE"


def shown(name: str) -> str:
    """Shorten a client's name and make it printable."""
    return ascii(name[:64])[1:-1]
