"""A batch, and a site, of one image that has become one pixel before batch norm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_store.manifest import NetworkSpec
from training.local.classifier import SgdSchedule, train_classifier
from training.local.images import Images
from training.local.loop import train_locally
from training.local.networks import network_of, new_network, state_of
from training.local.norms import batch_moments, estimate_statistics, least_batch
from training.local.schedule import Schedule
from training.local.slices import Slices

UNET = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 2})
RESNET = NetworkSpec(name="resnet18", arguments={"in_channels": 1, "classes": 2, "width": 2})
SCHEDULE = Schedule(batch_size=16)


def drawn(count: int, side: int = 16) -> Slices:
    draw = np.random.default_rng(count)
    images = draw.normal(size=(count, 1, side, side)).astype(np.float32)
    names = tuple(f"p{index}" for index in range(count))
    return Slices(images, (images[:, 0] > 0).astype(np.uint8), names, names, tuple(range(count)))


def pictures(count: int) -> Images:
    slices = drawn(count, 8)
    labels = np.arange(count) % 2
    return Images(slices.images, labels, slices.patients, slices.cases, slices.positions)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("count", [1, 17, 33])
@pytest.mark.parametrize(("spec", "make"), [(UNET, drawn), (RESNET, pictures)])
def test_a_site_with_one_image_more_than_its_batches_trains(count, spec, make):
    network, data = new_network(spec, generator()), make(count)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        network.train()(torch.tensor(data.images[:1]))
    before = state_of(network)
    assert np.isfinite(train_locally(network, data, SCHEDULE, generator()))
    assert all(tensor.isfinite().all() for tensor in state_of(network).values())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state_of(network).items())
    for size in (1, 16):
        moments = batch_moments(network, data, size)
        assert all(tensor.isfinite().all() for tensor in moments.values())
        assert np.isfinite(train_locally(network, data, replace(SCHEDULE, batch_size=size), generator()))


def test_a_classifier_of_a_site_with_one_image_trains():
    network = new_network(RESNET, generator())
    loss = train_classifier(network, pictures(1), SgdSchedule(1, 16, 0.01), generator())
    assert np.isfinite(loss)


def test_the_mean_over_all_slices_counts_each_slice(monkeypatch):
    """Statistics of 17 slices: of nine and eight, neither of which is one."""
    sizes = []
    network = new_network(UNET, generator())
    network.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    estimate_statistics(network, drawn(17), 16)
    assert sizes == [1, 9, 8]  # the first asks whether the network can have one alone


def test_a_network_that_can_have_one_image_alone_trains_with_the_same_bits_as_before():
    """Slices of 32 pixels are four at the deepest batch norm, so a last batch of one stays one."""
    data, states = drawn(17, 32), []
    for asked in (False, True):
        network = new_network(UNET, generator())
        if asked:
            assert least_batch(network, data, 16) == 1
        train_locally(network, data, SCHEDULE, generator())
        states.append(state_of(network))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert least_batch(network_of(UNET, states[0], torch.device("cpu")), drawn(18), 16) == 1
