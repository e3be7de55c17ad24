"""The verdict on a run: the figures in its words, what few patients cannot say, and what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from model_store.task import Task
from tests.helpers.training.run_records import make_record
from tests.helpers.training.tested import round_of, sent
from training.engine.history import RoundEntry, SiteEntry, final_changes, final_scores
from training.paired import PairedSums
from training.record import RunRecord
from training.verdict import chance, ranked, verdict_of

LUNGS = Task(name="lungs", labels={"lung": (1,)}, size=(16, 16))
CHEST = Task(name="chest", labels={"lung": (1,), "heart": (2,)}, size=(16, 16))
XRAYS = Task(name="xrays", kind="classification", class_names=("normal", "ill"), size=(8, 8))


def around(mean: float, count: int, seed: int) -> list[float]:
    """Scores with exactly this mean."""
    drawn = np.random.default_rng(seed).normal(0, 0.01, count)
    return [float(each) for each in mean + drawn - drawn.mean()]


def sites(task: Task, **counts: int) -> dict[str, dict[str, int]]:
    return {name: {"train": 9, "val": 4, "test": count} for name, count in counts.items()}


# What stood in a report: "shared 0.921, n = 24" over "own 0.930, n = 16".
SHARED = {
    "Montgomery": around(0.921, 10, 1),
    "Seoul": around(0.9343333, 6, 2),
    "Shenzhen": around(0.911, 8, 3),
}
OWN = {"Montgomery": around(0.927, 10, 4), "Seoul": around(0.935, 6, 5), "Shenzhen": None}
EXAMPLE = round_of({site: sent({"": (SHARED[site], OWN[site])}) for site in SHARED})
COUNTS = sites(LUNGS, Montgomery=10, Seoul=6, Shenzhen=8)


def test_own_models_are_compared_on_the_patients_that_have_both() -> None:
    verdict = verdict_of(LUNGS, COUNTS, [EXAMPLE])
    assert verdict.good.startswith("The shared model has Dice 0.921 on 24 test patients of 3 sites.")
    changes = np.array([*OWN["Montgomery"], *OWN["Seoul"]]) - [*SHARED["Montgomery"], *SHARED["Seoul"]]
    low, high = stats.t.interval(0.95, 15, changes.mean(), stats.sem(changes))
    assert verdict.own == (
        "The sites' own models against the shared model, on the same 16 patients (without Shenzhen): "
        f"0.926 to 0.930, +0.004 (95 %: {low:+.3f} to {high:+.3f}): no difference is shown."
    )
    assert verdict.lines[1] == verdict.own
    assert "0.930, n" not in " ".join(verdict.sentences)


def test_interval_of_three_patients_at_two_sites_is_that_by_hand() -> None:
    # Changes 0.1, 0.2 and 0.3: mean 0.2, deviation 0.1, and t(0.975, 2) = 4.302653.
    one, two = PairedSums.of([0.5, 0.4], [0.6, 0.6]), PairedSums.of([0.3], [0.6])
    found = PairedSums.together([one, two]).paired()
    margin = 4.302653 * 0.1 / 3**0.5
    assert found is not None
    assert (found.count, found.before, found.after) == (3, pytest.approx(0.4), pytest.approx(0.6))
    assert (found.low, found.high) == (pytest.approx(0.2 - margin), pytest.approx(0.2 + margin))


def test_sites_with_a_shown_change_are_named_and_served_so() -> None:
    base = around(0.8, 12, 1)
    up, down = [each + 0.05 for each in around(0.8, 12, 2)], [each - 0.05 for each in around(0.8, 12, 3)]
    few = around(0.8, 5, 4)
    scores = {"A": (base, up), "B": (base, down), "C": (base, base), "D": (few, [each + 0.1 for each in few])}
    history = [round_of({site: sent({"": pair}) for site, pair in scores.items()})]
    verdict = verdict_of(LUNGS, sites(LUNGS, A=12, B=12, C=12, D=5), history)
    assert (
        "By site: better at A (+0.050, n = 12) and D (+0.100, n = 5, few), worse at B (-0.050, n = 12)."
        in (verdict.own)
    )
    # Five patients choose nothing.
    assert "serve A by its own model" in verdict.next
    assert "serve B by the shared model" in verdict.next


def test_a_site_of_few_patients_is_in_no_rank() -> None:
    heart = {
        "A": (around(0.63, 12, 1), None),
        "B": (around(0.6, 11, 2), None),
        "C": (around(0.1, 2, 3), None),
    }
    lung = {site: (around(0.9, len(pair[0]), 4), None) for site, pair in heart.items()}
    both = {site: ([*heart[site][0]], None) for site in heart}
    history = [
        round_of({site: sent({"": both[site], "lung": lung[site], "heart": heart[site]}) for site in heart})
    ]
    verdict = verdict_of(CHEST, sites(CHEST, A=12, B=11, C=2), history)
    assert (
        "It is worst for heart at B: 0.600 (n = 11). Not ranked, with fewer than 10 test patients: C."
        in verdict.good
    )
    assert "a mean over 2 labels (heart: n = 25)" in verdict.good
    assert "gather at least 10 test patients at C" in verdict.next
    assert "look at" not in verdict.next
    rows = ranked(final_scores(history), "")
    assert [(row.site, row.label) for row in rows if row.label != "lung"] == [
        ("B", ""),
        ("B", "heart"),
        ("A", ""),
        ("A", "heart"),
        ("C", ""),
        ("C", "heart"),
    ]
    alone = verdict_of(CHEST, sites(CHEST, C=2), [round_of({"C": sent({"": both["C"]})})])
    assert "on 2 test patients, few, of one site" in alone.good
    assert "No site is ranked: none has 10 test patients." in alone.good


def test_a_site_far_below_the_others_is_to_be_looked_at() -> None:
    history = [
        round_of({"A": sent({"": (around(0.9, 12, 1), None)}), "B": sent({"": (around(0.7, 12, 2), None)})})
    ]
    assert "look at the cases of B" in verdict_of(LUNGS, sites(LUNGS, A=12, B=12), history).next


def of_classes(right: tuple[int, int], count: tuple[int, int]) -> dict[str, float]:
    """What a site sends of a classifier that answers so many of the images of each class right."""
    recalls = {
        f"test_recall{what}__{name}": value
        for name, hits, images in zip(XRAYS.class_names, right, count, strict=True)
        for what, value in (("", hits / images), ("_n", float(images)))
    }
    hits = [1.0] * sum(right) + [0.0] * (sum(count) - sum(right))
    return sent({"": (hits, None)}, "accuracy", **recalls)


@pytest.mark.parametrize(
    ("right", "count", "by_chance"),
    [
        ((70, 0), (70, 30), True),
        ((60, 14), (70, 30), True),
        ((68, 25), (70, 30), False),
        ((0, 0), (2, 1), True),
    ],
)
def test_accuracy_of_chance_is_said_and_not_served(
    right: tuple[int, int], count: tuple[int, int], by_chance: bool
) -> None:
    history = [round_of({"A": of_classes(right, count)})]
    verdict = verdict_of(XRAYS, sites(XRAYS, A=sum(count)), history)
    assert ("not better than chance: always answering normal" in verdict.good) == by_chance
    assert verdict.next.startswith("Next: do not serve by the shared model") == by_chance
    # By an exact test of another library.
    found = chance(XRAYS, history, "")
    test = stats.binomtest(sum(right), sum(count), max(count) / sum(count), "greater").pvalue
    assert (found is not None) == (test > 0.05) == by_chance


def test_the_class_with_the_lowest_recall_is_named() -> None:
    verdict = verdict_of(XRAYS, sites(XRAYS, A=100), [round_of({"A": of_classes((68, 25), (70, 30))})])
    assert "Recall is lowest for ill: 0.833 (n = 30)." in verdict.good


def test_a_label_that_is_never_found_is_not_served_and_one_that_is_missed_is_said() -> None:
    lost = {"": (around(0.4, 12, 1), None), "lung": (around(0.8, 12, 2), None), "heart": ([0.0] * 12, None)}
    verdict = verdict_of(CHEST, sites(CHEST, A=12), [round_of({"A": sent(lost)})])
    assert "heart (n = 12) is never found." in verdict.good
    assert verdict.next.startswith("Next: do not serve by the shared model")
    shares = {"missed__heart": 0.25, "missed_n__heart": 12.0, "missed__lung": 0.5, "missed_n__lung": 2.0}
    missed = sent(
        {"": (around(0.4, 12, 1), None)}, **{f"test_{name}": value for name, value in shares.items()}
    )
    verdict = verdict_of(CHEST, sites(CHEST, A=12), [round_of({"A": missed})])
    assert "In 3 of 12 patients with heart it is not found at all." in verdict.good


def test_sites_without_figures_and_rounds_without_sites_are_named() -> None:
    entry = SiteEntry(1.0, {}, {}, {}, (), 0.1)
    score = sent({"": (around(0.9, 12, 1), None)})
    train = [
        RoundEntry("train", i, 4, 0.1, {"A": entry}, {"NORTH": "its process ended"} if i > 1 else {})
        for i in range(4)
    ]
    test = round_of({"A": score, "KEEPS": {}, "SILENT": {}, "NONE": {}}, {"NORTH": "its process ended"})
    kept = SiteEntry(1.0, {}, {}, {}, ("tested", "metrics"), 0.1)
    test = RoundEntry("test", 0, 1, 0.1, {**test.sites, "KEEPS": kept}, test.dropped)
    verdict = verdict_of(LUNGS, sites(LUNGS, A=12, NORTH=4, KEEPS=4, SILENT=4, NONE=0), [*train, test])
    assert verdict.lacking == (
        "4 of 5 sites took part in every round: without NORTH in train 3-4 of 4, test: its process ended. "
        "No test scores of NORTH (it dropped out of the test), KEEPS (its policy keeps its statistics), "
        "SILENT (it sent none), NONE (it has no test patients)."
    )
    assert verdict.lines[0].startswith("4 of 5 sites")
    assert "train on with NORTH" in verdict.next
    assert "score it at NORTH, KEEPS, SILENT and NONE (`locum accept`)" in verdict.next


@pytest.mark.parametrize("history", [[], [round_of({"A": {}, "B": {}})]])
def test_a_run_without_scores_says_that_nothing_is_known(history: list[RoundEntry]) -> None:
    verdict = verdict_of(LUNGS, sites(LUNGS, A=12, B=12), history)
    assert verdict.good.startswith("No site sent scores of test patients")
    assert "locum accept" in verdict.next
    assert bool(verdict.lacking) == bool(history)


def test_own_models_without_a_comparison_are_not_set_over_the_shared_one() -> None:
    metrics = sent({"": (around(0.9, 12, 1), around(0.95, 12, 2))})
    old = {name: value for name, value in metrics.items() if "paired" not in name}
    verdict = verdict_of(LUNGS, sites(LUNGS, A=12), [round_of({"A": old})])
    assert verdict.own.startswith("No site compared")
    assert "0.950" not in " ".join(verdict.sentences)


def test_the_record_has_the_verdict_and_the_paired_figures(tmp_path) -> None:
    record = make_record(rounds=(EXAMPLE,), task=LUNGS)
    path = record.write(tmp_path / "record.json")
    assert '"verdict"' in path.read_text()
    assert RunRecord.read(path) == record
    (paired,) = record.paired
    together = final_changes([EXAMPLE])[0].together
    assert (paired.model, paired.base, paired.together) == ("personal", "", together)
    assert {site: each.count for site, each in paired.sites.items()} == {"Montgomery": 10, "Seoul": 6}
