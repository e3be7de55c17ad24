"""Scores of the published model, taken once: by hand, by label, with their n."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from model_store.task import Task
from tests.helpers.training.sites import context, site_data
from training.algorithm import Memory, RoundResult, SiteSize
from training.data.classification.dataset import LabelledData
from training.data.examples import Examples
from training.data.segmentation.dataset import SiteData
from training.engine.history import RoundEntry, SiteEntry, final_scores, never_found
from training.methods.common.tested import keep_scores, score_once, scored_metrics
from training.methods.fedavg import FedAvg, FedAvgConfig

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


def slices(found: list[list[int]], true: list[list[int]], patients: tuple[str, ...]) -> Examples:
    images = np.array(found, np.float32).reshape(len(found), 1, 1, -1)
    targets = np.array(true, np.uint8).reshape(len(true), 1, -1)
    return Examples(images, targets, patients, patients, tuple(range(len(found))))


def test_dice_is_by_patient_and_label_with_the_patients_that_have_one():
    # Patient p has two slices. Of r there is neither disc nor cup.
    test = slices(
        [[1, 1, 2, 0], [0, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
        [[1, 2, 2, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        ("p", "p", "q", "r"),
    )
    data = SiteData("S", test, test, test, None)
    result = score_once(Says(3), data, FUNDUS, 2)
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
    assert result.metrics == expected
    held_out = SiteData("S", test, slices([[2, 0]], [[2, 0]], ("v",)), test, None)
    more = score_once(Says(3), held_out, FUNDUS, 2)
    validated = {"val_n": 1.0, "val_dice/disc": 1.0, "val_n/disc": 1.0, "val_dice/cup": 1.0, "val_n/cup": 1.0}
    assert more.metrics == {**expected, **validated}
    sites = {"A": dict(result.uploads["tested"]), "B": dict(more.uploads["tested"])}
    server = keep_scores(
        context("test", 0), Memory(), RoundResult({}, {"tested": sites}, {"A": 1.0, "B": 1.0}, {})
    )
    together = scored_metrics(server.facts, FUNDUS)
    assert together == {**expected, "test_n": 4.0, "test_n/disc": 4.0, "test_n/cup": 2.0, **validated}
    entry = RoundEntry(
        "test", 0, 1, 0.0, {site: entry_of(each.metrics) for site, each in (("A", result), ("B", more))}
    )
    assert {(each.split, each.label): each.count for each in final_scores([entry])}["test", "disc"] == 4
    assert never_found([entry]) == []


def entry_of(metrics) -> SiteEntry:
    return SiteEntry(1.0, metrics, {}, {}, (), 0.0)


def test_accuracy_counts_images():
    images = np.array([0, 1, 1], np.float32).reshape(3, 1, 1, 1)
    test = Examples(images, np.array([0, 1, 0]), ("a",) * 3, ("a",) * 3, (0, 1, 2))
    task = Task(name="t", kind="classification", class_names=("no", "yes"), size=(8, 8))
    result = score_once(Says(2), LabelledData("S", test, test, test, None), task, 2)
    assert result.metrics == {"test_accuracy": pytest.approx(2 / 3), "test_n": 3.0}


def test_a_label_that_is_found_in_no_patient_is_a_warning():
    metrics = {"test_dice": 0.4, "test_n": 3.0, "test_dice/disc": 0.8, "test_n/disc": 3.0}
    never = {"test_dice/cup": 0.0, "test_n/cup": 3.0, "val_dice/cup": 0.0, "val_n/cup": 2.0}
    entry = RoundEntry("test", 0, 1, 0.0, {"A": entry_of({**metrics, **never})})
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
    server = Memory(server.tensors, {"best": None, "latest": {"val_dice": None, "round": 0}})
    sent = last.broadcast(server, "A")
    assert all(torch.equal(t, sent["weights"][n]) for n, t in algorithm.selected(server)[0].items())
    data = site_data("A", 4, 2, 0)
    result = last.client_step(context("test", 0, site="A"), sent, Memory(), data)
    assert set(result.uploads) == {"tested"}
    assert result.metrics["val_n"] == 1.0
