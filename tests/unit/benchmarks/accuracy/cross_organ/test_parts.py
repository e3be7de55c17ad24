from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.accuracy.cross_organ.arms import CONTROLS, TRAINED, joining, one_stage
from benchmarks.accuracy.cross_organ.data import Hospitals, few_labels, load_inside, thinned
from benchmarks.accuracy.cross_organ.experiment import PROFILES, cells_of
from benchmarks.accuracy.cross_organ.judging import by_patient, judged
from model_store.task import Task
from training.data.cases import Case, Federation, Site
from training.data.segmentation.dataset import SliceSet
from training.methods.fedoap.config import FedOapConfig

TASK = Task(name="t", labels={"tumour": (255,)}, channels=1, size=(32, 32))


def _site(*patients: int) -> Site:
    """A site of images 0, 1, 2, ..., so many of each patient."""
    owners = [f"p{patient}" for patient, count in enumerate(patients) for _ in range(count)]
    cases = (Case(Path(f"{n}.png"), Path(f"{n}.png"), owner) for n, owner in enumerate(owners))
    return Site("s", tuple(sorted(cases, key=lambda case: case.name)))


def _numbers(cases: tuple[Case, ...]) -> list[int]:
    return sorted(int(case.name.removesuffix(".png")) for case in cases)


def test_few_labels_are_of_one_stretch_which_nothing_near_is_tested_on() -> None:
    seen = set()
    for seed in range(3):
        test, versions = few_labels(_site(*[1] * 30), seed, (5, 10, 20))
        # Two on either side of the stretch of twenty are left out.
        assert len(test) == 30 - 20 - 4
        seen |= {case.name for case in test}
        used = {case.name for site in versions.values() for case in site.cases}
        assert len(used) == 20
        for budget, validating in ((5, 1), (10, 2), (20, 4)):
            assert len(versions[budget].cases) == budget
            assert len(versions[budget].of_split("val")) == validating
        assert {case.name for case in versions[5].cases} <= {case.name for case in versions[10].cases}
    assert len(seen) == 18
    # Seed 0 takes the numbers 0 to 19, in the order of numbers and not of names.
    assert _numbers(few_labels(_site(*[1] * 30), 0, (20,))[0]) == list(range(22, 28))


