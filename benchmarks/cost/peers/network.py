"""What every peer's program does with a scan: decode a PNG, run the graph, encode the mask."""

from __future__ import annotations

import io
import os

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image


class Network:
    """The graph `PEER_GRAPH`, by `PEER_THREADS` threads a run."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["PEER_THREADS"])
        # As in the service: threads that spin between runs take the cores from the others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = os.environ["PEER_GRAPH"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def mask(self, image: Image.Image) -> Image.Image:
        """The mask of an image, normalised as the service does."""
        pixels = np.asarray(image.convert("L"), np.float32)
        pixels = (pixels - pixels.mean()) / pixels.std()
        (found,) = self._session.run(["probabilities"], {"image": pixels[None, None]})
        classes: NDArray[np.uint8] = np.asarray(found)[0].argmax(axis=0).astype(np.uint8)
        return Image.fromarray(classes)

    def segment(self, content: bytes) -> bytes:
        """A PNG in, a PNG out."""
        out = io.BytesIO()
        self.mask(Image.open(io.BytesIO(content))).save(out, "PNG")
        return out.getvalue()
