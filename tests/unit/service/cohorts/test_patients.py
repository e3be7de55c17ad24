"""The patient of a scan; the split into training and validation: by patient, with a target on both sides."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from model_store.task import Task
from service.cohorts.patients import numbered, other_values, same_bytes, shows_target, split_by_patient
from service.errors import AdaptationRejected

TASK = Task(name="tumour", labels={"tumour": (2,)}, background=(0, 1), size=(32, 32))
BY_NUMBER = TASK.model_copy(update={"patient": r"^case-(?P<patient>\d+)"})


def digests(names: Iterable[str]) -> dict[str, str]:
    """Bytes that no other scan has."""
    return {name: f"digest of {name}" for name in names}


def test_numbered_gives_one_patient_per_match_and_per_unmatched_name() -> None:
    names = ["case-7-a.png", "case-3-a.png", "portrait.png", "case-7-b.png", "odd.png", "case-3-b.nii.gz"]
    assert numbered(names, BY_NUMBER) == [0, 1, 2, 0, 3, 1]
    assert numbered(names, TASK) == [0, 1, 2, 3, 4, 5]


def test_shows_target_requires_a_foreground_value() -> None:
    assert shows_target([0, 1, 2], TASK)
    assert not shows_target([0, 1], TASK)


def test_other_values_reports_masks_without_target_values() -> None:
    scans = {name: name * 64 for name in "ab"}
    assert other_values({"empty": [0], "ill": [0, 1, 2]}, scans, TASK) is None
    said = other_values({"empty": [0], "a": [0, 1], "ill": [0, 2], "b": [1]}, scans, TASK)
    assert said is not None
    assert said.startswith("2 masks count as drawn and without a target")
    assert "(scan aaaaaaaaaaaa: 1): the target's are 2;" in said
    one = other_values({"a": [0, 1]}, scans, TASK)
    assert one is not None
    assert one.startswith("1 mask counts as drawn and without a target")


def test_split_by_patient_separates_patients_with_a_target_on_each_side() -> None:
    drawn = {f"case-{patient}-{visit}.nii.gz": patient < 4 for patient in range(20) for visit in range(3)}
    for seed in range(5):
        split = split_by_patient(drawn, digests(drawn), BY_NUMBER, 0.25, seed)
        sides = [{split.patients[name] for name in names} for names in (split.train, split.validation)]
        assert sides[0].isdisjoint(sides[1])
        assert {*split.train, *split.validation} == {*drawn}
        # A quarter of 4 patients with a target, and of 16 without.
        assert [len({p for p in side if int(p) < 4}) for side in sides] == [3, 1]
        assert [split.count(split.train), split.count(split.validation)] == [15, 5]
        assert split.deciding == 1
    backwards = dict(reversed(drawn.items()))
    assert split_by_patient(drawn, digests(drawn), BY_NUMBER, 0.25, 0) == split_by_patient(
        backwards, digests(backwards), BY_NUMBER, 0.25, 0
    )


def test_split_by_patient_joins_patients_that_share_scan_bytes() -> None:
    """3 and 9 share a scan, 9 and 5 another: none of them may choose an epoch for what another taught."""
    drawn = {f"case-{patient}-{visit}": True for patient in range(10) for visit in range(2)}
    bytes_of = (
        digests(drawn)
        | dict.fromkeys(("case-3-0", "case-9-1"), "a")
        | dict.fromkeys(("case-9-0", "case-5-0"), "b")
    )
    assert same_bytes(drawn, bytes_of) == [["case-3-0", "case-9-1"], ["case-5-0", "case-9-0"]]
    for seed in range(8):
        split = split_by_patient(drawn, bytes_of, BY_NUMBER, 0.5, seed)
        together = {f"case-{patient}-{visit}" for patient in (3, 5, 9) for visit in range(2)}
        assert len({split.patients[name] for name in together}) == 1
        assert together <= {*split.train} or together <= {*split.validation}
        assert split.count(drawn) == 8
    with pytest.raises(AdaptationRejected, match="found 1 among 2 masks of 1 patients"):
        split_by_patient({"case-1": True, "case-2": True}, {"case-1": "a", "case-2": "a"}, BY_NUMBER, 0.5, 0)


def test_split_by_patient_without_a_pattern_treats_each_scan_as_a_patient() -> None:
    drawn = {"a.png": True, "ward/b.nii.gz": True, "c": False}
    split = split_by_patient(drawn, digests(drawn), TASK, 0.5, 0)
    assert dict(split.patients) == {"a.png": "a", "ward/b.nii.gz": "ward/b", "c": "c"}
    # The only patient without a target is learned from.
    assert "c" in split.train


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        ({}, "no scan of the cohort has a mask"),
        ({"case-1": True}, "found 1 among 1 masks of 1 patients"),
        ({"case-1-a": True, "case-1-b": True}, "found 1 among 2 masks of 1 patients"),
        ({"case-1": True, "case-2": False}, "found 1 among 2 masks of 2 patients"),
        ({"case-1": True, "scan": True}, "^scan digest of sc: no patient in the name"),
    ],
)
def test_split_by_patient_with_too_few_patients_is_rejected(drawn: dict[str, bool], words: str) -> None:
    with pytest.raises(AdaptationRejected, match=words):
        split_by_patient(drawn, digests(drawn), BY_NUMBER, 0.2, 0)


def test_split_by_patient_error_shows_the_pattern_of_the_task() -> None:
    with pytest.raises(AdaptationRejected) as refused:
        split_by_patient({"case-1.png": True}, {"case-1.png": "a"}, BY_NUMBER, 0.2, 0)
    assert f"by {BY_NUMBER.patient})" in str(refused.value)
