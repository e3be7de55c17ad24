"""Scores of the published model, taken once: by hand, by label, with their n."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from model_store.task import Task
from personalization.surfaces import surface_distances
from tests.helpers.training.sites import context, per_scan, site_data
from tests.helpers.training.volumes import BALLS, volumes
from training.algorithm import Memory, RoundResult, SiteSize
from training.choices.fedavg import FedAvgConfig
from training.engine.history import (
    RoundEntry,
    SiteEntry,
    final_changes,
    final_distances,
    final_rates,
    final_scores,
    is_final,
    never_found,
)
from training.local.images import Images
from training.local.masks import Drawn
from training.local.scores import predict
from training.local.site import SiteData
from training.local.slices import Slices
from training.local.volumes import Volumes
from training.methods.fedavg import FedAvg
from training.methods.registry import method, methods
from training.parts.test import TESTED, FinalScores, Test, predicting, score_once

PICTURES = Task(name="t", kind="classification", class_names=("no", "yes"), size=(8, 8))
FUNDUS = Task(name="fundus", labels={"disc": (1, 2), "cup": (2,)}, size=(16, 16))


class Says(nn.Module):
    """A network that finds the classes that its image holds."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.classes = classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        whole = images[:, 0].long()
        if whole.ndim == 3 and self.classes == 2:
            whole = whole[:, 0, 0]
        return nn.functional.one_hot(whole, self.classes).movedim(-1, 1).float()


