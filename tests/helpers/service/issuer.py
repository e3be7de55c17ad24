"""An OpenID issuer on loopback: discovery and keys over HTTP, tokens signed on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

AUDIENCE = "locum"


class Issuer:
    """Its `url`, its keys by id, and how often each path was fetched.

    `status` other than 200 is what every path answers; `claimed` another issuer than the description claims;
    `more_keys` are in its set as they are. It hangs while `answering` is clear.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.keys: dict[str, RSAKey | ECKey] = {}
        self.fetched: Counter[str] = Counter()
        self.status = 200
        self.more_keys: list[object] = []
        self.answering = threading.Event()
        self.answering.set()
        self.claimed = self.url
        self.add("rsa-1")

    def add(self, kid: str, kind: str = "RSA") -> None:
        parameters = {"kid": kid, "use": "sig"}
        self.keys[kid] = (
            RSAKey.generate_key(2048, parameters)
            if kind == "RSA"
            else ECKey.generate_key("P-256", parameters)
        )

    def token(self, kid: str = "rsa-1", *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token of an operator of `north`; a claim of None is left out."""
        now = int(time.time())
        content = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "iat": now,
            "exp": now + 600,
            "locum_roles": ["operator"],
            "locum_hospitals": ["north"],
            **claims,
        }
        key = self.keys[kid]
        alg = "RS256" if isinstance(key, RSAKey) else "ES256"
        headers = {"alg": alg, "kid": kid, "typ": "at+jwt", **(header or {})}
        return jwt.encode(headers, {name: value for name, value in content.items() if value is not None}, key)

    def document(self, path: str) -> dict[str, Any] | None:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.claimed, "jwks_uri": f"{self.url}/jwks"}
        if path != "/jwks":
            return None
        return {"keys": [*self.more_keys, *(key.as_dict(private=False) for key in self.keys.values())]}


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """Serve an issuer on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.fetched[self.path] += 1
            issuer.answering.wait(60)
            document = issuer.document(self.path)
            self.send_response(issuer.status if document is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer = Issuer(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.answering.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
