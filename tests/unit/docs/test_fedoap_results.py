"""What the explanation of FedOAP and the service's warning say of real images is what the results say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.kinds import KINDS

DOCS = Path(__file__).parents[3] / "docs"
# In the order of their tables in the explanation.
RESULTS = [
    (DOCS / f"results/cross_organ.{profile}.md").read_text(encoding="utf-8") for profile in ("cpu", "longer")
]
SAID = (DOCS / "explanation/fedoap.md").read_text(encoding="utf-8")
# An arm as the explanation calls it.
NAMES = {
    "each site alone": "local-only",
    "FedAvg, then fine-tuned": "FedAvg + fine-tuning",
    "without query stage, attention and bank": "without query stage, attention and bank",
    "without perturbed loss": "without PBL",
}


def tables(text: str) -> list[dict[str, list[str]]]:
    """Every table as its first column -> the others' cells."""
    found: list[dict[str, list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append({line[0]: line[1:] for line in lines[2:]})
    return found


def means(cells: list[str]) -> list[str]:
    return [cell.partition(" ")[0] for cell in cells]


def test_every_row_of_the_explanation_is_the_results() -> None:
    tables_said = [table for table in tables(SAID) if "each site alone" in table]
    for said, results in zip(tables_said, RESULTS, strict=True):
        inside = tables(results.partition("## Inside")[2])[0]
        shown = {arm: means(inside[NAMES.get(arm, arm)]) for arm in said}
        assert said == shown
        assert len(said) == len(inside) == 11


@pytest.mark.parametrize("section", ["### brain_mri_t1ce", "### breast_dce_mri"])
def test_the_warning_has_the_zero_shot_dice_of_the_results(section: str) -> None:
    zero_shot = tables(RESULTS[0].partition(section)[2])[0]["FedOAP"][0]
    warning = KINDS["cross-attention"].warnings["global"]["zero-shot"]
    own = re.search(r"Locum's own benchmark ([\d.]+) and ([\d.]+)\)", warning)
    assert own is not None
    expected = own[1] if section.endswith("t1ce") else own[2]
    assert f"{float(means([zero_shot])[0]):.2f}" == expected
