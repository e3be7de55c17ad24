"""The comparison of a version with its parent: sums against the plain figures, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from tests.helpers.training.classified_sites import CORNERS
from tests.helpers.training.sites import TASK, per_scan, site_data
from training.algorithm import RoundResult, SiteSize
from training.local.slices import Slices
from training.parts.judge import JUDGED, Judged, check_judged, judge_once
from training.parts.test import Predict


def _sums(*values: float) -> dict[str, torch.Tensor]:
    return {"sums": torch.tensor(values, dtype=torch.float64)}


def by_scan(data: Slices, answer: Callable[[object], torch.Tensor]) -> Predict:
    """What answers slices, scan by scan."""
    return lambda examples: per_scan(data, answer(examples).numpy())


def test_the_change_is_that_of_patients_and_its_range_is_of_student() -> None:
    data = site_data("s", 4, 8, seed=1)
    truth = torch.from_numpy(data.val.targets)

    def parent(examples: object) -> torch.Tensor:
        return torch.roll(truth, 2, dims=1)

    def version(examples: object) -> torch.Tensor:
        answer = truth.clone()
        answer[0] = 0
        return answer

    sent = judge_once(by_scan(data.val, parent), by_scan(data.val, version), data, 2)
    found = RoundResult({}, {JUDGED.name: {"s": sent.uploads[JUDGED.name]}}, {"s": 1.0}, {})
    judged = Judged.of(found).facts(TASK, "base@sha256:0")["judged"]["all"]

    # Patient by patient, by the definition of Dice.
    changes, before = [], []
    for patient in dict.fromkeys(data.val.patients):
        mine = [index for index, name in enumerate(data.val.patients) if name == patient]
        scores = []
        for answer in (parent(None)[mine].numpy(), version(None)[mine].numpy()):
            target = truth[mine].numpy()
            scores.append(2 * np.logical_and(answer, target).sum() / (answer.sum() + target.sum()))
        before.append(scores[0])
        changes.append(scores[1] - scores[0])
    low, high = stats.t.interval(0.95, len(changes) - 1, np.mean(changes), stats.sem(changes))
    assert judged["count"] == len(changes) == 4
    assert judged["parent"] == pytest.approx(np.mean(before))
    assert judged["change"] == pytest.approx(np.mean(changes))
    assert (judged["low"], judged["high"]) == (pytest.approx(low), pytest.approx(high))


def test_a_patient_without_target_counts_where_one_of_both_finds_one() -> None:
    data = site_data("s", 4, 4, seed=1, empty=True)
    truth = torch.from_numpy(data.val.targets)

    def nothing(examples: object) -> torch.Tensor:
        return truth

    def something(examples: object) -> torch.Tensor:
        answer = truth.clone()
        answer[0, :3] = 1
        return answer

    none, one = by_scan(data.val, nothing), by_scan(data.val, something)
    sums = judge_once(none, one, data, 2).uploads[JUDGED.name]["sums"]
    assert sums.tolist() == [1, 1, 0, -1, 1]
    assert judge_once(none, none, data, 2).uploads[JUDGED.name]["sums"].tolist() == [0] * 5


def test_nothing_is_judged_on_patients_that_are_trained_on_or_without_a_version() -> None:
    data = site_data("s", 4, 4, seed=1)

    def answer(examples: object) -> list[torch.Tensor]:
        return per_scan(data.val, data.val.targets)

    assert judge_once(answer, None, data, 2).uploads == {JUDGED.name: {}}
    trained = type(data)("s", data.train, data.all_train, data.test, None)
    assert judge_once(answer, answer, trained, 2).uploads == {JUDGED.name: {}}
    assert Judged().facts(CORNERS, "base") == {}


def test_a_single_patient_has_a_change_and_no_range() -> None:
    judged = Judged({"s": [1.0, 0.5, 0.75, 0.25, 0.0625]}).facts(TASK, "b")["judged"]
    assert judged["all"] == judged["sites"]["s"]
    assert (judged["all"]["change"], judged["all"]["low"]) == (0.25, None)


@pytest.mark.parametrize(
    "values",
    [
        (2, 3, 1, -2, 1),
        (2, 1, 1, 0.5, 1),
        (1.5, 1, 1, 0, 0),
        (2, 1, 1, 0, 3),
        (2, 1, math.nan, 0, 0),
        (9, 1, 1, 0, 0),
    ],
)
def test_sums_that_no_site_can_have_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected sums of scores in 0\.\.1"):
        check_judged(_sums(*values), SiteSize(scored=8))
    check_judged(_sums(2, 1, 1.5, 0.5, 0.25), SiteSize(scored=8))
    with pytest.raises(ValueError, match="of shape"):
        check_judged(_sums(1, 1), SiteSize())
