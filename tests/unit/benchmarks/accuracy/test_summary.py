"""The summary follows from the recorded rows, has every arm that was run, and compares as the tables do."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from benchmarks.accuracy.papers import fedbicross, fedins, fedoap, iop_fl
from benchmarks.accuracy.papers.classification import Clients
from benchmarks.accuracy.papers.organs import assemble, read, regrouped
from benchmarks.accuracy.summary import page, systems
from benchmarks.accuracy.summary.arms import ALIASES, ARMS
from benchmarks.accuracy.summary.settings import SETS, of_dose, of_papers, rows_of_dose
from benchmarks.harness.scores import difference_of_sites
from benchmarks.registry import EXPERIMENTS, find
from personalization.options.presets import PRESETS
from training.data.federation import load_federation
from training.methods.registry import method
from training.phantom import SCANNERS
from training.tasks import template

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "docs/results"
TABLE = {paper: find(paper).tables[0] for paper in systems.PAPERS}


@pytest.fixture(scope="module")
def text() -> str:
    """The page, written again."""
    return "\n\n".join(page.sections()) + "\n"


def rows_of(table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{table}.jsonl").read_text().splitlines()]


def arms_in(row: dict[str, Any]) -> set[str]:
    """The arms that a row has, read from its shape and not by the benchmarks' own readers."""
    cell, result = row["cell"], row["result"]
    if "arm" in cell:
        return {cell["arm"]}
    if "own" in result:
        return {"auto", "lens", "lens then dose", "served"} & {
            arm for at in result["at"].values() for arm in at["arms"]
        }
    if "hospitals" in result:
        return {criterion for each in result["hospitals"].values() for criterion in each["costs"]}
    if cell.get("part") in ("served", "learned"):
        by_severity = (
            [at["arms"] for at in result["at"].values()] if cell["part"] == "served" else result.values()
        )
        names = {name for arms in by_severity for name in arms} - {"global", "patients"}
        return {name for name in names if not name.startswith("shuffled ")}
    return set()


def test_every_arm_of_the_papers_tables_has_its_place() -> None:
    named = {arm for part in iop_fl.PUBLISHED_BY_PART.values() for arm in part}
    for paper in (fedins, fedoap, fedbicross):
        named |= {arm.name for arms in paper.ARMS.values() for arm in arms}
    assert {arm for arm in named if ALIASES.get(arm, arm) not in ARMS} == set()


def test_the_page_follows_from_the_rows(text: str) -> None:
    assert (RESULTS / "summary.md").read_text() == text


def test_the_page_of_systems_follows_from_arms_and_rows() -> None:
    assert (RESULTS / "systems.md").read_text() == "\n\n".join(systems.sections()) + "\n"


def test_every_line_of_the_papers_has_a_command_a_test_and_cells() -> None:
    printed = {
        (paper, part, arm)
        for paper in systems.PAPERS
        for part, arms in find(paper).published.items()
        for arm, figures in arms.items()
        if figures
    }
    assert {(each.paper, each.part, each.arm) for each in systems.systems()} == printed
    names = {"TTT", "FedDG", "MOON", "FedDC", "FedDP", "DAFL", "FedISCA", "Co-Boosting"}
    assert names <= {arm for _, _, arm in printed}
    for each in systems.systems():
        path, _, test = systems.TESTS[each.runs].partition("::")
        assert test, each
        assert f"def {test}(" in (ROOT / path).read_text(), each
        assert any(cell["arm"] == each.arm for cell in find(each.paper).of_table(TABLE[each.paper]).cells())
        named = re.search(r"--method ([a-z0-9-]+)|preset `([a-z-]+)`", each.command)
        if named is None:
            assert each.command.startswith(f"`benchmarks run {each.paper} --only ")
        elif named[1]:
            fields = yaml.safe_load("\n".join(re.findall(r", `([a-z_]+: [^`]+)`", each.command)))
            method(named[1]).config.model_validate(fields or {})
        for preset in re.findall(r"preset `([a-z-]+)`", each.command):
            assert preset in PRESETS, each


def test_every_arm_that_was_run_is_on_the_page(text: str) -> None:
    accuracy = [name for name, place in EXPERIMENTS.items() if place.startswith("benchmarks.accuracy.")]
    assert {"dose", "picking", "paper-iop-fl"} <= set(accuracy)
    found = 0
    for table in (table for name in accuracy for table in find(name).tables):
        for arm in set().union(*map(arms_in, rows_of(table.name))):
            found += 1
            shown = ALIASES.get(arm, arm)
            places = (f"| {shown} ", f" {shown} (", f"{arm} ({table.name})")
            assert any(place in text for place in places), (table.name, arm)
            assert f"]({table.name}.md)" in text, table.name
    assert found > 80


