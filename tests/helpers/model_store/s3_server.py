"""An S3 server on loopback, with conditional writes: moto's, which keeps objects in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen
from uuid import uuid4

from moto.server import ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[str]:
    """Start a server, name it to this process and its children by the environment, and give its URL."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    try:
        with patch.dict(os.environ, settings):
            yield url
    finally:
        server.stop()


def make_bucket(url: str) -> str:
    """Make a bucket on the server, and return its name."""
    name = f"test-{uuid4().hex}"
    with urlopen(Request(f"{url}/{name}", method="PUT"), timeout=10) as answer:
        assert answer.status == 200
    return name
