"""The roster as a page for the operator's browser, behind a key: who is here, who is ready, what is planned.

It reads the files of the operator's kit at each request, so it stands beside a run and beside `listen`, and
writes nothing. The key is the password of HTTP Basic (RFC 7617), of any user; `page.key` in the kit has it.
"""

from __future__ import annotations

import secrets
import socket
from base64 import b64decode
from pathlib import Path
from urllib.parse import quote

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
    SimpleUser,
)
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from model_store.durable import write_durably
from training.errors import ConfigurationError, TrainingError
from training.network import calendar, kits
from training.network.roster import mail, rows

KEY_FILE = "page.key"
_REFRESH_S = 15
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def key_of(kit: kits.Kit) -> str:
    """The key of the page; the first call makes it."""
    path = kit.folder / KEY_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode(), mode=0o600)
    return path.read_text().strip()


def application(root: Path) -> Starlette:
    """The page of the consortium with its kits under `root`. Raises ConfigurationError."""
    key = key_of(kits.Kit.open(root / kits.SERVER, server=True))
    templates = _templates()

    def shown(name: str, headers: dict[str, str] | None = None, **values: object) -> HTMLResponse:
        content = templates.get_template(name).render(**values)
        return HTMLResponse(content, headers={**_HEADERS, **(headers or {})})

    def roster(_: Request) -> Response:
        own = kits.Kit.open(root / kits.SERVER, server=True)
        found = rows(own, kits.certificates(root))
        runs = [calendar.standing(each, found) for each in calendar.read(own)]
        return shown(
            "roster.html",
            {"Refresh": str(_REFRESH_S)},
            project=own.content.project,
            rows=found,
            runs=runs,
            warning=own.warning(),
        )

    def letter(request: Request) -> Response:
        own = kits.Kit.open(root / kits.SERVER, server=True)
        found = {row.site: row for row in rows(own, kits.certificates(root))}
        row = found.get(request.path_params["site"])
        if row is None:
            return PlainTextResponse("no hospital of this consortium", 404, _HEADERS)
        text, subject = mail(row, own), f"{own.content.project}: {row.site}"
        link = f"mailto:?subject={quote(subject)}&body={quote(text)}"
        return shown("mail.html", site=row.site, text=text, link=link)

    def failed(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 500, _HEADERS)

    return Starlette(
        routes=[Route("/", roster), Route("/mail/{site}", letter)],
        middleware=[Middleware(AuthenticationMiddleware, backend=_Key(key), on_error=_unknown)],
        exception_handlers={TrainingError: failed},
    )


def serve(root: Path, address: str) -> None:
    """Serve the page at HOST:PORT until Ctrl-C. Raises ConfigurationError where the address is taken."""
    app = application(root)
    host, _, port = address.rpartition(":")
    try:
        listening = socket.create_server((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            "the page cannot be served", [f"--at {address}: {error}; give another HOST:PORT"]
        ) from error
    with listening:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listening])


class _Key(AuthenticationBackend):
    """Every path needs the key, one without a page too."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser]:
        scheme, _, given = conn.headers.get("authorization", "").partition(" ")
        try:
            _, _, password = b64decode(given, validate=True).partition(b":")
        except ValueError:
            password = b""
        if scheme.lower() != "basic" or not secrets.compare_digest(password, self._key):
            raise AuthenticationError
        return AuthCredentials(("operator",)), SimpleUser("operator")


def _unknown(_: HTTPConnection, __: AuthenticationError) -> Response:
    return PlainTextResponse(
        f"expected the key of this page as the password; {KEY_FILE} in the operator's kit has it",
        401,
        {**_HEADERS, "WWW-Authenticate": 'Basic realm="federation", charset="UTF-8"'},
    )


def _templates() -> jinja2.Environment:
    # It draws with matplotlib, which takes a second to import.
    from training.report.page import environment

    found = environment()
    found.loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("training.network"), jinja2.PackageLoader("training.report")]
    )
    return found
