"""The figures of a comparison, by hand, and the page that has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from training.compare.cells import Row
from training.compare.figures import in_words, lines_of
from training.compare.page import Comparison
from training.data.cases import FEW_CASES

Scores = Mapping[str, Mapping[str, float | None]]


def row(method: str, seed: int, scores: Scores, model: str = "", **more: Any) -> Row:
    found = {site: {patient: (score,) for patient, score in own.items()} for site, own in scores.items()}
    return Row(method=method, seed=seed, identity={}, metric="dice", scores={model: found}, **more)


def hospital(count: int, score: float, first: int = 0) -> dict[str, float]:
    """Scores around one, the mean."""
    return {f"p{first + i}": score + (0.01 if i % 2 else -0.01) for i in range(count)}


def page_of(rows: list[Row], methods: tuple[str, ...], folder: Path, **more: Any) -> Comparison:
    sites = tuple(sorted({site for each in rows for site in each.answering}))
    seeds = tuple(sorted({each.seed for each in rows}))
    lines = tuple(lines_of(rows, methods))
    given = {"failed": {}, "missing": {}, **more}
    return Comparison("kidneys", "dice", methods, seeds, sites, lines, folder=folder, **given)


def test_a_method_is_the_mean_over_hospitals_and_its_worst_is_named() -> None:
    rows = [
        row("a", 0, {"north": {"x": 0.9, "y": 0.7}, "south": {"z": 0.4}}, sent=10, received=20, seconds=1.0),
        row("a", 1, {"north": {"x": 0.8, "w": None}, "south": {"z": 0.6}}, sent=30, received=20, seconds=3.0),
    ]
    (line,) = lines_of(rows, ["a"])
    # (0.8 + 0.4) / 2 and (0.8 + 0.6) / 2; a patient without a score counts nowhere
    assert line.by_seed == {0: pytest.approx(0.6), 1: pytest.approx(0.7)}
    assert line.score == pytest.approx(0.65)
    assert (line.worst.name, line.worst.score, line.worst.patients) == ("south", pytest.approx(0.5), 1)
    assert line.patients == 3
    assert (line.sent, line.received, line.seconds) == (20, 20, 2.0)
    assert line.few
    assert line.worst.few
    assert line.difference is None


def test_a_hospital_is_answered_by_its_own_model_where_it_has_one() -> None:
    shared = {"north": {"x": (0.5,)}, "south": {"z": (0.5,)}}
    both = Row(method="a", seed=0, identity={}, scores={"": shared, "personal": {"south": {"z": (0.9,)}}})
    (line,) = lines_of([both], ["a"])
    assert [(each.name, each.score) for each in line.hospitals] == [("north", 0.5), ("south", 0.9)]
    assert line.answers == "own"


def test_a_difference_is_of_the_same_patients_each_the_mean_of_its_seeds() -> None:
    first = [
        row("a", 0, {"north": {"x": 0.5, "y": 0.5}, "south": {"z": 0.5, "v": 0.2}}),
        row("a", 1, {"north": {"x": 0.5, "only a": 0.1}, "south": {"z": None}}),
        row("a", 2, {"north": {"x": 0.0}}),
    ]
    other = [
        row("b", 0, {"north": {"x": 0.7, "y": 0.6}, "south": {"z": 0.5, "v": 0.6}}),
        row("b", 1, {"north": {"x": 0.6}, "south": {"z": 0.4}}),
    ]
    found = lines_of([*first, *other], ["a", "b"])[1].difference
    assert found is not None
    # north: x (0.2 + 0.1) / 2, y 0.1; south: z (0 + (0.4 - 1)) / 2, as finding none is right, v 0.4
    assert found.all.change == pytest.approx(((0.15 + 0.1) / 2 + (-0.3 + 0.4) / 2) / 2)
    assert found.all.count == 4
    assert found.by_seed == {
        0: pytest.approx((0.15 + 0.2) / 2),
        1: pytest.approx((0.1 - 0.6) / 2),
    }


def test_images_of_a_patient_are_one_patient() -> None:
    first = Row(method="a", seed=0, identity={}, scores={"": {"north": {"x": (1.0, 0.0, 0.0), "y": (1.0,)}}})
    other = Row(method="b", seed=0, identity={}, scores={"": {"north": {"x": (1.0, 1.0, 0.0), "y": (0.0,)}}})
    one, two = lines_of([first, other], ["a", "b"])
    # The accuracy is over images, the difference over patients.
    assert (one.score, two.score) == (0.5, 0.5)
    assert two.difference is not None
    assert two.difference.all.change == pytest.approx((1 / 3 - 1) / 2)
    assert two.difference.all.count == 2


@pytest.mark.parametrize(
    ("gains", "patients", "verdict"),
    [
        ((0.05, 0.04), 6, "better"),
        ((-0.05, -0.04), 6, "worse"),
        ((0.2, -0.05), 6, "no difference shown"),  # beyond the interval, but the seeds differ
        ((0.0, 0.001), 6, "no difference shown"),
        ((0.05, 0.04), 4, "too few patients"),
    ],
)
def test_a_verdict_needs_the_interval_every_seed_and_ten_patients(
    gains: tuple[float, ...], patients: int, verdict: str
) -> None:
    rows, noise = [], (-0.01, 0.01)
    for seed, gain in enumerate(gains):
        for name, added in (("a", 0.0), ("b", gain)):
            own = {f"p{i}": 0.5 + added + (noise[i % 2] if name == "b" else 0) for i in range(patients)}
            rows.append(row(name, seed, {"north": own, "south": own}))
    line = lines_of(rows, ["a", "b"])[1]
    assert line.difference is not None
    assert line.difference.verdict == verdict
    (said,) = in_words(lines_of(rows, ["a", "b"]), ["a", "b"], "Dice")
    starts = {
        "better": "b (+0.045 [",
        "worse": "b (-0.045 [",
        "no difference shown": "No difference from a can be shown of b (",
        "too few patients": "No difference from a can be shown of b (",
    }
    assert said.startswith(starts[verdict])
    assert ("too few patients, of whom it takes 10" in said) == (verdict == "too few patients")
    assert said.endswith("than a in Dice on the same patients, in every seed.") == (
        verdict in ("better", "worse")
    )


def test_one_training_each_is_said() -> None:
    rows = [row("a", 0, {"north": hospital(12, 0.5)}), row("b", 0, {"north": hospital(12, 0.7)})]
    (said,) = in_words(lines_of(rows, ["a", "b"]), ["a", "b"], "Dice")
    assert said.endswith("of one training each: more seeds say whether it lasts.")


def test_page_ranks_no_figure_of_few_patients_and_names_what_failed_and_is_missing(tmp_path: Path) -> None:
    most = FEW_CASES
    rows = [
        row("a", 0, {"north": hospital(most, 0.8), "south": hospital(2, 0.6)}),
        row("b", 0, {"north": hospital(most, 0.9), "south": hospital(2, 0.7)}, "personal"),
    ]
    failed, missing = {"mine": {0: "it <cannot> be trained"}}, {"c": (0,)}
    command = "locum compare --methods a,b,mine,c"
    found = page_of(rows, ("a", "b", "mine", "c"), tmp_path, failed=failed, missing=missing, go_on=command)
    assert found.verdict[1:] == [
        "mine failed (seed 0): it <cannot> be trained",
        "c is not trained yet (seed 0).",
    ]
    text = found.markdown()
    assert "| **0.800** (0.800)" in text
    # The best of the worst hospitals, but of two patients.
    assert "| 0.700 † south, n=2" in text
    assert "| 0.600 † south, n=2" in text
    assert "| 0.700 (0.700)" in text
    assert text.endswith(f"Go on with\n\n    {command}\n")
    path = found.write()
    html = path.read_text()
    assert "<b>0.800</b> (0.800)" in html
    assert "<b>0.700" not in html
    assert "it &lt;cannot&gt; be trained" in html
    assert "<svg" in html
    content = json.loads(path.with_suffix(".json").read_text())
    assert content["lines"][1]["difference"]["change"] == pytest.approx(0.1)
    assert content["lines"][1]["difference"]["verdict"] == "better"
    assert content["failed"] == {"mine": {"0": "it <cannot> be trained"}}
    for each in (text, html, path.with_suffix(".json").read_text()):
        assert "p0" not in each


def test_nothing_is_compared_with_a_first_method_that_failed(tmp_path: Path) -> None:
    rows = [row("b", 0, {"north": hospital(12, 0.5)})]
    found = page_of(rows, ("a", "b"), tmp_path, failed={"a": {0: "no"}})
    assert found.verdict == [
        "a has no finished cell, so that there is nothing to compare the others with.",
        "a failed (seed 0): no",
    ]
    assert "| b " in found.markdown()
