"""The science on signals, images and volumes, against loops over their pixels."""

from __future__ import annotations

import itertools
import math
import operator
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personalization.augmentation import Augmentation, transform
from personalization.dose import view
from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.gate.masks import checked_maps, mean_fragments
from personalization.gate.statistics import shift_of_statistics
from personalization.iop_fl.batch_norm import blend_statistics, image_moments
from personalization.iop_fl.layers import RoutedConvolution
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import MOST_VOXELS_LEARNED, at_once, batches, route, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.losses import SMOOTHING, soft_dice_loss
from personalization.networks import registry
from personalization.options.presets import PRESETS
from personalization.scanner import Scanners, augment_intensities
from personalization.test_time import losses
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import ScanLadder
from personalization.test_time.perturb import RotFlip, add_noise
from personalization.test_time.recipe import recipe_of
from tests.helpers.personalization.routing_cases import Fixed
from tests.helpers.personalization.toy_networks import CONVOLUTIONS, TRANSPOSED, ToyNet, toy

dimensions = pytest.mark.parametrize("dims", [1, 2, 3])
SIDES = {1: (6,), 2: (4, 6), 3: (4, 6, 4)}


def drawn(dims: int, count: int = 2, channels: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, *SIDES[dims], generator=torch.Generator().manual_seed(seed))


def positions(tensor: Tensor) -> Any:
    return itertools.product(*(range(side) for side in tensor.shape[2:]))


@pytest.fixture(autouse=True)
def toy_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._NETWORKS, "toy", ToyNet)


def space(dims: int, **arguments: Any) -> RoutingSpace:
    own = {"in_channels": 1, "classes": 2, "dimensions": dims, **arguments}
    states = [toy(dims, seed, **arguments).state_dict() for seed in range(3)]
    return RoutingSpace.of("toy", own, {"a": states[1], "b": states[2]}, states[0])


@dimensions
@pytest.mark.parametrize("transposed", [False, True])
def test_routed_convolution_is_the_convolution_with_the_mixed_weight(dims: int, transposed: bool) -> None:
    make = (TRANSPOSED if transposed else CONVOLUTIONS)[dims]
    plain = make(2, 4, 2, stride=2, groups=2)
    experts = torch.randn(3, *plain.weight.shape)
    biases = torch.randn(3, 4)
    share = torch.tensor([0.2, 0.5, 0.3])
    routed = RoutedConvolution(plain, experts, biases, Fixed(share))
    plain.weight.data = sum(share[k] * experts[k] for k in range(3))
    plain.bias.data = sum(share[k] * biases[k] for k in range(3))
    images = drawn(dims, channels=2)
    torch.testing.assert_close(routed(images), plain(images))
    # Coefficients of their own for each image
    routed.router = Fixed(torch.eye(3)[:2])
    for index in range(2):
        plain.weight.data, plain.bias.data = experts[index], biases[index]
        torch.testing.assert_close(routed(images)[index], plain(images[index : index + 1])[0])


@dimensions
def test_image_moments_are_those_of_the_pixels(dims: int) -> None:
    features = drawn(dims, channels=2)
    mean, variance = image_moments(features)
    for image, channel in itertools.product(range(2), range(2)):
        values = [float(features[(image, channel, *at)]) for at in positions(features)]
        middle = math.fsum(values) / len(values)
        assert float(mean[image, channel]) == pytest.approx(middle, abs=1e-6)
        spread = math.fsum((value - middle) ** 2 for value in values) / len(values)
        assert float(variance[image, channel]) == pytest.approx(spread, rel=1e-5)


@dimensions
def test_blend_of_one_norm_is_hand_computed(dims: int) -> None:
    network = nn.Sequential(toy(dims).body[1])
    (norm,) = network
    before = norm.running_mean.clone(), norm.running_var.clone()
    images = drawn(dims, channels=4)
    blend_statistics(network, images, [0.25])
    for channel in range(4):
        values = images[:, channel].flatten().double()
        mean, variance = float(values.mean()), float(values.var(correction=0))
        m, v = (float(statistic[channel]) for statistic in before)
        assert float(norm.running_mean[channel]) == pytest.approx(0.75 * m + 0.25 * mean, abs=1e-5)
        mixture = 0.75 * v + 0.25 * variance + 0.25 * 0.75 * (m - mean) ** 2
        assert float(norm.running_var[channel]) == pytest.approx(mixture, rel=1e-5)


@dimensions
def test_soft_dice_is_a_sum_over_pixels(dims: int) -> None:
    logits = drawn(dims, channels=3)
    truth = torch.randint(3, (2, *SIDES[dims]), generator=torch.Generator().manual_seed(1))
    share, terms = logits.double().softmax(1), []
    for c in range(3):
        pixels = [(b, at) for b in range(2) for at in positions(logits)]
        overlap = sum(float(share[(b, c, *at)]) for b, at in pixels if truth[(b, *at)] == c)
        total = sum(float(share[(b, c, *at)]) + float(truth[(b, *at)] == c) for b, at in pixels)
        terms.append((2 * overlap + SMOOTHING) / (total + SMOOTHING))
    assert float(soft_dice_loss(logits, truth)) == pytest.approx(1 - sum(terms) / 3, abs=1e-6)


