"""An S3 server on loopback, with conditional writes: moto's, which keeps objects in memory and checks no
signature; with LOCUM_TEST_S3=ceph, Ceph's gateway."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import boto3
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from tests.helpers.model_store.ceph import ceph_gateway

_KEY, _SECRET = "test", "secret"


@contextmanager
def s3_server() -> Iterator[str]:
    """Start a server, name it to this process and its children by the environment, and give its URL."""
    with _ceph() if os.environ.get("LOCUM_TEST_S3") == "ceph" else _moto() as url:
        settings = {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
        }
        with patch.dict(os.environ, settings):
            yield url


@contextmanager
def _moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with _one_put_at_a_time():
            yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def _one_put_at_a_time() -> Iterator[None]:
    """Make conditional writes atomic: moto looks for the object and writes it in two steps."""
    lock, put = threading.Lock(), S3Response.put_object

    def alone(self: S3Response) -> Any:
        with lock:
            return put(self)

    with patch.object(S3Response, "put_object", alone):
        yield


@contextmanager
def _ceph() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, ceph_gateway(Path(folder), _KEY, _SECRET) as url:
        yield url


def make_bucket(url: str) -> str:
    """Make a bucket on the server, and return its name."""
    name = f"test-{uuid4().hex}"
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=name)
    return name
