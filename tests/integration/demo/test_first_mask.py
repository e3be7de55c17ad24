"""`locum demo` without torch: the carried store is served, and a scan from outside is fitted to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from locum.demo.body import SHAPE
from locum.demo.service_process import free_port
from model_store.scan import decode

ROOT = Path(__file__).parents[3]
# What locum-serve does not bring. A name that stands for None is not found.
ABSENT = ("torch", "monai", "safetensors", "sklearn", "matplotlib", "training", "service.worker")


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python, and of all that it starts, that has what locum-serve brings."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}


def locum_demo(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "locum", "demo", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_demo_without_torch_shows_a_scan_before_and_after_it_is_fitted(
    without_torch: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "demo"

    done = locum_demo(without_torch, "--once", "--folder", str(folder), "--port", str(free_port()))

    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    pattern = r"^(member|before|fitted|undone)\S*.*: Dice liver ([01]\.\d\d), lesion ([01]\.\d\d)$"
    scores = {name: (float(liver), float(lesion)) for name, liver, lesion in re.findall(pattern, said, re.M)}
    assert min(scores["member"]) > 0.8
    # The inverted scan is beyond the model; the lens of it brings it back, and is kept nowhere.
    assert scores["before"][0] < 0.5
    assert scores["fitted"][0] > scores["before"][0] + 0.3
    assert scores["undone"] == scores["before"]
    far = {name: float(shift) for name, shift in re.findall(r"^(\w+): squared distance ([\d.]+)", said, re.M)}
    assert far["aster"] < 3 < 10 < far["heath"]
    assert len(re.findall(r"where 1 is usual; it looks inverted$", said, re.M)) == 1
    pictures, masks = (re.findall(rf"^  {what} +(\S+)$", said, re.M) for what in ("picture", "mask"))
    assert len(pictures) == len(masks) == 4
    for picture in pictures:
        Image.open(picture).verify()
    before, fitted, undone = (Path(mask).read_bytes() for mask in masks[1:])
    assert before == undone != fitted
    assert decode(fitted).voxels.shape[:3] == SHAPE
    assert re.search(r"http://127\.0\.0\.1:\d+/#/look\?hospital=heath&model=abdomen&\S+scan=heath-1", said)


def test_training_demo_without_torch_says_what_to_install(without_torch: dict[str, str]) -> None:
    done = locum_demo(without_torch, "--train")

    assert done.returncode == 1
    assert re.fullmatch(r"--train needs torch, .*`pip install [^`]+`.*\n", done.stderr)
