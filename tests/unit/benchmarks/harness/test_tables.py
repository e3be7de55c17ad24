from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.harness.tables import mean_and_spread, table, write_page


def test_mean_and_spread() -> None:
    assert mean_and_spread([0.7, 0.8, math.nan]) == "0.750 ± 0.071"
    assert mean_and_spread([0.7]) == "0.700"
    assert mean_and_spread([math.nan]) == "–"


def test_table_is_markdown_that_reads_raw() -> None:
    assert table(("site", "Dice"), [("CS", "0.7 ± 0.1"), ("a|b", 1)]) == (
        "| site |      Dice |\n| :--- | --------: |\n| CS   | 0.7 ± 0.1 |\n| a\\|b |         1 |"
    )
    with pytest.raises(ValueError, match="expected 2 columns, found 1"):
        table(("a", "b"), [("1",)])


def test_page_names_command_and_rows(tmp_path: Path) -> None:
    page = tmp_path / "results" / "toy.md"
    write_page(page, "Toy", "python -m toy", tmp_path / "toy.jsonl", ["one", "two"])
    assert page.read_text(encoding="utf-8") == (
        "# Toy\n\n```bash\npython -m toy\n```\n\n"
        "One row per finished cell: [toy.jsonl](toy.jsonl).\n\none\n\ntwo\n"
    )
    assert list(page.parent.iterdir()) == [page]
