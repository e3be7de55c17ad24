"""Time one batch of local training and one step of the synthesis, to forecast the run that repeats them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from personalization.fedbicross.synthesis import Trajectory
from training.local.classifier import train_classifier
from training.local.images import Images
from training.local.networks import network_of, new_network, state_of
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.one_shot import OneShot

# A step is timed on so many images per cluster at most, because the paper's 256 take a minute.
_SAMPLE = 32


def time_steps(
    method: OneShot, config: FedBiCrossConfig, sites: int, clusters: int, threads: int
) -> tuple[float, float]:
    """Seconds of local training per image, and of one synthesis step with `sites` models in `clusters`."""
    draw = torch.Generator().manual_seed(0)
    state = state_of(new_network(method.network, draw))

    def model() -> torch.nn.Module:
        return network_of(method.network, state, torch.device("cpu"))

    count = config.batch_size
    names, zeros = ("",) * count, (0,) * count
    pixels = torch.rand(count, *method.shape, generator=draw).numpy()
    images = Images(pixels, np.arange(count) % method.classes, names, names, zeros)
    student, schedule = model(), replace(config.local(), epochs=1)

    batch = min(config.synthesis_batch, _SAMPLE)
    trajectory = Trajectory(
        [[model() for _ in range(index, sites, clusters)] for index in range(clusters)],
        [model() for _ in range(clusters)],
        torch.full((clusters, clusters), 1 / clusters, dtype=torch.float64),
        method.shape,
        method.classes,
        replace(config.synthesis(), batch_size=batch),
        seed=0,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return (
            _seconds(lambda: train_classifier(student, images, schedule, draw)) / count,
            _seconds(lambda: trajectory.step(1)) * config.synthesis_batch / batch,
        )
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object]) -> float:
    """Time the second of two calls: the first one prepares kernels and memory."""
    work()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
