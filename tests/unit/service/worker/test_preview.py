"""The picture of a few slices that a job draws after each epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Task, VolumeGeometry
from service.files import open_files
from service.jobs.files import JobFolder
from service.worker.pictures import Preview

VOXELS = np.random.default_rng(1).random((32, 32, 3, 1), np.float32)


def preview(root: Path, task: Task, voxels: np.ndarray[Any, Any]) -> bytes:
    """The picture of all slices, of which the network finds the brighter half of each."""
    folder = JobFolder(open_files(root), "0" * 32)
    scan = Scan(voxels, np.eye(4), "nifti")
    images = torch.from_numpy(prepare(scan, task).slices.copy())
    middle = task.channels * task.neighbours
    Preview(SimpleNamespace(folder=folder), images, task).draw(  # type: ignore[arg-type]
        1, lambda images: (images[:, middle] > images[:, middle].median()).numpy().astype(np.uint8)
    )
    content = folder.read(JobFolder.PREVIEW)
    assert content is not None
    return content


@pytest.mark.parametrize("channels", [1, 3])
def test_preview_of_a_task_with_neighbours_shows_the_slices_themselves(tmp_path: Path, channels: int) -> None:
    voxels = np.concatenate([np.roll(VOXELS, number, 0) for number in range(channels)], axis=-1)
    drawn = {}
    for neighbours in (0, 1, 2):
        task = Task(name="t", labels={"a": (1,)}, size=(32, 32), channels=channels, neighbours=neighbours)  # type: ignore[arg-type]
        drawn[neighbours] = preview(tmp_path, task, voxels)
    assert drawn[1] == drawn[0]
    assert drawn[2] == drawn[0]


def test_preview_of_volumes_shows_the_fullest_plane_of_patches(tmp_path: Path) -> None:
    folder = JobFolder(open_files(tmp_path), "0" * 32)
    task = Task(
        name="t", labels={"a": (1,)}, geometry=VolumeGeometry(spacing=(1.0, 1.0, 1.0), patch=(16, 8, 8))
    )
    drawer = Preview(SimpleNamespace(folder=folder), torch.rand(5, 1, 16, 8, 8), task)  # type: ignore[arg-type]
    classes = np.zeros((5, 16, 8, 8), np.uint8)
    classes[2, :, :, 3], classes[2, 0, 0, 6] = 1, 1
    for epoch in (0, 1):
        drawer.draw(epoch, lambda images: classes[:5] if len(images) == 5 else classes[2:3])
    content = folder.read(JobFolder.PREVIEW)
    assert content is not None
    assert drawer._planes == [3]