def test_a_patient_is_labelled_or_tested_and_trains_or_validates() -> None:
    for seed in range(3):
        test, versions = few_labels(_site(4, 3, 7, 2, 6, 5, 8, 1, 6), seed, (5, 10, 20))
        for budget, site in versions.items():
            train, val = ({case.patient for case in site.of_split(split)} for split in ("train", "val"))
            assert train
            assert val
            assert not train & val
            assert not {case.patient for case in test} & (train | val)
            assert len(site.of_split("val")) <= max(2, budget // 5)
    # Seed 0: the stretch 0 to 19 ends within the patient of 16 to 21, who is not tested at all.
    assert _numbers(few_labels(_site(4, 3, 7, 2, 6, 5, 8, 1, 6), 0, (20,))[0]) == list(range(24, 40))


def test_a_site_too_small_for_the_budgets_is_refused() -> None:
    with pytest.raises(ValueError, match="20 images, expected more than 20"):
        few_labels(_site(*[1] * 20), 0, (5, 20))
    with pytest.raises(ValueError, match="no patient is left to test"):
        few_labels(_site(*[1] * 24), 0, (5, 20))
    with pytest.raises(ValueError, match="5 labelled images are of one patient"):
        few_labels(_site(6, 9), 0, (5,))


@pytest.fixture
def written(tmp_path: Path) -> Site:
    """Ten patients of two images, as files."""
    cases = []
    for number in range(20):
        mask = np.zeros((32, 32), np.uint8)
        mask[4:9, number : number + 6] = 255
        paths = [tmp_path / folder / f"{number}.png" for folder in ("images", "masks")]
        for path, pixels in zip(paths, (mask // 2, mask), strict=True):
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(path)
        cases.append(Case(*paths, f"p{number // 2}"))
    return Site("s", tuple(cases))


def test_every_patient_is_on_one_side_and_tested_by_one_seed_in_five(written: Site) -> None:
    tested: list[str] = []
    for seed in range(5):
        data, tests = load_inside(written, TASK, seed, (100, 100))
        sides = [set(data.train.patients), set(data.val.patients), set(tests.patients.values())]
        assert all(sides)
        assert sum(map(len, sides)) == len(set.union(*sides)) == 10
        tested += sides[2]
    assert sorted(tested) == sorted(written.patients)
    assert set(load_inside(written, TASK, 5, (100, 100))[1].patients.values()) != set(tested[:2])


def test_the_cells_of_a_seed_read_their_images_once(written: Site) -> None:
    outside = replace(written, name="brain_mri_t1ce")
    hospitals = Hospitals(Federation(Path(), TASK, (written, outside), False, ""))
    once = hospitals.inside(0, 32, (100, 100))
    assert list(once.data) == list(once.tests) == ["s"]
    assert hospitals.inside(0, 32, (100, 100)) is once
    assert hospitals.inside(1, 32, (100, 100)) is not once
    few = hospitals.outside(0, 32, (4, 8))
    assert list(few.tests) == list(few.labelled) == ["brain_mri_t1ce"]
    assert hospitals.outside(0, 32, (4, 8)) is few


def test_where_nearly_all_images_are_of_one_patient_nobody_joins(written: Site) -> None:
    breast = replace(written, name="breast_dce_mri")
    found = Hospitals(Federation(Path(), TASK, (breast,), False, "")).outside(0, 32, (4, 8))
    assert found.labelled == {}
    assert len(found.tests["breast_dce_mri"].patients) == 20


def test_dice_of_an_image_with_a_tumour_and_alarms_without_one() -> None:
    truth = torch.zeros(1, 40, 40, dtype=torch.uint8)
    truth[0, 0, :4] = 1
    predicted = torch.zeros_like(truth)
    predicted[0, 0, 2:8] = 1
    assert judged(predicted, truth) == pytest.approx(2 * 2 / (4 + 6))
    nothing, speck = torch.zeros_like(truth), torch.zeros_like(truth)
    speck[0, 0, 0] = 1  # one of 1600 pixels
    assert judged(predicted, nothing) is True
    assert judged(speck, nothing) is False
    assert judged(nothing, nothing) is False


def test_images_are_put_together_by_patient() -> None:
    images = {"a1": 0.5, "a2": 0.7, "a3": True, "b1": False, "b2": True}
    patients = {name: name[0] for name in images}
    assert by_patient(images, patients) == {"a": (0.6, 2, 1, 1), "b": (None, 0, 1, 2)}


def test_thinned_slices_are_evenly_spaced() -> None:
    count = np.arange(10)
    names = tuple(map(str, count))
    slices = SliceSet(
        count.reshape(10, 1, 1, 1).astype(np.float32),
        count.reshape(10, 1, 1).astype(np.uint8),
        names,
        names,
        tuple(range(10)),
    )
    few = thinned(slices, 4)
    assert few.images.flatten().tolist() == [0, 2, 5, 7]
    assert few.patients == few.cases == ("0", "2", "5", "7")
    assert few.positions == (0, 2, 5, 7)
    assert thinned(slices, 10) is slices


@pytest.mark.parametrize(("images", "epochs"), [(3, 60), (4, 60), (8, 30), (9, 20), (16, 15), (18, 12)])
def test_every_budget_of_labels_takes_the_same_steps(images: int, epochs: int) -> None:
    found = joining(images, {"steps": 60, "batch": 4}, "plain", seed=7)
    assert (found.batch_size, found.epochs, found.loss, found.seed) == (4, epochs, "plain", 7)
    assert joining(images, {"steps": 60, "batch": 4}, "perturbed", seed=7).loss == "perturbed"


def test_steps_that_are_no_whole_epochs_or_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"30 steps are no whole epochs of 4 batches \(16 images\)"):
        joining(16, {"steps": 30, "batch": 4}, "plain", seed=0)
    uneven = FedOapConfig(local_steps=20, fine_tune_rounds=1, fine_tune_steps=30)
    with pytest.raises(ValueError, match="the 30 steps of stage 2 are no whole rounds of 20 steps"):
        one_stage(uneven)
    even = one_stage(FedOapConfig(rounds=3, local_steps=20, fine_tune_rounds=2, fine_tune_steps=30))
    assert (even.rounds, even.fine_tune_rounds, even.attention, even.adapter) == (6, 0, False, False)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_can_be_divided_and_chooses_no_round(profile: str) -> None:
    settings = PROFILES[profile]
    config = FedOapConfig(**settings.method)
    assert config.selection == "last"
    assert config.local_steps % 2 == 0
    one_stage(config)
    for images in range(1, max(settings.budgets)):
        joining(images, {"steps": settings.joining_steps, "batch": settings.joining_batch}, "plain", 0)


def test_other_patients_are_other_cells_and_controls_come_last() -> None:
    cells = cells_of("cpu", PROFILES["cpu"], "one")
    assert [(cell["trained"], cell["seed"]) for cell in cells[-2:]] == [(control, 0) for control in CONTROLS]
    assert len(cells) == 3 * len(TRAINED) + 2
    longer = cells_of("longer", PROFILES["longer"], "one")
    assert [cell["seed"] for cell in longer[-6:]] == [0, 0, 1, 1, 2, 2]
    assert {cell["trained"] for cell in longer[-6:]} == {*CONTROLS}
    assert len(longer) == 3 * len(TRAINED) + 6
    assert not any(cell in cells for cell in cells_of("cpu", PROFILES["cpu"], "another"))
