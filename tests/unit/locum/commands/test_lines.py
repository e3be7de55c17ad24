"""The line of a scan that was segmented, with its warnings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from rich.text import Text

from locum.commands.batch import Found, _Done, _volumes

WARNINGS = ("zero-shot: Do not rely on this mask.", "guard: far [from] training", "files-ignored: 2 of 9")


@pytest.mark.parametrize("count", range(4))
def test_scan_has_one_line_and_each_of_several_warnings_a_line_below(count: int) -> None:
    report: Any = Namespace(
        labels={"organ": Namespace(voxels=9, volume_ml=1.5)},
        receipt=Namespace(network=Namespace(name="organ@1")),
        warnings=WARNINGS[:count],
    )
    line, *below = Text.from_markup(_volumes(_Done(Found(Path("a.nii"), "a.nii"), report))).plain.split("\n")
    assert line.startswith("✓ a.nii  organ 1.50 mL  organ@1")
    said = [f"warning: {each}" for each in WARNINGS[:count]]
    assert below == ([f"    {each}" for each in said] if count > 1 else [])
    assert line.endswith(f"  {said[0]}" if count == 1 else "organ@1")
