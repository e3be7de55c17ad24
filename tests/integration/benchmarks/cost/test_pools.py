from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost.methods.experiment import shown
from benchmarks.cost.methods.pools import POOLS, SIZES, adaptive, cells, compute, multiply_adds


def test_the_floor_of_a_unet_is_its_encoder_and_of_a_vit_nearly_a_second_pass() -> None:
    backbones, *_ = SIZES["smoke"]
    for label, size in (("U-Net 2", 32), ("ViT 16", 16)):
        network = adaptive(backbones[label], 3, 2).backbone
        asked, passed = multiply_adds(network, size)
        if label == "U-Net 2":
            # Convolutions 3x3 of the five encoder blocks, counted by hand; widths 2, 4, 8, 16, 32.
            blocks = [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32)]
            by_hand = sum(
                9 * (size >> level) ** 2 * (source * width + width * width)
                for level, (source, width) in enumerate(blocks)
            )
            assert asked == by_hand
            assert asked < passed
        else:
            # Five tokens of width 16, of which the last block updates one; and the head is left out.
            token = 5 * 16 * 2 + 16 * 16 + 2 * 16 * 64
            assert asked == passed - 4 * token - 16 * 10


@pytest.mark.parametrize("number", [0, 1])
def test_a_cell(number: int, tmp_path: Path) -> None:
    cell = cells("smoke")[number]
    result = compute(cell, tmp_path / "work")
    assert result["graph_bytes"]["pool"] > result["graph_bytes"]["plain"]
    assert 1 < result["floor"] <= 2
    assert result["peak_bytes"]["method"] > 0
    page = "\n".join(shown(POOLS, [{"cell": cell, "result": result}]))
    assert cell["label"] in page
    assert f"sends {100 * result['exchanged'] / result['full']:.1f} % of the weights" in page
