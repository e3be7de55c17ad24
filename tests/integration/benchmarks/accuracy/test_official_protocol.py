"""The published code's way of scoring, a diagnostic: labels choose what is scored and when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy.papers import official
from benchmarks.accuracy.papers.official import (
    BATCH,
    MOST_BATCHES,
    TargetSlices,
    by_official_protocol,
    evenly_spaced,
    score_of,
)
from benchmarks.harness.evaluation import Scans
from tests.helpers.personalization.discs import discs, space
from training.data.federation import load_federation
from training.local.site import SiteData
from training.phantom import write_federation


def test_the_official_protocol_reports_the_best_of_ten_epochs_by_label() -> None:
    images, truth = discs(2 * BATCH, contrast=0.3)
    found = by_official_protocol(space(), TargetSlices(images, truth, 2), seed=0).row
    reported = found["epochs"][found["best"] - 1]
    assert len(found["epochs"]) == 10
    assert reported[0] == max(with_background for with_background, _ in found["epochs"])
    assert found["epochs"][0] != found["start"]  # the first epoch is scored after its steps
    assert found["running"] != found["batch"]
    for with_background, foreground in (found["running"], found["batch"], found["start"], reported):
        assert 0 <= foreground < with_background <= 1


def test_the_official_protocol_scores_each_batch_after_the_step_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(official, "EPOCHS", 3)
    monkeypatch.setattr(official, "DROPOUT", 0.0)
    images, truth = discs(BATCH, contrast=0.3)
    found = by_official_protocol(space(), TargetSlices(images, truth, 2), seed=0)
    assert found.row["models"] == 3
    # One batch: the candidate of an epoch is the network that was scored in it.
    with torch.no_grad():
        predicted = found.network(images).argmax(dim=1)
    score, _ = found.row["epochs"][found.row["best"] - 1]
    # `dice_coef` of the published code, in which a class in neither mask counts 0.
    ours, drawn = (functional.one_hot(mask, 2).flatten(1, 2).double() for mask in (predicted, truth))
    overlap, sizes = (ours * drawn).sum(dim=1), ours.sum(dim=1) + drawn.sum(dim=1)
    assert score == pytest.approx(float((2 * overlap / (sizes + 1e-5)).mean()), abs=1e-5)
    # One small step need not change a mask.
    assert found.row["start"] != found.row["epochs"][-1]
    merged = found.merged(space(), images)
    assert not any("router" in name for name, _ in merged.named_parameters())


def test_slices_are_scored_on_the_networks_device() -> None:
    class Elsewhere(nn.Module):
        """A network on another device, which answers on the CPU: all pixels are background."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1, device="meta"))

        def forward(self, images_BCHW: Tensor) -> Tensor:
            assert images_BCHW.device == self.weight.device
            count, _, height, width = images_BCHW.shape
            return torch.eye(2)[0, None, :, None, None].expand(count, 2, height, width)

    images, truth = discs(BATCH + 1, contrast=0.3)
    assert score_of(Elsewhere(), TargetSlices(images, truth, 2)).foreground == 0


def test_the_official_protocol_scores_runs_of_neighbours() -> None:
    assert evenly_spaced(12).tolist() == list(range(12))
    kept = evenly_spaced(1098)
    assert len(kept) == BATCH * MOST_BATCHES
    runs = kept.view(MOST_BATCHES, BATCH)
    assert (runs.diff(dim=1) == 1).all()
    assert runs[:, 0].diff().unique().tolist() == [25, 30]


def test_the_official_protocol_sees_only_slices_with_a_target(tmp_path: Path) -> None:
    federation = load_federation(write_federation(tmp_path, ("aster",), 3, 32))
    site = federation.site("aster")
    scans = Scans.load(site.cases, federation.task)
    slices = TargetSlices.of(site.cases, scans, federation.task)
    assert 0 < len(slices.images) < len(scans.images)
    # The slices that training without empty ones has
    trained = SiteData.load(
        site.assigned(dict.fromkeys(site.patients, "train")), federation.task, keep_empty=False
    ).train
    np.testing.assert_array_equal(slices.images, trained.images)
    np.testing.assert_array_equal(slices.truth, trained.targets)