@dimensions
def test_shape_distance_looks_at_the_pixels_around_each(dims: int) -> None:
    share = drawn(dims, channels=2).softmax(1)
    spans = []
    for b, at in itertools.product(range(2), positions(share)):
        near = [
            other
            for other in positions(share)
            if all(abs(one - two) <= 1 for one, two in zip(at, other, strict=True))
        ]
        for c in range(2):
            values = [float(share[(b, c, *other)]) for other in near]
            spans.append(max(values) - min(values))
    expected = math.fsum(spans) / (2 * math.prod(SIDES[dims]))
    assert float(losses.shape_distance(share, 1)) == pytest.approx(expected, abs=1e-6)
    assert losses.shape_range(*SIDES[dims]) == 1


@dimensions
def test_entropy_does_not_depend_on_how_pixels_are_arranged(dims: int) -> None:
    share = drawn(dims, channels=2).softmax(1)
    torch.testing.assert_close(losses.entropy(share), losses.entropy(share.flatten(2)))


@dimensions
def test_noise_is_in_units_of_each_images_deviation(dims: int) -> None:
    images = drawn(dims, channels=2) * torch.tensor([1.0, 3.0]).view(2, *(1,) * (dims + 1))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(4))
    seen = add_noise(images, torch.Generator().manual_seed(4), std=0.5)
    for index in range(2):
        deviation = images[index].flatten().std(correction=0)
        torch.testing.assert_close(seen[index], images[index] + 0.5 * deviation * noise[index])


@dimensions
def test_flips_and_turns_are_undone(dims: int) -> None:
    square = torch.randn(8, 1, *(4,) * dims, generator=torch.Generator().manual_seed(0))
    view_ = RotFlip.draw(square, torch.Generator().manual_seed(1))
    assert any(view_.flips)
    assert any(view_.turns) == (dims > 1)
    assert not torch.equal(view_.apply(square), square)
    assert torch.equal(view_.undo(view_.apply(square)), square)


