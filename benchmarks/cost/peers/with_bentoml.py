"""The network behind BentoML, in one worker with as many threads as its default has."""

from __future__ import annotations

import os
import runpy
import sys

import bentoml
from network import Network
from PIL import Image


@bentoml.service(logging={"access": {"enabled": False}})
class Segment:
    """POST /segment."""

    def __init__(self) -> None:
        self.network = Network()

    @bentoml.api(route="/segment")  # type: ignore[untyped-decorator]
    def segment(self, scan: Image.Image) -> Image.Image:
        """Answer with a mask."""
        found: Image.Image = self.network.mask(scan)
        return found


if __name__ == "__main__":
    serving = ["serve", "with_bentoml:Segment", "--host", "127.0.0.1", "--port", os.environ["PEER_PORT"]]
    sys.argv = ["bentoml", *serving]
    runpy.run_module("bentoml", run_name="__main__")
