"""What members do in the rotations, without an engine."""

from __future__ import annotations

from personalization.playbook import Practice
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, site_data, slices
from training.data.segmentation.dataset import SiteData
from training.playbook import TARGETS, Rotations


def measured(data: SiteData) -> dict[str, list[float]]:
    rotations = Rotations(TASK, {}, Practice(()))
    result = client_step(rotations, context("measure", 0, site="A"), {}, EMPTY, data)
    return {name: tensor.tolist() for name, tensor in result.uploads[TARGETS.name].items()}


def test_targets_are_measured_on_slices_that_training_leaves_out_too() -> None:
    whole = site_data("A", 8, 4, 0)
    whole.train.targets[::2] = 0
    positive = whole.train.with_foreground()
    assert len(positive) == 4
    thinned = SiteData("A", positive, whole.val, slices(0, 0), None, unfiltered=whole.train)
    assert measured(thinned) == measured(whole)
    assert measured(SiteData("A", positive, whole.val, slices(0, 0), None)) != measured(whole)
    alone = SiteData("A", positive, whole.train, slices(0, 0), None, unfiltered=whole.train)
    assert measured(alone) == measured(SiteData("A", whole.train, whole.train, slices(0, 0), None))
