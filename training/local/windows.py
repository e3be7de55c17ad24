"""Answer a whole volume by the windows that a network was trained on, with the code of the service.

A network with instance norm answers otherwise outside the patch of its training: run whole, the same weights
lost 0.08 to 0.22 Dice. So validation and testing take the windows of the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.preprocessing import keep_largest
from model_store.preprocessing.volume_restore import classes_of
from model_store.preprocessing.windows import slab_axis, slide
from model_store.task import Task


def answer_volume(network: nn.Module, image: NDArray[np.float32], task: Task, device: torch.device) -> Tensor:
    """Class indices [X, Y, Z] uint8 of a volume [C, X, Y, Z], by the windows' weighted mean, of which the
    task's `keep_largest` leaves what the service leaves.

    The network is in evaluation mode.
    """
    geometry = task.geometry
    assert geometry is not None
    axis = slab_axis(image.shape[1:], geometry.patch)
    planes = windowed(network, image, task, device, axis)
    found = np.stack([classes_of(plane, task, geometry.average) for plane in planes], axis=axis)
    keep_largest(found, task)
    return torch.from_numpy(found)


@torch.no_grad()
def windowed(
    network: nn.Module,
    image: NDArray[np.float32],
    task: Task,
    device: torch.device,
    axis: int,
) -> Iterator[NDArray[np.float32]]:
    """The planes [K, ...] of the windows' weighted mean along an axis, as `VolumeRestorer.add` takes them."""
    geometry = task.geometry
    assert geometry is not None
    flips = _flips(geometry.mirror)
    activate = torch.sigmoid if task.regions else partial(torch.softmax, dim=1)

    def predict(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        image_BC = torch.from_numpy(np.ascontiguousarray(patch))[None].to(device)
        logits = torch.stack([network(image_BC.flip(axes)).flip(axes) for axes in flips]).mean(dim=0)
        outputs: Tensor = activate(logits) if geometry.average == "probabilities" else logits
        found: NDArray[np.float32] = outputs[0].cpu().numpy()
        return found

    for _, plane in slide(image, geometry.patch, geometry.overlap, geometry.window, predict, axis=axis):
        yield plane


def _flips(axes: Sequence[int]) -> list[list[int]]:
    """The axes of [B, C, X, Y, Z] to flip for each mirroring of a patch; the first mirrors nothing."""
    turns = chain.from_iterable(combinations(axes, count) for count in range(len(axes) + 1))
    return [[2 + axis for axis in turn] for turn in turns]
