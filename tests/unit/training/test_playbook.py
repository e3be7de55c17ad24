"""What members do in the rotations, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch import nn

from model_store.lens import Fingerprint, fit, seen_of
from model_store.manifest import NetworkSpec
from personalization.dose import Practice, by_shift, passes
from personalization.gate import ThroughLens
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread, sent_by
from personalization.losses import soft_dice_loss
from personalization.networks import build, initialise
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, site_data, slices
from tests.helpers.training.volumes import BALLS, volume_data, volumes
from training import playbook
from training.algorithm import ModelDraft
from training.config import RunConfig
from training.data.federation import load_federation
from training.local.site import SiteData
from training.local.volumes import Volumes, patch_batches
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


def test_members_practise_a_lens_by_what_the_others_scans_look_like() -> None:
    spec = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 2})
    network = build(spec.name, **spec.arguments)
    data, others = site_data("A", 8, 4, 0), [slices(12, seed) for seed in (7, 8)]
    found = profile(network, torch.from_numpy(others[0].images), others[0].patients)
    spread = Spread.of(found.layers, sent_by(found, (0.1, 0.2, 1.0)), 2)
    fingerprint = Fingerprint.of([seen_of(each.viewed()) for each in others])
    drafts = {"A": (ModelDraft("global", spec, network.state_dict()),)}
    known = {"A": fingerprint.to_bytes()}
    rotations = Rotations(TASK, drafts, {"A": spread.to_bytes()}, Practice((0.0, 3.0)), known)
    seen: list[tuple[Any, ThroughLens]] = []
    asked = playbook._lens_of

    def lens_of(*arguments: Any) -> tuple[Any, ThroughLens]:
        seen.append(asked(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playbook, "_lens_of", lens_of)
        received = rotations.send_space(EMPTY, "A")
        result = client_step(rotations, context("practise", 0, site="A"), received, EMPTY, data)
    assert len(json.loads(bytes(result.uploads[EPISODES.name]["json"].tolist()))) == 2
    # Each half, as it is and behind the scanner.
    assert len(seen) == 4
    made = fit(
        data.all_train.joined([data.all_train, data.val], TASK).take([0, 1, 4, 5, 8, 9]).viewed, fingerprint
    )
    assert made is not None
    assert seen[0][1] == ThroughLens(made.left, None, made.grid, made.sides, made.lens.negated)


def test_volumes_are_scored_whole_as_the_service_answers_them() -> None:
    spec = NetworkSpec(
        name="monai.dynunet",
        arguments={
            **{"in_channels": 1, "classes": 2, "spatial_dims": 3, "width": 4, "strides": [1, 2, 2]},
            "norm_name": "batch",
        },
    )
    network = initialise(build(spec.name, **spec.arguments), torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    for images, targets in patch_batches(volumes(4, 9), 20, 4, 0.5, None, torch.Generator().manual_seed(0)):
        optimiser.zero_grad()
        soft_dice_loss(network(images), targets.long()).backward()
        optimiser.step()
    network.eval()
    others = volumes(6, 9).met()
    found = profile(network, torch.from_numpy(others.images), others.patients)
    spread = Spread.of(found.layers, sent_by(found, (0.1, 0.2, 1.0)), 2)
    drafts = {"A": (ModelDraft("global", spec, network.state_dict()),)}
    data = volume_data("A", 4, 2, 0)
    for image in (*data.train.images, *data.val.images):
        image *= 4
    rotations = Rotations(BALLS, drafts, {"A": spread.to_bytes()}, Practice((0.0,)))
    received = rotations.send_space(EMPTY, "A")
    result = client_step(rotations, context("practise", 0, site="A"), received, EMPTY, data)
    [sent] = json.loads(bytes(result.uploads[EPISODES.name]["json"].tolist()))

    space = RoutingSpace.of(spec.name, spec.arguments, {}, network.state_dict())
    scans = Volumes.joined([data.train, data.val], BALLS)
    changes = []
    for learned, scored in (([0, 2, 4], [1, 3, 5]), ([1, 3, 5], [0, 2, 4])):
        seen = scans.take(learned).tiles()
        made = by_shift(space, spread, None, torch.from_numpy(seen.images), seen.patients)
        assert made.passed
        for index in scored:
            before, after = (whole_dice(each, scans, index) for each in (network, made.adapted.merged))
            changes.append(after - before)
    assert any(changes)
    assert sent["served"] == pytest.approx(sum(changes) / 6)


def whole_dice(network: nn.Module, scans: Volumes, index: int) -> float:
    """Dice of the ball of one volume, by MONAI's windows."""
    geometry, image = scans.geometry, torch.from_numpy(scans.images[index])[None]
    with torch.no_grad():
        logits = sliding_window_inference(
            image, geometry.patch, 1, lambda patch: network(patch).softmax(1), geometry.overlap, "gaussian"
        )
    ball, truth = logits[0].argmax(0) == 1, torch.from_numpy(scans.targets[index]) == 1
    return float(2 * (ball & truth).sum() / (ball.sum() + truth.sum()))


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
    expected = passes(practice, every, every, lensed=True) / train
    assert afterwards(run, members, practice)[PRACTICE].times == expected
