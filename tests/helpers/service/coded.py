"""A task with codes for its labels, and a series for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from model_store.task import Code, LabelCodes, Normalisation, Task
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


def publish_coded(root: Path, publish: Any) -> None:
    """Publish `coded`, which marks what is brighter than 100, and `plain`, which has no codes."""
    publish(root, name="coded", task=CODED)
    publish(root, name="plain")


def coded_series(**values: Any) -> dict[str, bytes]:
    """A series of 9 axial slices, in `STUDY` and `SERIES` unless `values` say otherwise."""
    return series(VOLUME, **values)
