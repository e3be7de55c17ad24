"""A part of a page: what it says of rows with and without surfaces, and of seeds that are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accuracy.papers.fedoap import PaperFedOap
from benchmarks.accuracy.papers.report import Part
from benchmarks.harness.cells import Row
from benchmarks.harness.experiment import Options

ARMS = ("base", "old", "begun")
SCORES = {"ours": {"p": 0.5, "q": 0.7}, "paper": 0.6}
SURFACES = {"hd95": {"p": 4.0, "q": None}, "nsd": {"p": 0.25, "q": None}}


def row(arm: str, seed: int, site: str, **more: Any) -> Row:
    cost = {"sent": 1e6, "received": 1e6, "seconds": 3.0}
    return {
        "cell": {"part": "part", "arm": arm, "seed": seed},
        "result": {"sites": {site: {**SCORES, **more}}, "cost": cost},
    }


def part(rows: list[Row]) -> Part:
    return Part("Part", "", rows, {arm: {} for arm in ARMS}, "base", (), "Dice", "theirs", surfaces=True)


def lines(rows: list[Row]) -> dict[str, list[str]]:
    """The cells of each line of the part's own table, by the arm."""
    table = part(rows).sections("figure.svg")[2]
    return {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in table.splitlines()
    }


def test_surfaces_are_means_of_sites_and_patients_without_are_counted() -> None:
    found = lines([row("base", 0, site, **SURFACES) for site in ("a", "b")])
    assert found["arm"][:5] == ["Dice", "worst site", "theirs", "HD95", "surface Dice"]
    assert found["base"][:6] == ["60.0", "60.0", "60.0", "4.0", "25.0", "2"]


def test_a_row_from_before_surfaces_has_dashes() -> None:
    found = lines([row("base", 0, "a", **SURFACES), row("old", 0, "a")])
    assert found["old"][:6] == ["60.0", "60.0", "60.0", "–", "–", "–"]


def test_columns_without_an_entry_are_left_out_and_the_worst_site_is_shown() -> None:
    found = lines([row("base", 0, "a"), row("base", 0, "b", ours={"p": 0.1, "q": 0.3})])
    assert found["arm"] == ["Dice", "worst site", "theirs", "MB per site", "seconds per site"]
    assert found["base"][:2] == ["40.0", "20.0"]


def test_a_seed_without_all_sites_is_in_no_mean_and_is_named() -> None:
    whole = [row("base", seed, site) for seed in (0, 1) for site in ("a", "b")]
    rows = [*whole, *(row("begun", 0, site) for site in ("a", "b")), row("begun", 1, "a", ours={"p": 0.0})]
    assert lines(rows)["begun"][0] == "60.0"
    said = "\n".join(part(rows).sections("figure.svg"))
    assert "In no mean, since not all sites are computed: begun, seed 1: a." in said


def test_what_has_no_row_is_named_with_the_command_that_computes_it() -> None:
    experiment = PaperFedOap(Options("cpu", Path("data")))
    cells = experiment.cells()
    done = [c for c in cells if c["part"] == "comparison" and (c["arm"], c["seed"]) != ("FedOAP", 2)]
    found = experiment.lacking([{"cell": cell} for cell in done])
    assert {*found} == {("comparison", "FedOAP"), ("ablation", None), ("unseen", None)}
    assert [cell["seed"] for cell in found["comparison", "FedOAP"]] == [2]
    assert sum(map(len, found.values())) + len(done) == len(cells)
    *_, section = experiment.sections([{"cell": cell, "result": row("x", 0, "a")["result"]} for cell in done])
    assert "- `--only part=comparison`: FedOAP (1)" in section
    assert "- `--only part=unseen`: all arms (72)" in section