def test_every_arm_says_what_leaves_the_hospital() -> None:
    questions = (*page.QUESTIONS, *page.STUDIES)
    assert {arm for question in questions for arm in question.arms} <= set(ARMS)


def test_a_change_is_the_mean_of_sites_over_patients_of_their_means_over_seeds() -> None:
    """Against a loop over the rows of IOP-FL's table inside."""
    [setting] = [s for s in of_papers("paper-iop-fl", "inside", "FedAvg") if s.name.startswith("brain")]
    dice: dict[str, dict[tuple[int, str, str], float]] = defaultdict(dict)
    for row in rows_of("paper-iop-fl.cpu"):
        cell = row["cell"]
        if (cell["part"], cell["set"]) == ("inside", "brain_lgg_flair"):
            for site, found in row["result"]["sites"].items():
                for patient, value in found["ours"].items():
                    if value is not None:
                        dice[cell["arm"]][cell["seed"], site, patient] = value
    pairs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for unit, value in dice["FedProx"].items():
        if unit in dice["FedAvg"]:
            pairs[unit[1]][unit[2]].append(value - dice["FedAvg"][unit])
    change = setting.changes["FedProx"]
    assert change is not None
    at_sites = [fmean(map(fmean, patients.values())) for patients in pairs.values()]
    assert change.interval.mean == pytest.approx(fmean(at_sites))


@pytest.mark.parametrize(
    ("gains", "word"),
    [
        ((0.10, 0.12, 0.11), "helps"),
        ((-0.10, -0.12, -0.11), "harms"),
        ((0.30, 0.30, -0.01), "no difference shown"),  # one seed does not agree
        ((0.10, 0.12), "too few seeds"),
    ],
)
def test_a_word_needs_an_interval_off_zero_and_three_seeds_that_agree(
    gains: tuple[float, ...], word: str
) -> None:
    patients = [("a", str(number)) for number in range(20)]
    base = {seed: dict.fromkeys(patients, 0.5) for seed in range(len(gains))}
    arm = {seed: dict.fromkeys(patients, 0.5 + gain) for seed, gain in enumerate(gains)}
    found = difference_of_sites(arm, base, ["a"])
    assert found is not None
    assert found.verdict == word
    assert found.interval.mean == pytest.approx(fmean(gains))


def test_every_set_of_the_page_is_described() -> None:
    shifts = {shift.set for shift in of_dose(rows_of_dose())}
    questions = (*page.QUESTIONS, *page.STUDIES)
    columns = {setting.name for question in questions for setting in question.found}
    named = shifts | {name.partition(",")[0] for name in columns}
    assert named == set(SETS)


@pytest.mark.parametrize("name", ["brain_lgg_flair", "retina_vessels", "lungs_cxr"])
def test_a_set_has_as_many_patients_and_images_as_the_page_says(real_data: Path, name: str) -> None:
    sites = load_federation(real_data / name, template(name)).sites
    assert SETS[name].images == tuple(len(site.cases) for site in sites)
    assert SETS[name].patients == tuple(len(site.patients) for site in sites)


def test_the_organs_have_as_many_patients_and_images_as_the_page_says(
    real_data: Path, tmp_path: Path
) -> None:
    whole = load_federation(assemble(real_data, tmp_path / "sites"), template("tumour_any_organ"))
    sites = regrouped(whole, read()).sites
    assert SETS["three organs"].patients == tuple(len(site.patients) for site in sites)
    assert SETS["three organs"].images == tuple(len(site.cases) for site in sites)


@pytest.mark.parametrize("name", ["pneumoniamnist", "wbc5_28_shift"])
def test_clients_have_as_many_images_as_the_page_says(real_data: Path, name: str) -> None:
    clients = Clients(real_data / "medmnist_npz", name, 5, 0.3, 0).data.values()
    assert SETS[name].images == tuple(len(own.train) + len(own.val) + len(own.test) for own in clients)


def test_the_phantom_has_the_sites_that_the_page_says() -> None:
    profile = find("dose").of_table(find("dose").tables[0]).profile
    assert len(SETS["phantom"].images) == len(tuple(SCANNERS)[: profile.scanners])
    assert set(SETS["phantom"].images) == {profile.phantoms}
