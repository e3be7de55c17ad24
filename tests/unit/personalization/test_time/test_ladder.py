"""The ladder and InTEnt against plain loops."""

from __future__ import annotations

import copy
import math

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

from personalization.errors import RoutingError
from personalization.export import to_onnx
from personalization.iop_fl.batch_norm import blend_statistics, doses_by_depth
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import (
    MOST_PIXELS,
    PRIOR_IMAGES,
    Rungs,
    balanced_weights,
    blended,
    thinned,
)
from personalization.test_time.presets.intent import scan_graph
from personalization.test_time.recipe import recipe_of
from tests.helpers.personalization.discs import discs, space

CPU = torch.device("cpu")


def two_layers() -> nn.Sequential:
    """Convolution, batch norm, twice, with statistics that fit no image."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    for norm in (network[1], network[3]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.mark.parametrize("batch_size", [16, 4])
def test_statistics_are_those_of_the_mixture_layer_by_layer(batch_size: int) -> None:
    network, images = two_layers(), torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    expected, features = copy.deepcopy(network), images
    with torch.no_grad():
        for convolution, norm, dose in ((expected[0], expected[1], 0.25), (expected[2], expected[3], 0.75)):
            features = convolution(features)
            mean, variance = features.mean((0, 2, 3)), features.var((0, 2, 3), correction=0)
            apart = dose * (1 - dose) * (norm.running_mean - mean) ** 2
            norm.running_var.copy_((1 - dose) * norm.running_var + dose * variance + apart)
            norm.running_mean.copy_((1 - dose) * norm.running_mean + dose * mean)
            features = norm(features)
    found = blend_statistics(network, images, (0.25, 0.75), batch_size)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_mixture_has_the_variance_of_samples_from_both() -> None:
    """Half of the samples from each of two normals, drawn: no formula is used twice."""
    draw = torch.Generator().manual_seed(0)
    one, other = (
        2 + 0.5 * torch.randn(400_000, generator=draw),
        -1 + 1.5 * torch.randn(400_000, generator=draw),
    )
    norm = nn.BatchNorm2d(1)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(0.25)
    blend_statistics(nn.Sequential(norm), other.reshape(4, 1, 100, 1000), (0.5,))
    together = torch.cat([one, other])
    assert norm.running_mean.item() == pytest.approx(together.mean().item(), abs=0.02)
    assert norm.running_var.item() == pytest.approx(together.var().item(), rel=0.02)


def test_a_dose_of_0_changes_nothing_and_others_are_checked() -> None:
    network, images = two_layers(), torch.randn(4, 1, 8, 8)
    before = copy.deepcopy(network.state_dict())
    blend_statistics(network, images, (0.0, 0.0))
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    for doses in ((0.5,), (0.5, 1.5), (0.5, -0.1)):
        with pytest.raises(RoutingError, match=r"doses: expected 2 numbers within 0\.\.1"):
            blend_statistics(network, images, doses)


def test_doses_are_by_thirds_of_the_batch_norms() -> None:
    seven = nn.Sequential(*(nn.BatchNorm2d(1) for _ in range(7)))
    assert doses_by_depth(seven, (1.0, 0.5, 0.0)) == (1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0)


def test_few_images_get_less_of_the_dose() -> None:
    images = discs(3, 1, contrast=1.4)[0]
    share = 3 / (3 + PRIOR_IMAGES)
    found = blended(space().plain(), images, (1.0, 0.5, 0.0))
    network = space().plain()
    doses = [share * dose for dose in doses_by_depth(network, (1.0, 0.5, 0.0))]
    expected = blend_statistics(network, images, doses)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor)


def test_statistics_are_measured_in_one_pass_on_evenly_spaced_images() -> None:
    large = torch.zeros(5, 1, 2048, 1024)
    assert len(thinned(large)) == 2
    assert len(thinned(large)) * 2048 * 1024 <= MOST_PIXELS
    assert len(thinned(torch.zeros(3, 1, 4096, 4096))) == 1
    passes: list[int] = []
    network = space().plain()
    network.register_forward_pre_hook(lambda _network, inputs: passes.append(len(inputs[0])))
    blended(network, discs(40, 1)[0], (0.5, 0.5, 0.5))
    assert passes == [40]


def test_the_recipe_is_the_blended_global_model_and_learns_nothing() -> None:
    images = discs(8, 1, contrast=1.4)[0]
    config = AdaptationConfig(preset="ladder", doses=(0.5, 0.25, 0.0))
    found = recipe_of("ladder").adapt(space(), images, config, CPU)
    expected = blended(space().plain(), images, (0.5, 0.25, 0.0))
    assert all(torch.equal(found.merged.state_dict()[n], t) for n, t in expected.state_dict().items())
    assert (found.learned, found.adaptation.fell_back, len(found.adaptation.history)) == (None, False, 1)


def naive_weights(found: torch.Tensor) -> torch.Tensor:
    """As the published code of InTEnt: balanced entropy per rung, normalised, softmax; rung by rung."""
    costs = []
    for rung in found:
        entropy = functional.cross_entropy(rung.log(), rung, reduction="none") / math.log(rung.shape[1])
        mask = rung.argmax(dim=1) > 0
        both = mask.any() and (~mask).any()
        costs.append((entropy[mask].mean() + entropy[~mask].mean()) / 2 if both else entropy.mean())
    weights = -torch.stack(costs)
    weights = (weights - weights.min()) / (weights.max() - weights.min())
    return torch.softmax(weights, dim=0)


def test_rungs_are_weighted_by_their_balanced_entropy() -> None:
    draw = torch.Generator().manual_seed(0)
    found = torch.softmax(3 * torch.randn(4, 2, 3, 6, 6, generator=draw), dim=2)
    found[3, :, 0] = 0.9  # nothing but background
    found[3, :, 1:] = 0.05
    torch.testing.assert_close(balanced_weights(found), naive_weights(found), rtol=1e-4, atol=1e-5)


def test_equal_rungs_weigh_the_same_and_answer_as_one() -> None:
    network, images = space().plain().eval(), discs(2, 3)[0]
    with torch.no_grad():
        together = torch.softmax(Rungs([network, copy.deepcopy(network)])(images), dim=1)
        alone = torch.softmax(network(images), dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def graph() -> bytes:
    return scan_graph(space().plain(), 1, (32, 32))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_scan_s_graph_gives_the_answer_of_the_recipe(graph: bytes, count: int) -> None:
    images = discs(6, 3, contrast=1.5)[0][:count]
    merged = recipe_of("intent").adapt(space(), images, AdaptationConfig(preset="intent"), CPU).merged
    with torch.no_grad():
        expected = torch.softmax(merged(images), dim=1).numpy()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": images.numpy()})
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_the_scan_s_graph_is_the_same_each_time_and_has_the_weights_once(graph: bytes) -> None:
    assert graph == scan_graph(space().plain(), 1, (32, 32))
    # One copy, whatever the number of rungs.
    assert len(graph) < 1.5 * len(to_onnx(space().plain(), 1, (32, 32))) + 400_000


def test_intent_has_six_rungs_from_training_s_statistics_to_the_scan_s() -> None:
    images = discs(4, 3, contrast=1.4)[0]
    merged = recipe_of("intent").adapt(space(), images, AdaptationConfig(preset="intent"), CPU).merged
    assert isinstance(merged, Rungs)
    first, last = merged.networks[0], merged.networks[-1]
    for name, tensor in space().plain().state_dict().items():
        assert torch.equal(first.state_dict()[name], tensor)
    expected = blend_statistics(space().plain(), images, [1.0] * 18)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(last.state_dict()[name], tensor)
    assert len(merged.networks) == 6
