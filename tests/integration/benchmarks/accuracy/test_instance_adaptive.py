from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.accuracy.instance_adaptive import arms as instance_arms
from benchmarks.accuracy.instance_adaptive.arms import (
    CLASSIFYING,
    SEGMENTING,
    STYLES,
    compute,
    styled,
    unpacked,
)
from benchmarks.accuracy.instance_adaptive.experiment import PROFILES, cells_of
from benchmarks.accuracy.instance_adaptive.report import sections
from benchmarks.harness.cells import Rows, run
from model_store.task import Task
from training.data.classification import ImageSet

PICTURES = Task(name="dots", kind="classification", class_names=("one", "two"), size=(28, 28))
SQUARES = Task(name="squares", labels={"square": (1,)}, size=(32, 32))
SETTINGS = replace(PROFILES["smoke"], clients=2, sets=(("dots",), ("squares",)))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures of one or two bright dots as an .npz, and two sites with squares."""
    root, draw = tmp_path / "data", np.random.default_rng(0)
    (root / "medmnist_npz").mkdir(parents=True)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 60), ("val", 12), ("test", 24)):
        labels = draw.integers(0, 2, (count, 1)).astype(np.uint8)
        images = draw.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[:, 5:11, 5:11] += 150
        images[labels[:, 0] == 1, 18:24, 18:24] += 150
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    np.savez(root / "medmnist_npz" / "dots.npz", **arrays)
    for site in ("east", "west"):
        for name in ("images", "masks"):
            (root / "squares" / site / name).mkdir(parents=True)
        for patient in range(5):
            mask = np.zeros((32, 32), np.uint8)
            row, column = draw.integers(2, 16, size=2)
            mask[row : row + 10, column : column + 10] = 1
            image = (draw.integers(0, 60, mask.shape) + 120 * mask).astype(np.uint8)
            Image.fromarray(image).save(root / "squares" / site / "images" / f"{patient}.png")
            Image.fromarray(mask).save(root / "squares" / site / "masks" / f"{patient}.png")
    monkeypatch.setattr(instance_arms, "template", {"dots": PICTURES, "squares": SQUARES}.__getitem__)
    return root


def test_every_arm_of_both_parts_answers_the_same_images(data: Path, tmp_path: Path) -> None:
    cells, rows = cells_of("toy", SETTINGS), Rows(tmp_path / "rows.jsonl")
    assert [cell["part"] for cell in cells] == ["classification", "segmentation"]
    finished = run("toy", cells, rows, partial(compute, data, "cpu"), tmp_path / "work")
    classified, segmented = finished
    for row, arms in ((classified, CLASSIFYING), (segmented, SEGMENTING)):
        answers = unpacked(row["result"])
        assert tuple(answers) == arms
        units = {arm: {site: list(found) for site, found in sites.items()} for arm, sites in answers.items()}
        assert all(found == units[arms[0]] for found in units.values())
        assert all(0 <= v <= 1 for sites in answers.values() for s in sites.values() for v in s.values())
        assert row["result"]["keys"]["single SSF"]["entropy"] == 0
    assert set(classified["result"]["answers"]["FedAvg"]) == {"client-1", "client-2"}
    text = "\n".join(sections(finished, cells))
    assert "2 of 2 cells are finished." in text
    assert "pool: entries 3, top 3, key_weight 0.1, local_epochs 1, batch_size 32" in text
    assert "learning_rate 0.001" in text
    for arm in (*CLASSIFYING, *SEGMENTING):
        assert f"| {arm} " in text


def test_styles_are_mixed_within_a_client() -> None:
    images = np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32)
    names = tuple(map(str, range(40)))
    plain = ImageSet(images, np.zeros(40, np.int64), names, names, (0,) * 40)
    mixed, chosen = styled(plain, 4, torch.Generator().manual_seed(0))
    assert {*chosen.tolist()} == {0, 1, 2, 3}
    for image, changed, style in zip(images, mixed.images, chosen, strict=True):
        expected = STYLES[style](torch.from_numpy(image[None].copy()))[0].numpy()
        np.testing.assert_array_equal(changed, expected)
    np.testing.assert_array_equal(styled(plain, 1, torch.Generator())[0].images, images)
