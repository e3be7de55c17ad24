from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cross_organ_arms import NO_DCA, WHOLE, joining
from benchmarks.cross_organ_data import by_patient, few_labels, judged, thinned
from benchmarks.cross_organ_methods import FedBn, FedPer
from benchmarks.cross_organ_report import alarm_scores, dice_scores, keep
from model_store.task import Task
from personalization.networks import build
from training.data.cases import Case, Site
from training.data.dataset import SliceSet
from training.methods.fedoap_config import FedOapConfig
from training.methods.local import new_network, state_of

TASK = Task(name="t", labels={"tumour": (255,)}, channels=1, size=(32, 32))
CONFIG = FedOapConfig(width=2, groups=4, attention=False, adapter=False)


def _site(count: int) -> Site:
    names = [Path(f"{index}.png") for index in range(count)]
    return Site("s", tuple(Case(name, name, name.name) for name in names))


def test_few_labels_are_of_one_stretch_which_nothing_is_tested_on() -> None:
    seen = set()
    for seed in range(3):
        test, versions = few_labels(_site(25), seed, (5, 10, 20))
        assert len(test) == 5
        seen |= {case.name for case in test}
        used = {case.name for site in versions.values() for case in site.cases}
        assert len(used) == 20
        assert not used & {case.name for case in test}
        for budget, validating in ((5, 1), (10, 2), (20, 4)):
            assert len(versions[budget].cases) == budget
            assert len(versions[budget].of_split("val")) == validating
        assert {case.name for case in versions[5].cases} <= {case.name for case in versions[10].cases}
    assert len(seen) == 15
    # Seed 0 takes the numbers 0 to 19, in the order of numbers and not of names.
    assert [c.name for c in few_labels(_site(25), 0, (20,))[0]] == [f"{n}.png" for n in range(20, 25)]


def test_a_site_too_small_for_the_budgets_is_refused() -> None:
    with pytest.raises(ValueError, match="20 images, expected more than 20"):
        few_labels(_site(20), 0, (5, 20))


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


@pytest.mark.parametrize(("images", "batch", "epochs"), [(4, 4, 30), (8, 8, 30), (16, 8, 15), (17, 8, 10)])
def test_every_budget_of_labels_takes_the_same_steps(images: int, batch: int, epochs: int) -> None:
    found = joining(images, 30, "plain", seed=7)
    assert (found.batch_size, found.epochs, found.loss, found.seed) == (batch, epochs, "plain", 7)
    assert joining(images, 30, "perturbed", seed=7).loss == "perturbed"


def test_what_stays_at_a_site_is_what_the_method_says() -> None:
    plain = state_of(new_network(FedPer(CONFIG, TASK).network, torch.Generator()))
    shared, personal = FedPer(CONFIG, TASK)._split(plain)
    assert {name.split(".")[0].rstrip("1234") for name in shared} == {"encoder", "bottleneck"}
    assert {name.split(".")[0].rstrip("1234") for name in personal} == {"upconv", "decoder", "head"}

    method = FedBn(CONFIG, TASK)
    network = build(method.network.name, **method.network.arguments)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == 18  # two in each of nine blocks
    assert not any(isinstance(module, torch.nn.InstanceNorm2d) for module in network.modules())
    shared, personal = method._split(state_of(network))
    assert len(personal) == 18 * 5  # weight, bias, mean, variance, count
    assert sum(t.numel() for t in shared.values()) == sum(t.numel() for t in plain.values())


def _row(arm: str, seed: int, **found: Any) -> dict[str, Any]:
    return {"cell": {"seed": seed}, "result": {"inside": {arm: found}, "outside": {}}}


def test_scores_are_of_patients_who_have_them() -> None:
    rows = [_row(WHOLE, 2, east={"a": [0.5, 3, 1, 4], "b": [None, 0, 0, 2], "c": [0.25, 1, 0, 0]})]
    assert dice_scores(rows) == {WHOLE: {2: {("east", "a"): 0.5, ("east", "c"): 0.25}}}
    assert alarm_scores(rows) == {WHOLE: {2: {("east", "a"): 0.25, ("east", "b"): 0.0}}}


def test_a_part_earns_its_keep_only_where_the_interval_leaves_zero_out() -> None:
    def said(without: float) -> str:
        rows = [
            _row(arm, 0, east={name: [dice, 1, 0, 0] for name in "abc"})
            for arm, dice in ((WHOLE, 0.5), (NO_DCA, without))
        ]
        return keep(dice_scores(rows))[1]

    assert "cross-attention earns its keep: +0.200" in said(0.3)
    assert "cross-attention does harm: -0.200" in said(0.7)
    assert "cross-attention is not shown to help" in said(0.5)
