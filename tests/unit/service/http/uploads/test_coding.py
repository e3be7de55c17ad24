"""Bodies that are coded with gzip: decoded piece by piece, or refused by name."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Sequence

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from service.http.problems import Problem
from service.http.uploads.body_limit import BodyLimitMiddleware
from service.http.uploads.coding import ContentCodingMiddleware

BODY = bytes(range(256)) * 40
CODED = gzip.compress(BODY)


def pieces(content: bytes, size: int) -> list[bytes]:
    return [content[at : at + size] for at in range(0, len(content), size)] or [b""]


def read(sent: Sequence[bytes], *codings: bytes, limited: bool = False) -> tuple[bytes, int, Request]:
    """The body that the application receives, its largest piece, and its request."""
    coming: list[Message] = [
        {"type": "http.request", "body": each, "more_body": number < len(sent) - 1}
        for number, each in enumerate(sent)
    ]
    received: list[bytes] = []
    requests: list[Request] = []

    async def receive() -> Message:
        return coming.pop(0)

    async def send(_: Message) -> None:
        pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        requests.append(Request(scope, receive))
        async for piece in requests[0].stream():
            received.append(piece)

    headers = [(b"content-encoding", each) for each in codings] + [(b"content-length", b"9"), (b"x", b"y")]
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    inner = BodyLimitMiddleware(app) if limited else app
    asyncio.run(ContentCodingMiddleware(inner)(scope, receive, send))
    return b"".join(received), max(map(len, received), default=0), requests[0]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("coding", [b"gzip", b"X-GZIP", b"identity, gzip"])
@pytest.mark.parametrize("coded", [CODED, gzip.compress(BODY[:999]) + gzip.compress(BODY[999:])])
def test_coded_body_is_what_it_was(size: int, coding: bytes, coded: bytes) -> None:
    found, _, request = read(pieces(coded, size), coding)
    assert found == BODY
    assert not {"content-encoding", "content-length"} & {*request.headers}
    assert request.headers["x"] == "y"


def test_plain_body_passes_untouched() -> None:
    for codings in ((), (b"identity",), (b"",)):
        found, _, request = read([CODED], *codings)
        assert (found, request.headers["content-length"]) == (CODED, "9")
    assert read([b""], b"gzip")[0] == b""


def test_body_that_expands_is_received_in_small_pieces_and_counted_as_what_it_becomes() -> None:
    bomb = gzip.compress(bytes(32 << 20))
    found, largest, _ = read([bomb], b"gzip")
    assert (len(found), largest) == (32 << 20, 64 * 1024)
    with pytest.raises(Problem) as refused:
        read([bomb], b"gzip", limited=True)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "codings", [(b"br",), (b"gzip, gzip",), (b"gzip", b"gzip"), (b"deflate",), (b"x" * 999,)]
)
def test_other_coding_is_415_with_what_is_taken(codings: tuple[bytes, ...]) -> None:
    with pytest.raises(Problem, match="Expected a body without Content-Encoding, or one of gzip") as refused:
        read([CODED], *codings)
    assert (refused.value.status, refused.value.headers["Accept-Encoding"]) == (415, "gzip, identity")


def _without_content() -> list[bytes]:
    """Stored blocks of nothing, without an end."""
    head = gzip.compress(b"")[:10]
    return [head, *[b"\x00\x00\x00\xff\xff" * 4000] * 10]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([BODY], "bytes that are not gzip"),
        ([CODED[:-1]], "one that is cut off"),
        ([CODED[:20]], "one that is cut off"),
        ([CODED + b"x"], "bytes that are not gzip|one that is cut off"),
        ([zlib.compress(BODY)], "bytes that are not gzip"),
        (_without_content(), "blocks without content"),
    ],
)
def test_body_that_is_not_coded_as_it_says_is_refused(sent: list[bytes], said: str) -> None:
    with pytest.raises(Problem, match=said) as refused:
        read(sent, b"gzip")
    assert (refused.value.status, refused.value.slug) == (422, "coding-broken")
