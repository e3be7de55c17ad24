"""`/`: the page that people work in, built from `web/` into `service/static`.

    /               index.html
    /page/{name}    scripts, styles and pictures

Its files hold nothing of a patient, and need no credential: the page signs in. It loads nothing from another
place, runs no inline script, and evaluates no text. File names are the same in every build, so a browser asks
each time, and the entity tag (the content's digest) saves the transfer.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

STATIC: Final = Path(__file__).resolve().parents[1] / "static"
FOLDER: Final = "/page/"

router = APIRouter(include_in_schema=False)

# blob: and data: are pictures and volumes that the page itself makes.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self' blob: data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_LEAST_TO_COMPRESS: Final = 1024


@dataclass(frozen=True)
class _File:
    content: bytes
    compressed: bytes | None
    media_type: str
    etag: str


@router.get("/")
def get_page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@router.get(FOLDER + "{name}")
def get_page_file(request: Request, name: str) -> Response:
    """Return a file of the page."""
    return _answer(request, f"page/{name}")


def _answer(request: Request, name: str) -> Response:
    # Only names that the build has: no path of a client reaches the file system.
    if name not in _names():
        raise HTTPException(404)
    found = _read(name)
    headers = {
        "ETag": found.etag,
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
        "Content-Security-Policy": _POLICY,
    }
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if found.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(found.compressed, headers=headers, media_type=found.media_type)
    return Response(found.content, headers=headers, media_type=found.media_type)


@cache
def _names() -> frozenset[str]:
    return frozenset(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())


@cache
def _read(name: str) -> _File:
    content = (STATIC / name).read_bytes()
    suffix = Path(name).suffix
    media_type = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    compressed = gzip.compress(content, mtime=0) if len(content) >= _LEAST_TO_COMPRESS else None
    # Weak: the same for the compressed content.
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, compressed, media_type, etag)
