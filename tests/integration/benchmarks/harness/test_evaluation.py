"""Dice and surfaces per patient of scans that are decoded once for many networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.accuracy.papers.official import with_test_statistics
from benchmarks.harness.evaluation import Scans, predict
from model_store.manifest import NetworkSpec
from model_store.preprocessing import prepare_mask
from model_store.task import Task
from training.data.cases import Case, Federation
from training.data.federation import load_federation
from training.data.scan_files import read_mask
from training.local.networks import network_of, new_network, state_of

SPEC = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 2})


@pytest.fixture(scope="module")
def federation(phantom_federation: Path) -> Federation:
    return load_federation(phantom_federation)


@pytest.fixture
def network() -> nn.Module:
    drawn = new_network(SPEC, torch.Generator().manual_seed(2)).train()
    drawn(torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(2)))
    return network_of(SPEC, state_of(drawn), torch.device("cpu"))


def test_a_patients_dice_is_that_of_all_voxels_of_the_files(federation: Federation) -> None:
    """A network finds the target everywhere, against the masks as nibabel reads them."""
    cases = [replace(case, patient=case.patient[:-1]) for case in federation.site("cedar").cases]
    scans = Scans.load(cases, federation.task)
    found = scans.dice(torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(len(scans.images), 2, 32, 32))
    drawn = [np.asarray(nib.load(case.mask).dataobj) > 0 for case in cases]
    target, voxels = sum(mask.sum() for mask in drawn), sum(mask.size for mask in drawn)
    assert found == {cases[0].patient: pytest.approx(2 * target / (target + voxels), abs=1e-6)}


def test_the_slices_of_a_patient_are_judged_as_one(federation: Federation) -> None:
    case = federation.site("cedar").cases[0]
    scans = Scans.load([case, *federation.site("cedar").cases[1:3], case], federation.task)
    index, slices = scans.patient_index, [scan.slices for scan in scans.scans]
    assert scans.patients[index[0]] == case.patient
    assert index == [number for number, count in zip((0, 1, 2, 0), slices, strict=True) for _ in range(count)]


def square(folder: Path, first: int, spacing: tuple[float, float] | None) -> Case:
    """A target of 8 x 8 that starts at (`first`, 4): an image, or a volume of one slice with this spacing."""
    mask = np.zeros((32, 32), np.uint8)
    mask[first : first + 8, 4:12] = 1
    path = folder / f"{first}.{'png' if spacing is None else 'nii.gz'}"
    if spacing is None:
        Image.fromarray(mask * 255).save(path)
    else:
        nib.save(nib.Nifti1Image(mask[..., None], np.diag([*spacing, 3.0, 1.0])), path)
    return Case(path, path, "a")


@pytest.mark.parametrize(
    ("spacing", "apart", "near"), [(None, 5.0, 10), ((0.5, 2.0), 2.5, 16)], ids=["pixels", "mm"]
)
def test_surfaces_are_in_millimetres_where_the_spacing_is_known(
    spacing: tuple[float, float] | None, apart: float, near: int, tmp_path: Path
) -> None:
    """The answer is a square that is five voxels along the first axis from the true one."""
    labels = {"square": (1,) if spacing else (255,)}
    task = Task(name="squares", labels=labels, channels=1, size=(32, 32), plane="axial")
    scans = Scans.load([square(tmp_path, 4, spacing)], task)
    mask, geometry = read_mask(square(tmp_path, 9, spacing).mask), scans.scans[0].geometry
    moved = torch.tensor(prepare_mask(mask, task, geometry)).long()
    found = scans.surfaces(torch.nn.functional.one_hot(moved, 2).permute(0, 3, 1, 2).float())
    assert found["hd95"]["a"] == pytest.approx(apart)
    # Counted on paper: an outline has 28 voxels, and so many are within 1 of the other outline.
    assert found["nsd"]["a"] == pytest.approx(near / 28)
    nothing = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 32, 32)
    assert all(np.isnan(values["a"]) for values in scans.surfaces(nothing).values())


def test_predictions_come_back_in_the_order_of_the_images(network: nn.Module) -> None:
    images = torch.randn(37, 1, 32, 32, generator=torch.Generator().manual_seed(3))
    network.eval()
    with torch.no_grad():
        expected = torch.cat([torch.softmax(network(image[None]), dim=1) for image in images])
    torch.testing.assert_close(predict(network, images), expected, rtol=1e-4, atol=1e-6)


def test_a_batch_has_slices_of_the_whole_hospital(network: nn.Module) -> None:
    # The second half is brighter: the statistics of each half alone would hide that.
    images = torch.randn(32, 1, 32, 32, generator=torch.Generator().manual_seed(4))
    images[16:] += 5
    changed = with_test_statistics(network)
    with torch.no_grad():
        mixed = torch.softmax(changed(images[0::2]), dim=1)
    torch.testing.assert_close(predict(changed, images)[0::2], mixed, rtol=1e-4, atol=1e-6)


def test_test_statistics_are_those_of_training_mode(network: nn.Module) -> None:
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = with_test_statistics(network).eval()(images)
        expected = network.train()(images)
    torch.testing.assert_close(found, expected)
