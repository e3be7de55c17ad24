"""What members do in the rotations, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from model_store.manifest import NetworkSpec
from personalization.dose import Practice, passes
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import Spread, sent_by
from personalization.networks import build
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, site_data, slices
from training.algorithm import ModelDraft
from training.config import RunConfig
from training.data.federation import load_federation
from training.local.site import SiteData
from training.methods.iop_fl import IopFlConfig
from training.phantom.federation import write_federation
from training.playbook import EPISODES, PRACTICE, TARGETS, Rotations, afterwards
from training.run import Run


def measured(data: SiteData) -> dict[str, list[float]]:
    rotations = Rotations(TASK, {}, {}, Practice(()))
    result = client_step(rotations, context("measure", 0, site="A"), {}, EMPTY, data)
    return {name: tensor.tolist() for name, tensor in result.uploads[TARGETS.name].items()}


def test_a_member_practises_the_dose_with_the_spread_of_the_others() -> None:
    spec = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 2})
    network = build(spec.name, **spec.arguments)
    data = site_data("A", 8, 4, 0)
    found = profile(network, torch.from_numpy(data.train.images), data.train.patients)
    spread = Spread.of(found.layers, sent_by(found, (0.1, 0.2, 1.0)), 2)
    drafts = {"A": (ModelDraft("global", spec, network.state_dict()),)}
    rotations = Rotations(TASK, drafts, {"A": spread.to_bytes()}, Practice((0.0, 2.0)))
    received = rotations.send_space(EMPTY, "A")
    result = client_step(rotations, context("practise", 0, site="A"), received, EMPTY, data)
    sent = json.loads(bytes(result.uploads[EPISODES.name]["json"].tolist()))
    assert [each["severity"] for each in sent] == [0.0, 2.0]
    assert all(each.keys() == {"severity", "served", "shift"} for each in sent)


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


def test_the_time_of_the_practice_counts_the_slices_of_volumes_and_the_most_that_one_adapts_to(
    tmp_path: Path,
) -> None:
    members = ("aster", "birch", "cedar")
    run = Run(load_federation(write_federation(tmp_path, members, 4)), "iop-fl", IopFlConfig(), RunConfig())
    data = SiteData.load(run.sites()[0], run.federation.task)
    train, every = len(data.all_train), len(data.all_train) + len(data.val)
    practice = Practice(most=4)
    # Of volumes as files, fewer than the most would be there.
    assert data.held_out
    assert every > 2 * practice.most > len(run.sites()[0].cases)
    expected = passes(practice, every) / train
    assert afterwards(run, members, practice)[PRACTICE].times == expected
