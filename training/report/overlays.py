"""Write a site's overlay page: its validation patients with true and predicted outlines, for that site alone.

The page is made from the site's own data, in the site's own process, and is stored in the site's own folder.
No part of it goes into the report, the record or an artefact.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.durable import write_durably
from model_store.task import Task
from training.local.data import Answers, Data, Examples
from training.report.page import environment

OVERLAYS_FILE = "overlays.html"

TRUTH, PREDICTED = (64, 224, 208), (255, 140, 60)
_SIDE = 288  # pixels of a picture's longer side
_PATIENTS = 24


@dataclass(frozen=True)
class _Picture:
    caption: str
    dice: float | None
    source: str


def write_overlays(
    folder: Path,
    site: str,
    task: Task,
    examples: Data,
    answers: Mapping[str, Answers],
    attention: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Write `folder`/overlays.html: for every patient the slice with the most foreground, once per model.

    `answers` maps a model's name to what it answers to `examples`, which are of a dense kind, and `attention`
    to its share on each source, if it has attention. Returns the page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    slices, predictions = examples.pictured(answers)
    dice = {model: _overlaps(examples, answer) for model, answer in answers.items()}
    rows = []
    for patient in list(dict.fromkeys(slices.patients))[:_PATIENTS]:
        own = [index for index, name in enumerate(slices.patients) if name == patient]
        shown = max(own, key=lambda index: int((slices.targets[index] > 0).sum()))
        pictures = [
            _Picture(model, dice[model][patient], _overlay(slices, task, shown, predicted))
            for model, predicted in predictions.items()
        ]
        rows.append({"patient": patient, "slice": slices.positions[shown] + 1, "pictures": pictures})
    page = (
        environment()
        .get_template("overlays.html")
        .render(
            site=site,
            task=task,
            rows=rows,
            attention=attention or {},
            left_out=len(set(slices.patients)) - len(rows),
            truth="rgb" + str(TRUTH),
            predicted="rgb" + str(PREDICTED),
        )
    )
    path = folder / OVERLAYS_FILE
    write_durably(path, page.encode())
    return path


def _overlaps(examples: Data, answers: Answers) -> dict[str, float | None]:
    """Dice of the whole foreground of every patient; None where neither answer nor truth has any."""
    found: dict[str, float | None] = {}
    for predicted, truth, patients in examples.beside_truth(answers):
        a, b = predicted > 0, truth > 0
        for patient in dict.fromkeys(patients):
            own = [index for index, name in enumerate(patients) if name == patient]
            total = int(a[own].sum()) + int(b[own].sum())
            found[patient] = 2 * int((a[own] & b[own]).sum()) / total if total else None
    return found


def _overlay(slices: Examples, task: Task, index: int, predicted: NDArray[np.uint8]) -> str:
    """Draw a slice with the outlines of every class, as a data URL."""
    # The slice itself, without its neighbouring slices.
    middle = slices.images[index][task.channel_count * task.neighbours :][: task.channel_count]
    low, high = np.percentile(middle, (1, 99))
    scaled = np.clip((middle - low) / max(float(high - low), 1e-6), 0, 1) * 255
    pixels = scaled.astype(np.uint8).transpose(1, 2, 0)
    # Three channels of a picture are its colours; of sequences, the first one is shown.
    image = Image.fromarray(pixels if task.channels == 3 else np.repeat(pixels[..., :1], 3, axis=2))
    factor = max(1, round(_SIDE / max(image.size)))
    size = image.width * factor, image.height * factor
    canvas = np.array(image.resize(size, Image.Resampling.BICUBIC))
    for classes, colour in ((slices.targets[index], TRUTH), (predicted[index], PREDICTED)):
        canvas[_outline(np.asarray(Image.fromarray(classes).resize(size, Image.Resampling.NEAREST)))] = colour
    content = io.BytesIO()
    Image.fromarray(canvas).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _outline(classes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Find the foreground pixels [H, W] with a neighbour of another class."""
    padded = np.pad(classes, 1, mode="edge")
    around = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    differs = np.logical_or.reduce([neighbour != classes for neighbour in around])
    return np.asarray(differs & (classes > 0), dtype=np.bool_)
