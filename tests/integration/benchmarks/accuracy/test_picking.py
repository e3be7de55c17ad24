from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.picking.arms import STRANGERS, compute
from benchmarks.accuracy.picking.report import CHANCE, HINDSIGHT, regrets, sections
from personalization.options.picking import CRITERIA

TINY = {"width": 1, "local_epochs": 1, "epochs": 1, "steps": 3, "synthesis_batch": 6, "personal_epochs": 0}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    training = {**TINY, "clusters": 2}
    cell = {"outside": "maple", "seed": 0, "images": 12, "cohort": 6, "training": training}
    work: Path = tmp_path_factory.mktemp("work")
    return {"cell": cell, "result": compute(cell, work)}


def test_every_outside_hospital_is_compared_by_everything(row: dict[str, Any]) -> None:
    hospitals = row["result"]["hospitals"]
    assert list(hospitals) == ["maple", *STRANGERS]
    assert "maple" not in row["result"]["assignment"]
    for found in hospitals.values():
        assert set(found["costs"]) == set(found["stability"]) == set(CRITERIA)
        assert {*found["accuracies"]} == {"1", "2"}


def test_what_a_pick_loses_is_against_the_best_cluster() -> None:
    found = {"accuracies": {"1": 0.5, "2": 0.9}, "costs": {"entropy": {"1": 0.1, "2": 0.2}}}
    (lost,) = regrets({"result": {"hospitals": {"oak": found}}})
    assert lost == {"entropy": pytest.approx([0.4]), CHANCE: pytest.approx([0.4, 0]), HINDSIGHT: [0.9]}


def test_chance_meets_the_best_of_two_clusters_half_the_time() -> None:
    found = {"accuracies": {"1": 0.5, "2": 0.9}, "stability": dict.fromkeys(CRITERIA, 1.0)}
    found["costs"] = {criterion: {"1": 0.1, "2": 0.2} for criterion in CRITERIA}
    text = "\n".join(
        sections([{"result": {"assignment": {"a": "1", "b": "2"}, "hospitals": {"oak": found}}}])
    )
    [chance] = [line for line in text.splitlines() if line.startswith(f"| {CHANCE}")]
    assert [cell.strip() for cell in chance.split("|")[2:-1]] == ["0.200", "0.400", "50%"]


def test_the_page_has_a_line_for_each_criterion(row: dict[str, Any]) -> None:
    text = "\n".join(sections([row]))
    assert all(f"\n| {criterion}" in text for criterion in (*CRITERIA, CHANCE))
    assert "flatters both" in text
