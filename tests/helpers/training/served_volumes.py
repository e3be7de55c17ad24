"""The mask of a version of volumes, by the parts that the service uses: NumPy and onnxruntime."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.manifest import GRAPH
from model_store.preprocessing import VolumeRestorer, keep_largest, prepare_volume
from model_store.preprocessing.windows import slide
from model_store.scan import decode
from model_store.task import Task


def mask_of(artefact: Artefact[Any], path: Path, task: Task | None = None) -> NDArray[np.int64]:
    """Mask values [I, J, K] on the grid of a scan's file; of the classes' first values.

    `task` takes the place of the version's.
    """
    task = task or artefact.manifest.task
    geometry = task.geometry
    assert geometry is not None
    prepared = prepare_volume(decode(path.read_bytes()), task)
    session = onnxruntime.InferenceSession(artefact.read(GRAPH), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    output = "logits" if geometry.average == "logits" and "logits" in names else "probabilities"
    subsets = [
        subset
        for size in range(len(geometry.mirror) + 1)
        for subset in itertools.combinations(geometry.mirror, size)
    ]

    def predict(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        answers = []
        for subset in subsets:
            axes = tuple(axis + 1 for axis in subset)
            (found,) = session.run([output], {"image": np.ascontiguousarray(np.flip(patch, axes))[None]})
            answers.append(np.flip(found[0], axes))
        return np.asarray(sum(answers[1:], answers[0]) / len(answers), np.float32)

    restorer = VolumeRestorer(prepared.grid, task, kind="logits" if output == "logits" else "probabilities")
    for _, plane in slide(prepared.volume, geometry.patch, geometry.overlap, geometry.window, predict):
        restorer.add(plane)
    values = np.array([each.values[0] for each in task.classes])
    found = restorer.finish()
    keep_largest(found, task)
    return values[found]
