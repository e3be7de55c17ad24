"""What an unseen hospital is served: the ladder's scanners, a cell of each kind, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy.unseen import official
from benchmarks.accuracy.unseen.experiment import PROFILES, SetOf, Unseen
from benchmarks.accuracy.unseen.hospital import ONE_LAYER, halves, shuffled
from benchmarks.accuracy.unseen.official import (
    BATCH,
    MOST_BATCHES,
    TargetSlices,
    by_official_protocol,
    evenly_spaced,
    score_of,
)
from benchmarks.accuracy.unseen.report import sections
from benchmarks.accuracy.unseen.scanner import SEVERITIES, ShiftedScanner
from benchmarks.harness.cells import Rows
from benchmarks.harness.evaluation import Scans
from benchmarks.harness.experiment import Options
from model_store.scan import Scan
from tests.helpers.personalization.discs import discs, space
from training.data.federation import load_federation
from training.local.site import SiteData
from training.phantom import write_federation

RESULTS = Path(__file__).parents[4] / "docs/results"


def scan(channels: int = 1) -> Scan:
    rows, columns = np.mgrid[:64, :80]
    image = 40 + rows + np.where((rows - 32) ** 2 + (columns - 40) ** 2 < 200, 100, 0)
    return Scan(np.repeat(image[..., None], channels, axis=2).astype(np.uint8), None, "png")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("site", ["one", "two", "three", "four", "five"])
def test_a_scanner_leaves_severity_0_alone_and_grows_with_severity(site: str, channels: int) -> None:
    scanner, before = ShiftedScanner.of(site, 0), scan(channels)
    assert scanner.at(0) is None
    away = []
    for severity in SEVERITIES[1:]:
        change = scanner.at(severity)
        assert change is not None
        after = change(before)
        assert after.voxels.shape == before.voxels.shape
        assert np.isfinite(after.voxels).all()
        away.append(np.abs(after.voxels - before.voxels.astype(float)).mean())
        np.testing.assert_array_equal(after.voxels, change(before).voxels)
    assert away == sorted(away)


def test_some_scanners_swap_black_and_white_at_the_highest_severity() -> None:
    scanners = [ShiftedScanner.of(f"site {number}", 0) for number in range(100)]
    assert 10 < sum(scanner.inverts for scanner in scanners) < 40
    inverts = next(scanner for scanner in scanners if scanner.inverts)
    before = scan()
    disc = np.zeros((64, 80), dtype=bool)
    disc[24:40, 32:48] = True
    brighter = {}
    for severity in (2, 3):
        change = inverts.at(severity)
        assert change is not None
        after = change(before).voxels[..., 0]
        ring = np.roll(disc, 24, axis=1) & ~disc
        brighter[severity] = after[disc].mean() > after[ring].mean()
    assert brighter == {2: True, 3: False}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A cell of each kind on three phantom hospitals."""
    folder = tmp_path_factory.mktemp("unseen")
    experiment = Unseen(Options("smoke", folder, folder / "rows.jsonl", workers=0, state_dir=folder))
    kinds = {cell["part"]: cell for cell in reversed(experiment.cells())}
    assert set(kinds) == {"inside", "paper", "reference", "learned", "official"}
    return [
        {"cell": cell, "result": experiment.compute(cell, folder)}
        for part, cell in kinds.items()
        if part != "learned"  # slow, and no more than the recipes' own tests
    ]


def test_the_official_protocol_reports_the_best_of_ten_epochs_by_label(rows: list[dict[str, Any]]) -> None:
    cell, found = next((row["cell"], row["result"]) for row in rows if row["cell"]["part"] == "official")
    assert cell["severities"] == [0]
    reported = found["epochs"][found["best"] - 1]
    assert len(found["epochs"]) == 10
    assert reported[0] == max(with_background for with_background, _ in found["epochs"])
    assert found["epochs"][0] != found["start"]  # the first epoch is scored after its steps
    assert found["running"] != found["batch"]
    for with_background, foreground in (found["running"], found["batch"], found["start"], reported):
        assert 0 <= foreground < with_background <= 1
    dice, change = found["locum"]
    assert -dice <= change <= 1 - dice


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


def test_halves_are_disjoint_complete_and_drawn() -> None:
    patients = [f"p{i}" for i in range(9)]
    first, second = halves(patients, 1)
    assert sorted((*first, *second)) == patients
    assert (len(first), len(second)) == (5, 4)
    assert halves(patients, 1) == halves(list(reversed(patients)), 1) != halves(patients, 2)


def test_shuffling_one_layer_leaves_the_others() -> None:
    network = space().plain()
    changed = shuffled(network, torch.Generator().manual_seed(0), ONE_LAYER)
    different = [
        name
        for (name, old), new in zip(network.named_parameters(), changed.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert different == [f"{ONE_LAYER}.weight"]


def test_the_page_has_every_part(rows: list[dict[str, Any]]) -> None:
    page = "\n".join(sections(rows, "x.svg"))
    for heading in ("Inside", "Head-room", "The official"):
        assert f"## {heading}" in page


def test_the_page_of_recorded_rows_says_which_criteria_are_met() -> None:
    page = "\n".join(sections(Rows(RESULTS / "unseen.cpu.jsonl").read(), "x.svg"))
    for heading in ("Criteria", "Outside", "Verdicts", "Locum's training", "Inside", "Head-room"):
        assert f"## {heading}" in page
    assert "| 3. no outer hospital loses more than a point" in page
    assert page.count(" yes |") + page.count("**no** |") >= 4


def test_sets_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    experiment = Unseen(Options("cpu", tmp_path, tmp_path / "rows.jsonl", state_dir=tmp_path))
    assert {cell["set"] for cell in experiment.cells()} == {"phantom"}
    assert PROFILES["cpu"].sets["lungs_cxr"] == SetOf(96, {"rounds": 15, "precision": "bfloat16"})
