"""Clusters in a report: w as a heat map, and the synthetic images."""

from __future__ import annotations

import base64
import io
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from model_store.manifest import NetworkSpec
from model_store.task import Task
from tests.helpers.training.run_records import make_record
from training.algorithm import Memory, ModelDraft, Publication
from training.report import write_report

TASK = Task(name="shapes", kind="classification", class_names=("disc", "ring"), size=(8, 9))
MIXING = {
    "1": {"1": 0.62, "2": 0.0, "10": 0.38},
    "2": {"1": 0.02, "2": 0.87, "10": 0.11},
    "10": {"1": 0.0, "2": 0.0, "10": 1.0},
}
# Six images per row, with a white line to the right of and below each.
COLUMNS, GAP = 6, 1


def page(path: Path, images: dict[str, Tensor], task: Task = TASK) -> str:
    """The report of a run with these synthetic images, by cluster."""
    spec = NetworkSpec(name="resnet18", arguments={})
    publication = Publication(
        "clusters",
        tuple(ModelDraft("cluster", spec, {}, cluster=name) for name in MIXING),
        composite={
            "assignment": {"elm": "1", "fir": "2", "larch": "10"},
            "mixing": MIXING,
            "silhouettes": {"2": 0.1, "3": 0.4},
        },
        exhibits=Memory(images, {"log": [{"step": 1, "cross_entropy": 2.0}]}),
    )
    record = make_record(task=task, method="fedbicross")
    return write_report(record, path / "report.html", publication).read_text(encoding="utf-8")


def sheet(text: str, cluster: str) -> NDArray[np.uint8]:
    """The sheet of a cluster's synthetic images, [H, W] or [H, W, 3]."""
    (source,) = re.findall(rf'alt="synthetic images of cluster {cluster}" src="([^"]+)"', text)
    start, content = source.split(",")
    assert start == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def tiles(picture: NDArray[np.uint8], height: int, width: int) -> list[NDArray[np.uint8]]:
    """The tiles for images, row by row; the gaps between them are white."""
    rows, columns = picture.shape[0] // (height + GAP), picture.shape[1] // (width + GAP)
    assert (rows * (height + GAP), columns * (width + GAP)) == picture.shape[:2]
    assert columns == COLUMNS
    cells = picture.reshape(rows, height + GAP, columns, width + GAP, -1)
    assert (cells[:, height:] == 255).all()
    assert (cells[:, :, :, width:] == 255).all()
    inner = cells[:, :height, :, :width]
    return [inner[r, :, c] for r in range(rows) for c in range(columns)]


def drawn(count: int, channels: int = 1, seed: int = 0) -> Tensor:
    """[N, C, 8, 9]; every image has its own brightness and contrast."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, channels, 8, 9, generator=generator)
    powers = torch.arange(count).view(-1, 1, 1, 1)
    return noise * 3.0 ** (powers - 2) + 5 * powers - 7


def whole_range(image_CHW: Tensor) -> NDArray[np.uint8]:
    """[H, W, C], computed pixel by pixel: the lowest value becomes 0, the highest 255."""
    values = image_CHW.tolist()
    flat = [v for channel in values for row in channel for v in row]
    low, high = min(flat), max(flat)
    grey = [[[round((v - low) / (high - low) * 255) for v in row] for row in channel] for channel in values]
    return np.array(grey, np.uint8).transpose(1, 2, 0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    images = {"1": drawn(8), "2": drawn(6, seed=1), "10": torch.full((1, 1, 8, 9), 3.5)}
    return page(tmp_path_factory.mktemp("report"), images)


def test_mixing_cell_is_darker_for_a_larger_share(text: str) -> None:
    table = text.split("was distilled</h2>")[1].split("</table>")[0]
    assert re.findall(r"<th class=\"n\">cluster (\w+)", table) == list(MIXING)
    assert re.findall(r"<b>cluster (\w+)", table) == list(MIXING)
    cells = re.findall(r'background:rgba\(31,111,139,([\d.]+)\)">([^<]+)<', table)
    values = [value for row in MIXING.values() for value in row.values()]
    assert [float(shown) for _, shown in cells] == pytest.approx(values, abs=6e-4)
    found = sorted({(value, float(shade)) for value, (shade, _) in zip(values, cells, strict=True)})
    assert all(w < more and shade < darker for (w, shade), (more, darker) in pairwise(found)), found
    # A share of 0 is white; a share of 1 is dark, but its figure stays readable.
    (_, least), *_, (_, greatest) = found
    assert least == 0
    assert 0.5 < greatest < 1


def test_synthetic_images_are_each_scaled_to_the_full_grey_range(text: str) -> None:
    for cluster, images in (("1", drawn(8)), ("2", drawn(6, seed=1))):
        picture = sheet(text, cluster)
        assert picture.ndim == 2
        found = tiles(picture, 8, 9)
        assert len(found) == -(-len(images) // COLUMNS) * COLUMNS
        for tile, image in zip(found, images, strict=False):
            np.testing.assert_array_equal(tile, whole_range(image))
            assert (tile.min(), tile.max()) == (0, 255)
        assert all((rest == 255).all() for rest in found[len(images) :])


def test_synthetic_image_without_contrast_is_shown_black(text: str) -> None:
    first, *rest = tiles(sheet(text, "10"), 8, 9)
    assert (first == 0).all()
    assert all((tile == 255).all() for tile in rest)


@pytest.mark.parametrize(
    ("channels", "neighbours", "shown"),
    [(3, 0, [0, 1, 2]), (1, 1, [1]), (1, 2, [2]), (3, 1, [3, 4, 5])],
    ids=["colour", "grey slices", "five grey slices", "colour slices"],
)
def test_colour_images_keep_colour_and_neighbour_stacks_show_the_middle(
    tmp_path: Path, channels: int, neighbours: int, shown: list[int]
) -> None:
    task = TASK.model_copy(update={"channels": channels, "neighbours": neighbours})
    images = drawn(3, task.in_channels)
    picture = sheet(page(tmp_path, dict.fromkeys(MIXING, images), task), "1")
    assert picture.ndim == (3 if channels == 3 else 2)
    found = tiles(picture, 8, 9)
    assert len(found) == COLUMNS
    for tile, image in zip(found, images, strict=False):
        np.testing.assert_array_equal(tile, whole_range(image[shown]))
    assert all((rest == 255).all() for rest in found[3:])


def test_report_has_sheets_of_all_clusters_curves_and_silhouettes(text: str) -> None:
    assert re.findall(r'alt="synthetic images of cluster (\w+)"', text) == list(MIXING)
    assert "Cross-entropy of the images" in text
    assert "Distillation loss" not in text
    silhouettes = re.search(r"number of clusters:\s*([^<]*?)\.</p>", text)
    assert silhouettes is not None
    assert "2: 0.1" in silhouettes[1]
    assert "3: 0.4" in silhouettes[1]
