from __future__ import annotations

from pathlib import Path

import pytest

from training.data.cases import Case, Site
from training.data.splits import all_for_testing, folds, split_by_patient
from training.errors import FederationError


def site(patients: int, files_each: int = 3, name: str = "north", **splits: str) -> Site:
    cases = tuple(
        Case(Path(f"p{p:02d}_{i}.png"), Path("m.png"), f"p{p:02d}", splits.get(f"p{p:02d}"))
        for p in range(patients)
        for i in range(files_each)
    )
    return Site(name, cases)


def patients_of(divided: Site) -> dict[str, set[str]]:
    return {s: {c.patient for c in divided.of_split(s)} for s in ("train", "val", "test")}


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (4, (2, 1, 1)), (10, (6, 2, 2)), (25, (16, 4, 5))],
)
def test_split_by_patient_gives_each_split_the_expected_number(
    count: int, sizes: tuple[int, int, int]
) -> None:
    by_split = patients_of(split_by_patient(site(count), seed=0))
    assert tuple(len(by_split[s]) for s in ("train", "val", "test")) == sizes


def test_split_by_patient_puts_each_patient_in_one_split() -> None:
    divided = split_by_patient(site(11), seed=3)
    by_split = patients_of(divided)
    assert sum(map(len, by_split.values())) == 11
    assert set.union(*by_split.values()) == set(site(11).patients)
    assert len(divided.cases) == 33
    assert all(case.split is not None for case in divided.cases)


def test_split_by_patient_depends_on_seed_and_site_but_not_on_case_order() -> None:
    first = patients_of(split_by_patient(site(12), seed=1))
    shuffled = Site("north", tuple(reversed(site(12).cases)))
    assert patients_of(split_by_patient(shuffled, seed=1)) == first
    assert patients_of(split_by_patient(site(12), seed=2)) != first
    assert patients_of(split_by_patient(site(12, name="south"), seed=1)) != first


def test_split_by_patient_gives_the_pinned_split() -> None:
    """Pinned values: a resumed run must find every patient in its earlier split."""
    by_split = patients_of(split_by_patient(site(10), seed=0))
    assert by_split["test"] == {"p02", "p06"}
    assert by_split["val"] == {"p04", "p07"}


def test_split_by_patient_keeps_given_splits_and_draws_only_the_others() -> None:
    by_split = patients_of(split_by_patient(site(8, p00="test", p01="test"), seed=0))
    assert by_split["test"] == {"p00", "p01"}
    assert len(by_split["val"]) == 1
    assert len(by_split["train"]) == 5
    by_split = patients_of(split_by_patient(site(8, p00="test", p01="val"), seed=0))
    assert (by_split["test"], by_split["val"]) == ({"p00"}, {"p01"})
    by_split = patients_of(split_by_patient(site(8, p00="train"), seed=0))
    assert by_split["train"] == {"p00"}
    assert by_split["val"]
    assert by_split["test"]


def test_patients_without_split_train_when_all_splits_are_given() -> None:
    by_split = patients_of(split_by_patient(site(6, p00="test", p01="val", p02="train"), seed=0))
    assert by_split["train"] == {"p02", "p03", "p04", "p05"}


def test_split_by_patient_without_training_patients_is_rejected() -> None:
    with pytest.raises(FederationError, match="north: none of its 2 patients is in the split 'train'"):
        split_by_patient(site(2, p00="test", p01="val"), seed=0)


def test_split_by_patient_with_test_share_0_has_no_test_split() -> None:
    by_split = patients_of(split_by_patient(site(2), seed=0, test=0, val=0.5))
    assert (len(by_split["train"]), len(by_split["val"]), len(by_split["test"])) == (1, 1, 0)


def test_all_for_testing_puts_every_patient_in_test() -> None:
    by_split = patients_of(all_for_testing(site(4, p00="train")))
    assert by_split == {"train": set(), "val": set(), "test": {"p00", "p01", "p02", "p03"}}


@pytest.mark.parametrize(("count", "k"), [(14, 5), (5, 5), (2, 2), (7, 3)])
def test_folds_put_each_patient_in_test_exactly_once(count: int, k: int) -> None:
    versions = folds(site(count), k, seed=0)
    tested = [p for v in versions for p in patients_of(v)["test"]]
    assert sorted(tested) == list(site(count).patients)
    for version in versions:
        by_split = patients_of(version)
        assert by_split["train"]
        assert not by_split["train"] & by_split["val"]
        assert sum(map(len, by_split.values())) == count
    assert max(len(patients_of(v)["test"]) for v in versions) - count // k <= 1
    assert folds(site(count), k, seed=0) == versions


def test_more_folds_than_patients_is_rejected() -> None:
    with pytest.raises(ValueError, match="4 folds of 3 patients"):
        folds(site(3), 4, seed=0)
