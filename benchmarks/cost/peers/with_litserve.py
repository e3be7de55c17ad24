"""The network behind LitServe, with a worker per core."""

from __future__ import annotations

import os

import litserve
from fastapi import Response
from network import Network


class Segment(litserve.LitAPI):  # type: ignore[misc]
    """POST /segment."""

    def setup(self, device: str) -> None:  # noqa: ARG002
        """Load the network, once in each worker."""
        self.network = Network()

    # LitServe reads the annotation: without one it passes the form.
    def decode_request(self, request) -> bytes:  # type: ignore[no-untyped-def]
        """The file `scan` of the form."""
        content: bytes = request["scan"].file.read()
        return content

    def predict(self, content: bytes) -> bytes:
        """The mask."""
        found: bytes = self.network.segment(content)
        return found

    def encode_response(self, output: bytes) -> Response:
        """The mask as it is."""
        return Response(output, media_type="image/png")


if __name__ == "__main__":
    server = litserve.LitServer(
        Segment(api_path="/segment"), accelerator="cpu", workers_per_device=os.cpu_count() or 1
    )
    port = int(os.environ["PEER_PORT"])
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)
