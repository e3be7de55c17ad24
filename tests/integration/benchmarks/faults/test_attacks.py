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
    wanted = {("none", "none"), ("shapes", "none"), ("scores", "none"), ("scale 1e30", "norm 3, drop")}
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


@pytest.mark.parametrize("which", [("shapes", "none"), ("scores", "none"), ("scale 1e30", "norm 3, drop")])
def test_a_liar_is_dropped_from_every_round_and_no_other_site_is(rows, which):
    row = rows[which]
    assert row["result"]["dropped"] == row["cell"]["rounds"]
    assert row["result"]["honest"] == 0
    assert LIAR == "aster"


def test_the_page_has_every_attack_and_a_dash_for_a_run_that_failed(rows):
    failed = {**rows["none", "none"], "result": {**rows["none", "none"]["result"], "dice": None}}
    dice, honest = Attacks(Options("smoke")).sections([*rows.values(), failed])
    assert "| shapes" in dice
    assert "–" in dice
    assert "points" in honest
