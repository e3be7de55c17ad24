"""Dice of masks by SimpleITK, in a process that has nothing of Locum."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The mean over the pairs of files of the mean over the labels of the truth.
_SCRIPT = """
import sys
import SimpleITK as sitk
dices = []
for found, truth in zip(sys.argv[1::2], sys.argv[2::2]):
    measure = sitk.LabelOverlapMeasuresImageFilter()
    truth = sitk.ReadImage(truth, sitk.sitkUInt8)
    found = sitk.ReadImage(found, sitk.sitkUInt8)
    found.CopyInformation(truth)
    measure.Execute(truth, found)
    labels = set(int(each) for each in sitk.GetArrayViewFromImage(truth).ravel()) - {0}
    dices.append(sum(measure.GetDiceCoefficient(label) for label in labels) / len(labels))
assert "model_store" not in sys.modules
print(sum(dices) / len(dices))
"""


def mean_dice(folder: Path, pairs: Sequence[tuple[bytes, bytes]]) -> float:
    """The mean over patients of one scan each: files (NIfTI, compressed or not) of answer and mask."""
    names = []
    for number, pair in enumerate(pairs):
        for name, content in zip(("found", "truth"), pair, strict=True):
            suffix = ".nii.gz" if content[:2] == b"\x1f\x8b" else ".nii"
            path = folder / f"{number}-{name}{suffix}"
            path.write_bytes(content)
            names.append(str(path))
    said = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *names], capture_output=True, text=True, check=False
    )
    assert not said.returncode, said.stderr
    return float(said.stdout)
