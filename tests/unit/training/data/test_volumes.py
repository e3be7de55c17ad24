"""Whole volumes of a site from files: grids, files per channel, a fourth axis, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model_store.appearance import describe
from model_store.guard import planes_of
from model_store.task import Channel, Normalisation, Task, VolumeGeometry
from training.config import RunConfig
from training.data.federation import load_federation
from training.data.splits import all_for_testing
from training.errors import ConfigurationError, FederationError
from training.local.site import SiteData
from training.local.volumes import Volumes
from training.methods.registry import method
from training.phantom import VOLUMES, write_federation
from training.playbook import check_practises
from training.run import Run

_Image: Any = nib.Nifti1Image
GEOMETRY = VolumeGeometry(spacing=(1.0, 1.0, 2.0), patch=(8, 8, 8))
AS_IS = Normalisation(scope="volume", method="none")
TWO = Task(
    name="two",
    labels={"organ": (1,)},
    channels=(Channel(name="T1", normalisation=AS_IS), Channel(name="flair", normalisation=AS_IS)),
    geometry=GEOMETRY,
)
# A patient's left is low in the file: the network's first axis grows to the right.
AFFINE = np.diag([-1.0, 1.0, 2.0, 1.0])


def write(path: Path, voxels: Any, affine: Any = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _Image(voxels, affine).to_filename(path)


def voxels(seed: int, sides: tuple[int, ...] = (12, 10, 9)) -> Any:
    return np.random.default_rng(seed).integers(0, 100, sides).astype(np.int16)


def mask(sides: tuple[int, ...] = (12, 10, 9)) -> Any:
    found = np.zeros(sides, np.uint8)
    found[2:5, 3:6, 2:4] = 1
    return found


def folder(root: Path, names: tuple[str, str], sides: tuple[int, ...] = (12, 10, 9)) -> Path:
    for site, seed in (("a", 0), ("b", 10)):
        for case in range(3):
            for number, end in enumerate(names):
                write(root / site / "images" / f"case{case}{end}.nii.gz", voxels(seed + 2 * case + number))
            write(root / site / "masks" / f"case{case}.nii.gz", mask())
    return root


@pytest.mark.parametrize("names", [("_T1", "_FLAIR"), ("_0000", "_0001")])
def test_a_file_per_channel_makes_one_volume_in_the_tasks_order_and_axes(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    federation = load_federation(folder(tmp_path, names), TWO)
    site = federation.sites[0]
    assert [case.name for case in site.cases] == ["case0.nii.gz", "case1.nii.gz", "case2.nii.gz"]
    assert [case.patient for case in site.cases] == ["case0", "case1", "case2"]
    data = SiteData.load(all_for_testing(site), TWO).test
    assert isinstance(data, Volumes)
    assert data.spacings == ((1.0, 1.0, 2.0),) * 3
    for number in range(3):
        expected = np.stack([voxels(2 * number + channel)[::-1] for channel in range(2)])
        np.testing.assert_array_equal(data.images[number], expected)
        np.testing.assert_array_equal(data.targets[number], mask()[::-1])


def test_a_fourth_axis_is_the_channels_where_the_task_says_so(tmp_path: Path) -> None:
    for site in ("a", "b"):
        for case in range(3):
            stacked = np.stack([voxels(2 * case), voxels(2 * case + 1)], axis=-1)
            write(tmp_path / site / "images" / f"case{case}.nii.gz", stacked)
            write(tmp_path / site / "masks" / f"case{case}.nii.gz", mask())
    task = TWO.model_copy(update={"stacked": True})
    data = SiteData.load(all_for_testing(load_federation(tmp_path, task).sites[0]), task).test
    np.testing.assert_array_equal(data.images[1], np.stack([voxels(2)[::-1], voxels(3)[::-1]]))


def test_a_volume_is_resampled_to_the_spacing_with_its_mask(tmp_path: Path) -> None:
    task = Task(name="one", labels={"organ": (1,)}, geometry=GEOMETRY)
    for case in range(3):
        write(tmp_path / "a" / "images" / f"c{case}.nii.gz", voxels(case), np.diag([1.0, 2.0, 1.0, 1.0]))
        write(tmp_path / "a" / "masks" / f"c{case}.nii.gz", mask(), np.diag([1.0, 2.0, 1.0, 1.0]))
    data = SiteData.load(all_for_testing(load_federation(tmp_path, task).sites[0]), task).test
    assert {each.shape for each in data.images} == {(1, 12, 20, 4)} or {
        each.shape for each in data.images
    } == {(1, 12, 20, 5)}
    assert [each.shape for each in data.targets] == [each.shape[1:] for each in data.images]
    # 3 x 3 x 2 voxels of 1 x 2 x 1 mm are 36 mm3, of which the grid has 18 voxels of 2 mm3.
    assert int(data.targets[0].sum()) == pytest.approx(18, abs=9)


def test_the_size_of_a_volume_counts_its_tiles_and_the_passes_that_answer_it(tmp_path: Path) -> None:
    mirrored = TWO.model_copy(update={"geometry": GEOMETRY.model_copy(update={"mirror": (0, 2)})})
    site = load_federation(folder(tmp_path, ("_T1", "_FLAIR")), mirrored).sites[0]
    data = SiteData.load(all_for_testing(site), mirrored).test
    passes = 0

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal passes
        passes += len(inputs[0]) if module is network else 0

    network = nn.Conv3d(2, 2, 1)
    network.register_forward_pre_hook(look)
    with torch.no_grad():
        data.take([0]).answers(network, 16, torch.device("cpu"))
    assert Volumes.size_of(site.cases[0], mirrored) == (len(data.take([0]).tiles()), passes)
    assert passes % 4 == 0


def test_the_guard_knows_the_training_volumes_after_preparation(tmp_path: Path) -> None:
    site = load_federation(folder(tmp_path, ("_T1", "_FLAIR")), TWO).sites[0]
    cases = tuple(
        replace(case, split="train" if case.name == "case1.nii.gz" else "test") for case in site.cases
    )
    found = SiteData.load(replace(site, cases=cases), TWO)
    assert found.statistics is not None
    assert (found.statistics.count, found.statistics.kinds) == (1, {"2-channel volume": 1})
    assert found.statistics.ranges["slice_mm"].low == 2.0
    mean, _ = found.statistics.mean_and_deviation()
    assert mean == pytest.approx(describe(planes_of(found.all_train.images[0]))[0])


def test_every_fault_of_channels_is_named_at_once(tmp_path: Path) -> None:
    folder(tmp_path, ("_T1", "_FLAIR"))
    (tmp_path / "a" / "images" / "case1_FLAIR.nii.gz").unlink()
    write(tmp_path / "a" / "images" / "scout.nii.gz", voxels(3))
    write(tmp_path / "b" / "images" / "case0_FLAIR.nii.gz", voxels(3), np.diag([-1.0, 1.0, 3.0, 1.0]))
    with pytest.raises(FederationError) as caught:
        load_federation(tmp_path, TWO)
    text = "\n".join(caught.value.problems)
    assert "a/images: 'case1' has no file of flair" in text
    assert "a/images/scout.nii.gz: of no channel" in text
    assert "b/images/case0.nii.gz: channel flair is not on the grid of channel T1" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fedoap", "keys and values are those of a 2-D U-Net's bottleneck"),
        ("fedins", "no backbone for volumes is known"),
        ("feddg", "episodes are of slices"),
        ("fedbicross", "it is for classification"),
        ("dense", "it is for classification"),
    ],
)
def test_a_method_that_cannot_be_trained_on_volumes_says_why(tmp_path: Path, name: str, why: str) -> None:
    federation = load_federation(write_federation(tmp_path, ("aster", "birch"), 1, task=VOLUMES), VOLUMES)
    run = Run(federation, name, method(name).config(), RunConfig())
    with pytest.raises(ConfigurationError, match=why) as caught:
        run.algorithm()
    assert "use " in str(caught.value)
    assert "fedavg" in str(caught.value)


def test_a_practice_on_volumes_needs_batch_norm_and_classes(tmp_path: Path) -> None:
    members = ("aster", "birch", "cedar")
    federation = load_federation(write_federation(tmp_path, members, 1, task=VOLUMES), VOLUMES)
    config = method("iop-fl").config

    def run(own: Any = federation, **fields: Any) -> Run:
        return Run(own, "iop-fl", config(**fields), RunConfig(consent=members))

    assert check_practises(run(network_arguments={"norm_name": "batch"})) == members
    for fields in ({}, {"network_arguments": {"norm_name": ["instance", {"track": True}]}}):
        with pytest.raises(ConfigurationError, match=r"expected batch norm .*found none"):
            check_practises(run(**fields))
    regions = VOLUMES.model_copy(update={"regions": tuple(VOLUMES.labels)})
    with pytest.raises(ConfigurationError, match="found regions: leave out --playbook"):
        check_practises(run(replace(federation, task=regions)))