class Bright(nn.Module):
    """Finds what is brighter than 1, whatever the window."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.ones_like(images), images * 1.0], dim=1)


def overlaps(metrics: dict[str, float]) -> dict[str, float]:
    """The scores with their numbers, alone."""
    return {name: v for name, v in metrics.items() if re.search("(test|val)_(dice|accuracy|n)(/|$)", name)}


def slices(found: list[list[int]], true: list[list[int]], patients: tuple[str, ...]) -> Slices:
    images = np.array(found, np.float32).reshape(len(found), 1, 1, -1)
    targets = np.array(true, np.uint8).reshape(len(true), 1, -1)
    return Slices(images, targets, patients, patients, tuple(range(len(found))))


def test_dice_is_by_patient_and_label_with_the_patients_that_have_one():
    # Patient p has two slices. Of r there is neither disc nor cup.
    test = slices(
        [[1, 1, 2, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
        [[1, 2, 2, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        ("p", "p", "q", "r"),
    )
    data = SiteData("S", test, test, test, None)
    result = score_once({"": predicting(Says(3), 2)}, data, FUNDUS)
    # p: classes 1 and 2 have 2 1/(2+1) and 2 2/(2+3), disc 1, cup 4/5; q: nothing is found where it is.
    expected = {
        "test_dice": pytest.approx(((2 / 3 + 4 / 5) / 2 + 0) / 2),
        "test_n": 2.0,
        "test_dice/disc": pytest.approx((1 + 0) / 2),
        "test_n/disc": 2.0,
        "test_dice/cup": pytest.approx(4 / 5),
        "test_n/cup": 1.0,
    }
    # Its validation patients are those that it trains on, which say nothing.
    assert overlaps(result.metrics) == expected
    held_out = SiteData("S", test, slices([[2, 0]], [[2, 0]], ("v",)), test, None)
    more = score_once({"": predicting(Says(3), 2)}, held_out, FUNDUS)
    validated = {"val_n": 1.0, "val_dice/disc": 1.0, "val_n/disc": 1.0, "val_dice/cup": 1.0, "val_n/cup": 1.0}
    assert overlaps(more.metrics) == {**expected, **validated}
    sites = {"A": dict(result.uploads["tested"]), "B": dict(more.uploads["tested"])}
    together = FinalScores.of(RoundResult({}, {"tested": sites}, {"A": 1.0, "B": 1.0}, {})).metrics(FUNDUS)
    assert together == {**expected, "test_n": 4.0, "test_n/disc": 4.0, "test_n/cup": 2.0, **validated}
    entry = RoundEntry(
        "test", 0, 1, 0.0, {site: entry_of(each.metrics) for site, each in (("A", result), ("B", more))}
    )
    assert {(each.split, each.label): each.count for each in final_scores([entry])}["test", "disc"] == 4
    assert never_found([entry]) == []


def test_slices_are_scored_by_what_keep_largest_leaves_of_a_scan():
    task = FUNDUS.model_copy(update={"keep_largest": ("disc",)})
    # A scan of two slices with one disc across them, and an image of another patient.
    found = slices([[1, 1, 0, 0, 1], [0, 0, 2, 0, 0], [1, 0, 0, 1, 1]], [[0] * 5] * 3, ("p", "p", "q"))
    found = replace(found, cases=("a", "a", "b"), task=task)
    p, q = predict(Says(3), found)
    assert p[:, 0].tolist() == [[1, 1, 0, 0, 0], [0, 0, 2, 0, 0]]
    assert q.tolist() == [[0, 0, 0, 1, 1]]
    p, q = predict(Says(3), replace(found, task=FUNDUS))
    assert (p[:, 0, 4].tolist(), q[0, 4]) == ([1, 0], 1)


def test_volumes_are_scored_by_what_keep_largest_leaves():
    task = BALLS.model_copy(update={"keep_largest": tuple(BALLS.labels)})
    seen = np.zeros((1, 20, 12, 12), np.float32)
    seen[0, 2:5, 2:5, 2:5] = seen[0, 15:17, 3:5, 3:5] = 3
    for own, expected in ((BALLS, 27 + 8), (task, 27)):
        data = Volumes((seen,), (np.zeros(seen.shape[1:], np.uint8),), ("p",), ("p",), ((1.0,) * 3,), own)
        (answer,) = predict(Bright(), data)
        assert int((answer > 0).sum()) == expected


def test_surfaces_are_by_patient_and_scan_in_millimetres_or_pixels_and_absent_labels_are_counted():
    task = Task(name="discs", labels={"disc": (1,)}, size=(16, 16))
    truth = np.zeros((5, 16, 16), np.uint8)
    truth[:4, 4:8] = 1  # of the last patient there is none
    found = np.roll(truth, 2, axis=1)
    found[4, 0, 0] = 1
    # p has two images with 3 mm from row to row, q one with 1 mm, r no spacing.
    patients, cases = ("p", "p", "q", "r", "r"), ("a", "b", "c", "d", "e")
    spacings = (3.0, 1.0), (3.0, 1.0), (1.0, 1.0), None, None
    drawn = tuple(Drawn(*each) for each in zip(patients, (None,) * 5, truth, spacings, strict=True))
    test = Slices(found[:, None].astype(np.float32), truth, patients, cases, (0,) * 5, drawn)
    data = SiteData("S", test, test, test, None)
    metrics = score_once({"": lambda _: per_scan(test, found)}, data, task).metrics
    assert metrics["test_hd95/disc"] == pytest.approx((6.0 + 2.0) / 2)
    assert metrics["test_surfaces/disc"] == 2.0
    assert metrics["test_hd95_px/disc"] == pytest.approx(2.0)  # r's image e has no surface to measure
    assert metrics["test_surfaces_px/disc"] == 1.0
    assert metrics["test_n/disc"] == 3.0
    assert 0 < metrics["test_nsd/disc"] < 1
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of(metrics), "B": entry_of(metrics)})
    distances = {(each.metric, each.unit): each for each in final_distances([entry])}
    assert distances["hd95", "mm"].count == 4
    assert distances["hd95", "mm"].mean == pytest.approx(4.0)
    assert set(distances) == {(name, unit) for name in ("hd95", "assd", "nsd") for unit in ("mm", "px")}
    assert all(is_final(name) for name in metrics if "hd95" in name or "surfaces" in name)


def test_volumes_are_scored_as_their_slices_are_and_by_windows():
    test = volumes(3, 5)
    test = Volumes(test.images, test.targets, ("p", "q", "p"), test.cases, test.spacings, BALLS)
    data = SiteData("S", test, test, test, None)
    metrics = score_once({"": predicting(Bright(), 2)}, data, BALLS).metrics
    dice, distances = {}, {}
    for patient, own in (("p", (0, 2)), ("q", (1,))):
        pairs = [(test.images[i][0] > 1, test.targets[i] > 0) for i in own]
        both, total = (
            sum(f(a, b) for a, b in pairs)
            for f in (lambda a, b: (a & b).sum(), lambda a, b: a.sum() + b.sum())
        )
        dice[patient] = 2 * both / total
        each = [
            float(
                surface_distances(
                    torch.from_numpy(a.astype(np.uint8)),
                    torch.from_numpy(b.astype(np.uint8)),
                    [(1,)],
                    (1.0, 1.0, 2.0),
                )["hd95"]
            )
            for a, b in pairs
        ]
        distances[patient] = sum(each) / len(each)
    assert metrics["test_dice"] == pytest.approx(sum(dice.values()) / 2)
    assert metrics["test_dice/ball"] == pytest.approx(sum(dice.values()) / 2)
    assert metrics["test_hd95/ball"] == pytest.approx(sum(distances.values()) / 2)
    assert metrics["test_n"] == 2.0


def test_the_models_of_a_site_are_told_apart_and_one_that_it_does_not_have_is_left_out():
    test = slices([[1, 1]], [[1, 0]], ("p",))
    data = SiteData("A", test, test, test, None)
    task = Task(name="discs", labels={"disc": (1,)}, size=(16, 16))

    def wrong(examples: Slices) -> list[torch.Tensor]:
        return per_scan(examples, np.ones_like(examples.targets))  # finds 2 of 1: 2 1/(2+1)

    def right(examples: Slices) -> list[torch.Tensor]:
        return per_scan(examples, examples.targets)

    a = score_once({"": wrong, "personal": right}, data, task)
    b = score_once({"": wrong, "personal": None}, data, task)
    scores = {"test_dice": pytest.approx(2 / 3), "test_n": 1.0}
    scores |= {"test_dice/disc": pytest.approx(2 / 3), "test_n/disc": 1.0}
    own = dict.fromkeys(
        ("personal_test_dice", "personal_test_n", "personal_test_dice/disc", "personal_test_n/disc"), 1.0
    )
    assert (overlaps(a.metrics), overlaps(b.metrics)) == ({**scores, **own}, scores)
    assert b.uploads["personal_tested"] == {}
    (phase,) = Test(task, lambda *_: {}, ("", "personal")).plan()
    groups = phase.uploads
    for group in groups:
        for result in (a, b):
            group.check(result.uploads[group.name], SiteSize(1))
    collected = {
        group.name: {site: dict(each.uploads[group.name]) for site, each in (("A", a), ("B", b))}
        for group in groups
    }
    found = FinalScores.of(RoundResult({}, collected, {"A": 1.0, "B": 1.0}, {}))
    assert found.metrics(task)["test_n"] == 2.0
    assert found.metrics(task, "personal", ("A",))["test_dice"] == 1.0
    assert found.metrics(task, "personal", ("B",)) == {}
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of(a.metrics), "B": entry_of(b.metrics)})
    found = {(score.model, score.label): score.sites for score in final_scores([entry])}
    assert found["personal", ""] == {"A": (1.0, 1)}
    assert found["", "disc"] == {"A": (pytest.approx(2 / 3), 1), "B": (pytest.approx(2 / 3), 1)}


@pytest.mark.parametrize(
    ("name", "final"),
    [
        ("test_dice", True),
        ("test_n/cup", True),
        ("personal_test_accuracy", True),
        ("cluster_test_n", True),
        ("personal_val_dice/cup", True),
        ("val_n", True),
        ("val_dice", False),
        ("personal_val_dice", False),
        ("cluster_val_accuracy", False),
        ("val_nsd", False),
        ("loss", False),
    ],
)
def test_metrics_of_the_end_are_told_from_those_of_rounds(name: str, final: bool):
    assert is_final(name) == final


def test_every_method_ends_with_the_test_and_exports_after_it():
    for name in methods():
        chosen = method(name)
        if name == "fedins":
            continue  # is built on a backbone: tests/integration/training/methods/test_test_patients.py
        task = FUNDUS if "segmentation" in chosen.kinds else PICTURES
        if name in ("fedoap", "feddp"):
            task = Task(name="discs", labels={"disc": (1,)}, size=(32, 32))
        plan = chosen.build(chosen.config(), task).plan()
        names = [step.name for step in plan]
        assert names.count("test") == 1, name
        assert names[names.index("test") + 1 :] in ([], ["export"]), name


def entry_of(metrics) -> SiteEntry:
    return SiteEntry(1.0, metrics, {}, {}, (), 0.0)


def test_accuracy_counts_images():
    images = np.array([0, 1, 1], np.float32).reshape(3, 1, 1, 1)
    test = Images(images, np.array([0, 1, 0]), ("a",) * 3, ("a",) * 3, (0, 1, 2))
    result = score_once({"": predicting(Says(2), 2)}, SiteData("S", test, test, test, None), PICTURES)
    # Answered: no, yes, yes; true: no, yes, no.
    assert result.metrics == {
        **{"test_accuracy": pytest.approx(2 / 3), "test_n": 3.0},
        **{"test_recall/no": 0.5, "test_recall_n/no": 2.0, "test_recall/yes": 1.0, "test_recall_n/yes": 1.0},
        **{"test_precision/no": 1.0, "test_precision_n/no": 1.0},
        **{"test_precision/yes": 0.5, "test_precision_n/yes": 2.0},
    }
    entry = RoundEntry("test", 0, 1, 0.0, {site: entry_of(result.metrics) for site in "AB"})
    rates = {(each.metric, each.label): (each.mean, each.count) for each in final_rates([entry])}
    assert rates["recall", "no"] == (0.5, 4)
    assert rates["precision", "yes"] == (0.5, 4)


def test_a_class_that_is_never_answered_has_a_recall_and_no_precision():
    images = np.zeros((2, 1, 1, 1), np.float32)
    test = Images(images, np.array([0, 1]), ("a",) * 2, ("a",) * 2, (0, 1))
    metrics = score_once(
        {"": predicting(Says(2), 2)}, SiteData("S", test, test, test, None), PICTURES
    ).metrics
    assert metrics["test_recall/yes"] == 0.0
    assert "test_precision/yes" not in metrics


def test_a_patient_is_missed_where_its_label_is_found_nowhere_or_in_another_place():
    # Of p the disc is found in part, of q beside it, of r not at all; s has none, and one is found.
    found = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    truth = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    test = slices(found, truth, ("p", "q", "r", "s"))
    metrics = score_once({"": predicting(Says(3), 2)}, SiteData("S", test, test, test, None), FUNDUS).metrics
    assert metrics["test_missed/disc"] == pytest.approx(2 / 3)
    assert metrics["test_missed_n/disc"] == 3.0
    # Of s Dice is 0 too.
    assert metrics["test_n/disc"] == 4.0
    assert "test_missed/cup" not in metrics
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of(metrics), "B": entry_of({"test_n": 1.0})})
    (missed,) = final_rates([entry])
    assert (missed.model, missed.label, missed.mean, missed.count) == ("", "disc", pytest.approx(2 / 3), 3)


def test_models_are_compared_patient_by_patient_on_the_same_ones():
    # Dice of p 2/3 and 1, of q 1 and 2/3; r has no disc, and the first model finds one; s has none.
    truth = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    shared = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    own = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    test = slices(truth, truth, ("p", "q", "r", "s"))
    task = Task(name="discs", labels={"disc": (1,)}, size=(16, 16))

    def answers(classes):
        return lambda examples: per_scan(examples, np.array(classes, np.uint8)[:, None])

    models = {"": answers(shared), "personal": answers(own)}
    sent = score_once(models, SiteData("S", test, test, test, None), task)
    expected = [1 / 3, -1 / 3, 1.0]
    for name in ("", "/disc"):
        of = f"personal_test_paired_{{}}{name}".format
        assert sent.metrics[of("n")] == 3.0
        assert sent.metrics[of("before")] == pytest.approx((2 / 3 + 1 + 0) / 3)
        assert sent.metrics[of("change")] == pytest.approx(np.mean(expected))
        assert sent.metrics[of("squares")] == pytest.approx(np.mean(np.square(expected)))
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of(sent.metrics), "B": entry_of(sent.metrics)})
    both, disc = final_changes([entry])
    assert (both.model, both.base, both.label, disc.label) == ("personal", "", "", "disc")
    low, high = stats.t.interval(0.95, 5, np.mean(expected), stats.sem(expected * 2))
    together = disc.together
    assert (together.count, together.low, together.high) == (6, pytest.approx(low), pytest.approx(high))
    assert disc.by_site["A"].after == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert all(is_final(name) for name in sent.metrics)
    # Nothing beside sums and counts leaves, and the groups are those of before.
    assert set(sent.uploads) == {"tested", "personal_tested"}
    (phase,) = Test(task, lambda *_: {}, ("", "personal")).plan()
    phase.check(sent.metrics, SiteSize(4))
    for name, value, words in (
        ("personal_test_paired_change", 1.5, "expected sums of scores"),
        ("personal_test_paired_squares", 0.0, "expected sums of scores"),
        ("personal_test_paired_n", 9.0, "of 4 at most"),
        ("test_dice/disc", 1e14, "test_dice/disc: expected a number in 0..1"),
        ("test_n", 2.5, "test_n: expected a whole number"),
        ("test_hd95_px/disc", -1.0, "test_hd95_px/disc: expected a number in 0..inf"),
        ("test_missed/disc", 1.1, "expected a number in 0..1"),
    ):
        assert name in sent.metrics
        with pytest.raises(ValueError, match=words):
            phase.check({**sent.metrics, name: value}, SiteSize(4))
    for name in ("test_n/disc", "personal_test_paired_before"):
        with pytest.raises(ValueError, match=name):
            phase.check({each: v for each, v in sent.metrics.items() if each != name}, SiteSize(4))


def test_an_own_model_is_compared_with_that_of_its_cluster_where_none_is_shared():
    test = slices([[1, 1]], [[1, 0]], ("p",))
    task = Task(name="discs", labels={"disc": (1,)}, size=(16, 16))
    models = dict.fromkeys(("cluster", "personal"), lambda each: per_scan(each, each.targets))
    metrics = score_once(models, SiteData("S", test, test, test, None), task).metrics
    (change, _) = final_changes([RoundEntry("test", 0, 1, 0.0, {"A": entry_of(metrics)})])
    assert (change.model, change.base, change.together.change) == ("personal", "cluster", 0.0)
    assert change.together.low is None


def test_site_keeps_the_scores_of_each_patient_beside_what_it_has() -> None:
    images = np.array([0, 1, 1], np.float32).reshape(3, 1, 1, 1)
    test = Images(images, np.array([0, 1, 0]), ("b", "a", "b"), ("x", "y", "z"), (0, 0, 0))
    own = Memory({"w": torch.ones(2)}, {"else": 1})
    models = {"": predicting(Says(2), 2), "personal": None}
    result = score_once(models, SiteData("S", test, test, test, None), PICTURES, own)
    assert result.memory is not None
    assert TESTED.read(result.memory).scores == {"": {"b": (1.0, 0.0), "a": (1.0,)}}
    assert result.memory.facts["else"] == 1
    assert torch.equal(result.memory.tensors["w"], own.tensors["w"])
    # None of it leaves the site.
    assert set(result.uploads) == {"tested", "personal_tested"}


def test_a_label_that_is_found_in_no_patient_is_a_warning():
    metrics = {"test_dice": 0.4, "test_n": 3.0, "test_dice/disc": 0.8, "test_n/disc": 3.0}
    never = {"test_dice/cup": 0.0, "test_n/cup": 3.0, "val_dice/cup": 0.0, "val_n/cup": 2.0}
    # Its own model does not find it either, in the same patients.
    own = {"personal_test_dice/cup": 0.0, "personal_test_n/cup": 3.0}
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of({**metrics, **never, **own})})
    (warning,) = never_found([entry])
    assert warning.startswith("label 'cup' is never found: its Dice is 0 in all 5 patients that were scored")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda scores: scores[:, :1], "expected scores of shape"),
        (lambda scores: scores + torch.tensor([0.0, 99.0]), "12 at most"),
        (lambda scores: scores + torch.tensor([9.0, 0.0]), "numbers in 0..1"),
    ],
)
def test_scores_that_no_site_of_its_size_can_have_are_rejected(change, words):
    (group,) = FedAvg(FedAvgConfig(width=2), FUNDUS).plan()[-1].uploads
    scores = torch.zeros(2, 3, 2, dtype=torch.float64)
    group.check({"scores": scores}, SiteSize(12))
    with pytest.raises(ValueError, match=words):
        group.check({"scores": change(scores)}, SiteSize(12))


def test_the_published_model_is_tested_after_its_last_change():
    config = FedAvgConfig(width=2, rounds=1)
    task = Task(name="discs", labels={"disc": (1,)}, size=(32, 32))
    algorithm = FedAvg(config, task)
    last = algorithm.plan()[-1]
    assert (last.name, last.rounds, last.everyone, last.consent) == ("test", 1, True, False)
    server = algorithm.initial(context("initial", 0, 1))
    sent = last.broadcast(server, "A")
    assert all(
        torch.equal(t, sent["weights"][n]) for n, t in algorithm.train.slot.read(server).selected.items()
    )
    data = site_data("A", 4, 2, 0)
    result = last.client_step(context("test", 0, site="A"), sent, Memory(), data)
    assert set(result.uploads) == {"tested"}
    assert result.metrics["val_n"] == 1.0
