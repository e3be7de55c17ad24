"""Reject requests for another host: a web page that resolves its own name to this service's address."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.problems import Problem, respond

ANY = "*"


class HostMiddleware:
    """ASGI middleware: answers 421 unless the `Host` header, without its port, is an allowed one."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app = app
        self.allowed = frozenset(host.lower() for host in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for an allowed host."""
        if scope["type"] == "http" and ANY not in self.allowed:
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) != 1 or without_port(hosts[0]) not in self.allowed:
                problem = Problem(
                    421,
                    "host-not-allowed",
                    "This host is not served here",
                    "The Host header names none of the hosts in LOCUM_ALLOWED_HOSTS: use one of these in the "
                    "URL, or let the operator add it.",
                )
                await respond(Request(scope), problem)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def without_port(host: str) -> str:
    """`Example.org:80` -> `example.org`, `[::1]:8000` -> `[::1]`."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()
