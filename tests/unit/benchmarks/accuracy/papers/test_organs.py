"""The lists of images of one patient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy.papers.organs import PLACES, read, regrouped
from model_store.task import Task
from training.data.cases import Case, Federation, Site

TASK = Task(name="t", labels={"tumour": (255,)}, channels=1, size=(32, 32))


def _federation(*names: str) -> Federation:
    site = Site("here", tuple(Case(Path(name), Path(name), name[:1]) for name in names))
    return Federation(Path(), TASK, (site, replace(site, name="there")), False, "")


def test_listed_files_become_one_patient_of_their_site_alone() -> None:
    found = regrouped(_federation("a.png", "b.png", "c.png"), {"here": [["a.png", "c.png"]]})
    assert [case.patient for case in found.site("here").cases] == ["a.png", "b", "a.png"]
    assert [case.patient for case in found.site("there").cases] == ["a", "b", "c"]


def test_lists_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"site 'here' has no x\.png \(1 files"):
        regrouped(_federation("a.png"), {"here": [["a.png", "x.png"]]})


def test_no_file_is_in_two_lists() -> None:
    assert set(read()) <= set(PLACES)
    for site, patients in read().items():
        names = [name for patient in patients for name in patient]
        assert len(names) == len(set(names)), site
        assert all(len(patient) > 1 for patient in patients)


def test_there_are_twelve_bladders() -> None:
    sizes = [len(patient) for patient in read()["bladder_mri"]]
    assert sizes == [4, 11, 6, 33, 23, 33, 22, 37, 30, 7, 14, 44]
