"""What the explanation of FedOAP and the service's warning say of real images is what the results say."""

from __future__ import annotations

import re
from pathlib import Path

from service.kinds import KINDS

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = (DOCS / "results/paper-fedoap.cpu.md").read_text(encoding="utf-8")
SAID = (DOCS / "explanation/fedoap.md").read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """Every table as its lines of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    found = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in b.splitlines()] for b in blocks
    ]
    return [[lines[0], *lines[2:]] for lines in found]


def test_every_row_of_the_explanation_is_the_results() -> None:
    (said,) = (table for table in tables(SAID) if table[0] == ["arm", "Dice"])
    header, *rows = tables(RESULTS.partition("## Comparison")[2])[0]
    column = header.index("Dice")
    results = {row[0]: row[column].partition(" ")[0] for row in rows}
    assert len(said) == 6
    for arm, dice in said[1:]:
        assert results[arm] == dice


def test_the_warning_has_the_zero_shot_dice_of_the_explanation() -> None:
    warning = KINDS["cross-attention"].warnings["global"]["zero-shot"]
    own = re.search(r"Locum's own benchmark ([\d.]+) and ([\d.]+)\)", warning)
    said = re.search(
        r"Zero-shot has a Dice of ([\d.]+) on contrast-enhanced brain MRI and of ([\d.]+) on breast", SAID
    )
    assert own is not None
    assert said is not None
    assert own.groups() == said.groups()
