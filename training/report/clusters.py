"""The report's section on clusters: members, mixing weights w as a heat map, losses, synthetic images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from training.algorithm import Publication
from training.record import RunRecord
from training.report.charts import Line, colour_of, line_chart

# Chart titles of the losses.
_LOSSES = {
    "distillation": "Distillation loss",
    "validation": "Validation loss at outer steps",
    "cross_entropy": "Cross-entropy of the images",
    "batch_norm": "Distance from the batch-norm statistics",
}
_COLUMNS = 6
_GAP = 1


def content(record: RunRecord, publication: Publication | None) -> dict[str, Any] | None:
    """Collect the variables of `clusters.html` from a publication of kind `clusters`; None without one."""
    if publication is None:
        return None
    colours = record.task.channel_count
    composite, exhibits = publication.composite, publication.exhibits
    drafts = {draft.cluster: draft for draft in publication.models if draft.cluster is not None}
    names = list(composite["mixing"])
    return {
        "names": names,
        "rows": [
            {
                "name": name,
                "sites": [site for site, found in composite["assignment"].items() if found == name],
                "accuracy": drafts[name].metrics.get("val_accuracy"),
                "count": drafts[name].metrics.get("val_n"),
                "balanced": drafts[name].metrics.get("val_balanced_accuracy"),
            }
            for name in names
        ],
        "silhouettes": composite["silhouettes"],
        "mixing": [(name, _cells(composite["mixing"][name])) for name in names],
        "even": 1 / len(names),
        "charts": _charts(exhibits.facts["log"]),
        "sheets": [{"name": name, "source": _sheet(exhibits.tensors[name], colours)} for name in names],
    }


def _cells(row: Mapping[str, float]) -> list[dict[str, float]]:
    # At full strength the numbers in the cell would be unreadable.
    return [{"value": value, "shade": round(0.75 * value, 3)} for value in row.values()]


def _charts(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    charts = []
    for index, (loss, title) in enumerate(_LOSSES.items()):
        points = [(entry["step"], entry[loss]) for entry in log if loss in entry]
        if points:
            # The SVG is drawn here and holds only numbers.
            svg = Markup(line_chart({title: Line(points, colour_of(index))}, along="step"))
            charts.append({"title": title, "svg": svg})
    return charts


def _sheet(images_NCHW: Tensor, colours: int) -> str:
    """Tile images, each scaled from its minimum to its maximum, as a data URL."""
    images = images_NCHW.double().numpy()
    # The middle one of the neighbouring slices.
    first = (images.shape[1] - colours) // 2
    shown = images[:, first : first + colours].transpose(0, 2, 3, 1)
    count, height, width, _ = shown.shape
    rows = -(-count // _COLUMNS)
    canvas = np.full((rows * (height + _GAP), _COLUMNS * (width + _GAP), colours), 255, np.uint8)
    for index, image in enumerate(shown):
        span = max(float(image.max() - image.min()), 1e-6)
        top, left = index // _COLUMNS * (height + _GAP), index % _COLUMNS * (width + _GAP)
        canvas[top : top + height, left : left + width] = np.rint((image - image.min()) / span * 255)
    content = io.BytesIO()
    Image.fromarray(canvas if colours == 3 else canvas[..., 0]).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
