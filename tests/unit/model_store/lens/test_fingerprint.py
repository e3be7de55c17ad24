"""What members say of their scans, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from model_store.lens import KINDS, Fingerprint, Seen, check_seen, seen_of
from model_store.lens.features import FEATURES, entries_of, standardised
from model_store.lens.fingerprint import KindPrint


def of_means(*means: float, variance: float = 0.0, patients: int = 4) -> list[Seen]:
    return [Seen(np.full((1, 12), mean), variance, patients) for mean in means]


def test_tau_is_the_natural_squared_shift_of_a_hospital_from_outside() -> None:
    # Members at 0, 3 and 6: D = 9, 0, 9, and s = 2 / 4; the one in the middle has as good as no shift.
    found = KindPrint.of(of_means(0, 3, 6, variance=2))
    expected = (4 / 2) * math.exp((2 * math.log(9 - 0.5) + math.log(1e-8)) / 3)
    assert found.tau == pytest.approx(expected)
    assert (found.mean[0][0], found.patient) == (3, 2)


def test_a_fifth_of_a_shift_is_natural_at_least() -> None:
    # D = 1 for both, and the choice of patients would explain 5.
    found = KindPrint.of(of_means(-1, 1, variance=20))
    assert found.tau == pytest.approx(3 * 0.2)


def test_the_shift_of_a_hospital_is_over_what_is_natural_and_what_its_patients_bring() -> None:
    known = KindPrint(mean=((0.0,) * 12,), tau=2.0, patient=6.0)
    (hospital,) = of_means(4, variance=8, patients=4)
    assert known.shift(hospital) == pytest.approx(16 / (2 + 2))
    (one,) = of_means(4, patients=1)
    assert known.shift(one) == pytest.approx(16 / (2 + 6))


def test_patients_count_alike_however_many_slices_they_have() -> None:
    rng = np.random.default_rng(1)
    cohort = [("a", rng.normal(size=(3, 1, 16, 16)).astype(np.float32))]
    cohort += [("b", rng.gamma(1, size=(1, 1, 16, 16)).astype(np.float32))]
    cohort += [("a", rng.normal(size=(2, 1, 16, 16)).astype(np.float32))]
    cohort += [("c", np.full((1, 1, 16, 16), 5, np.float32))]  # constant, so that it says nothing
    found = seen_of(cohort)
    a = np.concatenate([cohort[0][1], cohort[2][1]])
    for kind in KINDS:
        means = [FEATURES[kind](standardised(each)[0]).mean(axis=0) for each in (a, cohort[1][1])]
        np.testing.assert_allclose(found[kind].mean, np.mean(means, axis=0), atol=1e-9)
        assert found[kind].variance == pytest.approx(np.square(means[0] - means[1]).mean() / 2)
        assert found[kind].patients == 2
    assert seen_of([("c", cohort[3][1])]) == {}


def members(axes: int = 2, count: int = 3) -> list[dict[Any, Seen]]:
    rng = np.random.default_rng(2)
    return [
        {kind: Seen(rng.normal(size=(1, entries_of(kind, axes))), 0.1, 5) for kind in KINDS}
        for _ in range(count)
    ]


@pytest.mark.parametrize("axes", [2, 3])
def test_a_fingerprint_is_read_as_it_was_written(axes: int) -> None:
    made = Fingerprint.of(members(axes))
    assert made.axes == axes
    assert Fingerprint.model_validate_json(made.to_bytes()) == made


def test_the_likeness_is_that_of_the_member_that_is_least_like_the_others() -> None:
    made = members(count=3)
    fields = [member["field"].mean[0] for member in made]
    found = [np.corrcoef(fields[k], fields[k - 1] + fields[k - 2])[0, 1] for k in range(3)]
    assert Fingerprint.of(made).likeness == pytest.approx(min(found))


def test_of_one_group_the_spread_between_patients_times_a_factor_is_natural() -> None:
    rng = np.random.default_rng(3)
    shape = np.linspace(0, 1, 24)[:, None] * np.ones(24)
    images = [(shape + rng.normal(0, 0.3, (24, 24))).astype(np.float32)[None, None] for _ in range(4)]
    made = Fingerprint.of_one(seen_of(enumerate(images)))
    assert (made.members, made.axes) == (1, 2)
    # Five, and five thirds of it for four patients.
    assert made.factor == pytest.approx(5 * 5 / 3)
    for kind in KINDS:
        rows = np.array([FEATURES[kind](standardised(each)[0])[0] for each in images])
        variance = sum(np.square(rows[k] - rows.mean(axis=0)).mean() for k in range(4)) / 3
        found = made.of_kind(kind)
        np.testing.assert_allclose(found.mean_CE, rows.mean(axis=0))
        assert found.patient == pytest.approx(variance)
        assert found.tau == pytest.approx(5 * 5 / 3 * variance)
    assert Fingerprint.model_validate_json(made.to_bytes()) == made


def test_the_likeness_of_one_group_is_that_of_one_of_its_patients() -> None:
    rng = np.random.default_rng(4)
    shown = rng.normal(size=(1, 36))
    fields = shown + rng.normal(0, 0.5, size=(4000, 1, 36))
    group = {kind: Seen(rng.normal(size=(1, entries_of(kind, 2))), 0.1, 4000) for kind in KINDS}
    group["field"] = Seen(fields.mean(axis=0), float(fields.var(axis=0, ddof=1).mean()), 4000)
    found = [np.corrcoef(each[0], fields.mean(axis=0)[0])[0, 1] for each in fields]
    assert Fingerprint.of_one(group).likeness == pytest.approx(np.mean(found), abs=0.01)


def test_one_group_of_equal_patients_is_refused() -> None:
    image = np.random.default_rng(5).normal(size=(1, 1, 24, 24)).astype(np.float32)
    with pytest.raises(ValueError, match="found the same of each"):
        Fingerprint.of_one(seen_of([("a", image), ("b", image), ("c", image)]))


@pytest.mark.parametrize(("count", "factor"), [(1, None), (3, 5.0)])
def test_a_factor_is_of_one_group_and_of_no_more(count: int, factor: float | None) -> None:
    content = {**Fingerprint.of(members()).model_dump(mode="json"), "members": count, "factor": factor}
    with pytest.raises(ValueError, match="expected a factor of one group"):
        Fingerprint.model_validate(content)


def test_of_members_the_file_has_no_factor() -> None:
    assert b"factor" not in Fingerprint.of(members()).to_bytes()


def test_a_fingerprint_of_other_shapes_is_refused() -> None:
    content = Fingerprint.of(members()).model_dump(mode="json")
    content["spectrum"]["mean"] = [[0.0] * 11]
    with pytest.raises(ValueError, match="spectrum: expected means of 1 channels and 12 entries"):
        Fingerprint.model_validate(content)


@pytest.mark.parametrize(
    ("mean", "variance", "why"),
    [
        (np.zeros((1, 35)), 0.1, "expected means"),
        (np.full((1, 36), np.nan), 0.1, "at most"),
        (np.full((1, 36), 1e9), 0.1, "at most"),
        (np.zeros((1, 36)), -1.0, "variance"),
        (np.zeros((1, 36)), math.nan, "variance"),
    ],
)
def test_what_no_member_can_have_seen_is_refused(mean: Any, variance: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_seen("field", mean, variance)
