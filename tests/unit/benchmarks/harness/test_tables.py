from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.harness.tables import mean_and_spread, paired_bootstrap, table, write_page


def test_bootstrap_agrees_with_scipy() -> None:
    generator = np.random.default_rng(0)
    first = dict(enumerate(generator.normal(0.75, 0.1, 40)))
    second = {k: v - generator.normal(0.02, 0.05) for k, v in first.items()}
    found = paired_bootstrap(first, second, draws=40_000)
    differences = np.array([first[k] - second[k] for k in first])
    reference = stats.bootstrap(
        (differences,), np.mean, method="percentile", n_resamples=40_000, rng=generator
    )
    assert found.mean == pytest.approx(differences.mean())
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=0.001)
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=0.001)
    assert found.count == 40


def test_bootstrap_draws_within_strata() -> None:
    # Between the sites the difference varies, within each it does not: no uncertainty is left.
    first = {"a": 0.9, "b": 0.9, "c": 0.5}
    second = {"a": 0.8, "b": 0.8, "c": 0.9}
    sites = {"a": "CS", "b": "CS", "c": "DU"}
    found = paired_bootstrap(first, second, sites)
    assert (found.low, found.high) == pytest.approx((found.mean, found.mean))
    assert found.mean == pytest.approx((0.1 + 0.1 - 0.4) / 3)
    assert paired_bootstrap(first, second).high > 0.05


def test_bootstrap_pairs_by_unit_and_leaves_out_nan() -> None:
    first = {"a": 1.0, "b": math.nan, "c": 0.5, "only": 0.0}
    second = {"c": 0.4, "b": 0.0, "a": 0.8}
    found = paired_bootstrap(first, second)
    assert found.count == 2
    assert found.mean == pytest.approx(0.15)
    with pytest.raises(ValueError, match="nothing to compare"):
        paired_bootstrap({"a": 1.0}, {"b": 1.0})


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
