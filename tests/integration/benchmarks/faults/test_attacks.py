"""The attacks do what they say, and the page says what the rows do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.attacks import LIAR, Attacks
from benchmarks.harness.experiment import Options


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    """Rows of the profile `smoke` by attack and defence, of some of them."""
    attacks = Attacks(Options("smoke"))
    wanted = {
        ("none", "none"),
        ("none", "default"),
        ("claim", "default"),
        ("weight", "default"),
        ("scale 1e30", "default"),
        ("shapes", "none"),
        ("scores", "none"),
        ("scale 1e30", "norm 3, drop"),
    }
    found = {}
    for cell in attacks.cells():
        which = cell["attack"], cell["defence"]
        if which in wanted:
            work: Path = tmp_path_factory.mktemp("attack")
            found[which] = {"cell": cell, "result": attacks.compute(cell, work)}
    assert found.keys() == wanted
    return found


def test_an_honest_federation_drops_no_site(rows):
    result = rows["none", "none"]["result"]
    assert (result["dropped"], result["scaled"], result["honest"]) == (0, 0, 0)


def test_without_an_attack_the_default_changes_nothing_and_reports_nothing(rows):
    plain, default = rows["none", "none"]["result"], rows["none", "default"]["result"]
    assert default["dice"] == plain["dice"]
    assert (default["dropped"], default["scaled"], default["honest"], default["reported"]) == (0, 0, 0, 0)


def test_a_claim_beyond_what_was_announced_changes_nothing_and_is_reported(rows):
    row = rows["claim", "default"]
    assert row["result"]["dice"] == rows["none", "none"]["result"]["dice"]
    assert row["result"]["reported"] == row["cell"]["rounds"]


@pytest.mark.parametrize(("attack", "scaled"), [("weight", False), ("scale 1e30", True)])
def test_by_default_a_liar_that_is_believed_in_part_is_reported_in_every_round(rows, attack, scaled):
    row = rows[attack, "default"]
    assert row["result"]["reported"] == row["cell"]["rounds"]
    assert row["result"]["scaled"] == (row["cell"]["rounds"] if scaled else 0)


@pytest.mark.parametrize("which", [("shapes", "none"), ("scores", "none"), ("scale 1e30", "norm 3, drop")])
def test_a_liar_is_dropped_from_every_round_and_no_other_site_is(rows, which):
    row = rows[which]
    assert row["result"]["dropped"] == row["cell"]["rounds"]
    assert row["result"]["honest"] == 0
    assert LIAR == "aster"


def test_the_page_has_every_attack_and_a_dash_for_a_run_that_failed(rows):
    cell, result = rows["none", "none"]["cell"], rows["none", "none"]["result"]
    failed = {"cell": {**cell, "attack": "labels"}, "result": {**result, "dice": None}}
    dice, reports, honest = Attacks(Options("smoke")).sections([*rows.values(), failed])
    assert "| scale 1e30 |      2 |           2 |" in reports
    assert "| shapes" in dice
    assert "–" in dice
    assert "points" in honest
