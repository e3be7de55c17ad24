"""A task with codes for its labels, and a series for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from model_store.task import Code, LabelCodes, Normalisation, Task
from service.prediction.receipt import ModelReceipt, Receipt
from tests.helpers.model_store.dicom_files import series, uid

CODES = LabelCodes(
    category=Code(value="91723000", meaning="Anatomical Structure"),
    type=Code(value="10200004", meaning="Liver"),
)
CODED = Task(
    name="coded",
    labels={"bright": (1,)},
    normalisation=Normalisation(method="none"),
    size=(32, 32),
    colour="luminance",
    codes={"bright": CODES},
)
STUDY, SERIES = uid("study"), uid("series")
VOLUME = np.random.default_rng(3).integers(0, 200, (9, 32, 32)).astype(np.int16)


MODEL = ModelReceipt(name="coded@1", digest="sha256:" + "1" * 64)
RECEIPT = Receipt(
    request="1",
    input_sha256="sha256:" + "2" * 64,
    input_bytes=1,
    model=MODEL,
    network=MODEL,
    graph="sha256:" + "3" * 64,
    personalization="global",
    site=None,
    cluster=None,
    why="asked for",
    options={"model": "coded", "uncertainty": False},
    provider="CPUExecutionProvider",
    onnxruntime="1.24.1",
    locum="1.0",
    machine="x86_64",
)


def publish_coded(root: Path, publish: Any) -> None:
    """Publish `coded`, which marks what is brighter than 100, and `plain`, which has no codes."""
    publish(root, name="coded", task=CODED)
    publish(root, name="plain")


def coded_series(**values: Any) -> dict[str, bytes]:
    """A series of 9 axial slices, in `STUDY` and `SERIES` unless `values` say otherwise."""
    return series(VOLUME, **values)