@dimensions
def test_drawn_scanner_shades_and_blurs_along_every_axis(dims: int) -> None:
    images = drawn(dims)
    severity = torch.full((2,), 2.0)
    scanner = Scanners.draw(severity, torch.Generator().manual_seed(0), dims)
    orders = list(itertools.product(range(3), repeat=dims))[1:]
    assert scanner.shading.shape == (2, len(orders))
    field = scanner._field(SIDES[dims])
    for at in positions(images):
        waves = [
            reduce(
                operator.mul,
                (
                    math.cos(math.pi * k * (i + 0.5) / n)
                    for k, i, n in zip(order, at, SIDES[dims], strict=True)
                ),
            )
            for order in orders
        ]
        expected = math.exp(sum(float(c) * w for c, w in zip(scanner.shading[0], waves, strict=True)))
        assert float(field[(0, 0, *at)]) == pytest.approx(expected, rel=1e-4)
    # A blur is a Gaussian factor of every frequency
    blurred = torch.fft.fftn(scanner._blurred(images)[0, 0].double())
    plain = torch.fft.fftn(images[0, 0].double())
    sigma = float(scanner.blur[0]) * max(SIDES[dims])
    for at in positions(images):
        squares = sum(float(torch.fft.fftfreq(n)[i]) ** 2 for i, n in zip(at, SIDES[dims], strict=True))
        factor = math.exp(-2 * (math.pi * sigma) ** 2 * squares)
        torch.testing.assert_close(blurred[at], plain[at] * factor, rtol=1e-4, atol=1e-4)
    seen = augment_intensities(images, 2.0, torch.Generator().manual_seed(5))
    torch.testing.assert_close(seen.flatten(1).mean(1), images.flatten(1).mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_volume_is_augmented_slice_by_slice_alike(turns: int) -> None:
    """Rotation by quarters, where resampling is exact."""
    volume = torch.randn(1, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    truth = torch.randint(3, (1, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    angle, signs = torch.tensor([turns * math.pi / 2]), torch.tensor([[-1.0, 1.0]])
    image, target = transform(volume, truth, angle, signs)
    for index in range(3):
        flat, flat_target = transform(volume[:, :, index], truth[:, index], angle, signs)
        torch.testing.assert_close(image[:, :, index], flat, atol=1e-5, rtol=0)
        assert torch.equal(target[:, index], flat_target)
    with pytest.raises(NetworkError, match="train with augment: false"):
        transform(torch.zeros(1, 1, 4), torch.zeros(1, 4), *Augmentation().draw(1, torch.Generator()))


@dimensions
def test_pieces_of_masks_touch_at_corners_too(dims: int) -> None:
    maps = torch.zeros(1, *(4,) * dims, dtype=torch.uint8)
    maps[(0, *(0,) * dims)] = maps[(0, *(1,) * dims)] = maps[(0, *(3,) * dims)] = 1
    assert mean_fragments(checked_maps(maps.numpy(), "masks", 2), 2) == 2


@dimensions
def test_ladder_of_a_scan_is_blended_for_every_rung(dims: int) -> None:
    network, images = toy(dims), drawn(dims, count=3)
    rungs = []
    for dose in (0.0, 0.5):
        moved = blend_statistics(toy(dims), images, [dose], len(images))
        rungs.append(torch.softmax(moved(images), dim=1))
    mixture = torch.softmax(ScanLadder(network, (0.0, 0.5))(images), dim=1)
    lowest, highest = torch.minimum(*rungs), torch.maximum(*rungs)
    assert bool(((mixture >= lowest - 1e-5) & (mixture <= highest + 1e-5)).all())
    assert not torch.allclose(rungs[0], rungs[1], atol=1e-3)
    torch.testing.assert_close(
        torch.softmax(ScanLadder(network, (0.5,))(images), dim=1), rungs[1], atol=1e-5, rtol=1e-4
    )


@dimensions
@pytest.mark.parametrize("router", ["direct", "pooled"])
def test_uniform_routing_merges_to_the_mean_of_the_models(dims: int, router: Any) -> None:
    over, images = space(dims), drawn(dims, count=3)
    routed = route(over, router)
    assert list(routed_layers(routed)) == ["down", "body.0", "up", "output"]
    merged = merge(over, routed, images, prior_images=0)
    mean = sum(state["up.weight"] for state in over.experts.values()) / 3
    torch.testing.assert_close(merged.get_submodule("up").weight, mean)
    routed.eval()
    torch.testing.assert_close(merged(images), routed(images), atol=1e-4, rtol=1e-3)


# Volumes have no network with a rotation head.
OF_VOLUMES = [name for name in PRESETS if PRESETS[name].norm != "instance" and name != "ttt"]


@pytest.mark.parametrize("preset", OF_VOLUMES)
def test_every_preset_adapts_a_network_of_volumes(preset: str) -> None:
    over, images = space(3), drawn(3, count=3)
    router = PRESETS[preset].router or "direct"
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3, router=router)
    found = recipe_of(preset).adapt(over, images, config, torch.device("cpu"))
    answer = found.merged(images)
    assert answer.shape == (3, 2, *SIDES[3])
    assert bool(torch.isfinite(answer).all())
    before = toy(3)(images)
    assert not torch.allclose(torch.softmax(answer, 1), torch.softmax(before, 1), atol=1e-4)


@pytest.mark.parametrize("preset", ["ladder", "intent", "statistics", "tent"])
def test_preset_without_anything_to_move_refuses(preset: str) -> None:
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3)
    with pytest.raises(NetworkError, match="InstanceNorm3d; there is nothing to move"):
        recipe_of(preset).adapt(space(3, norm="instance"), drawn(3), config, torch.device("cpu"))


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_preset_that_mixes_models_needs_no_batch_norm(preset: str) -> None:
    over, images = space(3, norm="instance"), drawn(3, count=3)
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3)
    found = recipe_of(preset).adapt(over, images, config, torch.device("cpu"))
    assert bool(torch.isfinite(found.merged(images)).all())


def test_gate_and_dose_measure_volumes_and_know_networks_without_batch_norm() -> None:
    images = drawn(3, count=3)
    network = toy(3)
    assert 0 < shift_of_statistics(network.state_dict(), network, images) < 1
    found = view(network, images, patients=range(3))
    assert found.maps.shape == (3, *SIDES[3])
    assert found.profile is not None
    assert bool((found.profile.shift > 0).all())
    plain = toy(3, norm="instance")
    assert shift_of_statistics(plain.state_dict(), plain, images) == 0
    with pytest.raises(NetworkError, match="batch norm"):
        view(plain, images, patients=range(3))


@dimensions
def test_graph_of_any_number_of_axes_equals_torch(dims: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    images = drawn(dims, count=3)
    for network in (toy(dims), ScanLadder(toy(dims), (0.0, 0.5, 1.0))):
        graph = to_onnx(network, 1, SIDES[dims])
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"image": images.numpy()})
        with torch.no_grad():
            expected = torch.softmax(network(images), dim=1)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)


def test_batches_of_volumes_have_as_many_voxels_as_fit() -> None:
    assert at_once(16, (512, 512)) == 16
    assert at_once(16, (40, 56, 40)) == 16
    assert at_once(16, (96, 96, 96)) == 4
    assert at_once(16, (512, 512, 512)) == 1
    assert at_once(16, (40, 56, 40), MOST_VOXELS_LEARNED) == 5
    assert [len(each) for each in batches(torch.empty(6, 1, 96, 96, 96, device="meta"), 16)] == [3, 3]
