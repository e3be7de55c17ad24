"""The network behind plain FastAPI."""

from __future__ import annotations

import os

import uvicorn
from fastapi import FastAPI, File, Response
from network import Network

app, network = FastAPI(), Network()


@app.post("/segment")
def segment(scan: bytes = File()) -> Response:
    """Answer with a mask."""
    return Response(network.segment(scan), media_type="image/png")


if __name__ == "__main__":
    port = int(os.environ["PEER_PORT"])
    uvicorn.run(app, host="127.0.0.1", port=port, access_log=False, log_level="warning")
