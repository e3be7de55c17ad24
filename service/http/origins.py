"""Reject what a browser sends for a foreign page, and tell browsers how to treat the answers.

The `Host` header gives away a page that resolves its own name to this service's address. `Sec-Fetch-Site`, or
`Origin` in a browser that does not send it, gives away a form or script of another site. Other clients send
neither of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.problems import Problem, respond
from service.http.semantics import path_below_prefix

ANY = "*"
_CLOSED: Final = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})

# An answer may show a patient: no cache keeps it, no page frames it, and nothing in it runs or loads.
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"default-src 'none'; {_CLOSED}",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# Its one script inside the page has nothing in it that a client sent.
_DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    f"img-src 'self' data:; connect-src 'self'; {_CLOSED}"
)
# A page that a person opens by itself: its own styles and pictures, and nothing that is not in it. Text on it
# comes from many hands.
_DOCUMENT_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)


def self_contained(html: str | bytes) -> HTMLResponse:
    """Answer with a page that is complete in itself: no script runs in it, and it loads nothing."""
    return HTMLResponse(html, headers={"Content-Security-Policy": _DOCUMENT_POLICY})


class OriginMiddleware:
    """ASGI middleware: 421 for another host, 403 for another site's page, and headers that bind browsers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """`hosts` as in LOCUM_ALLOWED_HOSTS; pages of `origins` may call, as CORS lets them."""
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for an allowed host and page."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own = {"Cross-Origin-Resource-Policy": "cross-origin" if self._origins else "same-origin"}
        if scope["scheme"] == "https":
            own["Strict-Transport-Security"] = "max-age=31536000"
        if path_below_prefix(scope) == "/docs":
            own["Content-Security-Policy"] = _DOCS_POLICY
        answering = _with_headers(send, {**_HEADERS, **own})
        headers = Headers(scope=scope)
        problem = self._host_problem(headers)
        if problem is None and scope["method"] not in _SAFE:
            problem = self._site_problem(headers)
        if problem is None:
            await self.app(scope, receive, answering)
        else:
            await respond(Request(scope), problem)(scope, receive, answering)

    def _host_problem(self, headers: Headers) -> Problem | None:
        hosts = headers.getlist("host")
        if ANY in self._hosts or (len(hosts) == 1 and without_port(hosts[0]) in self._hosts):
            return None
        return Problem(
            421,
            "host-not-allowed",
            "This host is not served here",
            "The Host header names none of the hosts in LOCUM_ALLOWED_HOSTS: use one of these in the URL, or "
            "let the operator add it.",
        )

    def _site_problem(self, headers: Headers) -> Problem | None:
        origin = headers.get("origin", "").lower()
        if origin in self._origins:
            return None
        site = headers.get("sec-fetch-site")
        if site is None and origin:
            own = urlsplit(origin).netloc == headers.get("host", "").lower()
            site = "same-origin" if own else "cross-site"
        if site in (None, "none", "same-origin"):
            return None
        return Problem(
            403,
            "cross-site",
            "A page of another site sent this",
            "A browser sent this request for a page that is not this service's: let the operator add the "
            "page's origin to LOCUM_ALLOWED_ORIGINS, if it may act here.",
        )


def _with_headers(send: Send, added: Mapping[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in added.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def without_port(host: str) -> str:
    """`Example.org:80` -> `example.org`, `[::1]:8000` -> `[::1]`."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()
