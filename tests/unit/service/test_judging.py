"""Whose slices are judged as one, and what a candidate is held against: halves of the hospital's patients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from model_store.digest import sha256
from model_store.guard import ReferenceStatistics
from model_store.scan import Limits
from model_store.task import Task
from personalization.routing.config import AdaptationConfig
from service.adaptation.cohort import CohortImages, load_images
from service.adaptation.judging import _rivals
from service.jobs.cohort_files import ScanFile

TASK = Task(name="spots", labels={"spot": (1,)}, size=(16, 16), patient=r"^(?P<patient>\w+)-")


def test_a_cohort_knows_whose_its_slices_are(tmp_path: Path) -> None:
    files = []
    draw = np.random.default_rng(0)
    for name in ("anna-1.png", "anna-2.png", "bert-1.png"):
        Image.fromarray(draw.integers(255, size=(20, 20), dtype=np.uint8)).save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        files.append(ScanFile(name, tmp_path / name, sha256(data).removeprefix("sha256:")))
    cohort = load_images(files, TASK, None, Limits(), lambda: None)
    assert cohort.patient_of_image.tolist() == [0, 0, 1]
    assert cohort.scan_of_image.tolist() == [0, 1, 2]


def rivals(patients: list[int]) -> dict[str, tuple[int, list[int]]]:
    cohort = CohortImages(
        torch.zeros(len(patients), 1, 4, 4),
        np.arange(len(patients)),  # every image a file of its own
        np.array(patients),
        0.0,
        ReferenceStatistics.model_construct(),
        0,
    )
    found = _rivals(cohort, AdaptationConfig(seed=5))
    return {name: (seed, chosen.tolist()) for name, seed, chosen in found}


def test_halves_share_no_patient_and_leave_none_out() -> None:
    patients = [0, 0, 1, 2, 2, 2, 3, 1, 4]
    found = rivals(patients)
    assert found["another seed"] == (6, list(range(9)))
    halves = [found[f"half {half} of the scans"] for half in (1, 2)]
    assert [seed for seed, _ in halves] == [5, 5]
    sides = [{patients[image] for image in chosen} for _, chosen in halves]
    assert sides == [{0, 2, 4}, {1, 3}]
    assert sorted(image for _, chosen in halves for image in chosen) == list(range(9))


def test_many_slices_of_few_patients_have_no_halves() -> None:
    assert list(rivals([0, 1, 2] * 20)) == ["another seed"]
