"""FedDG: amplitudes and their egress, episodes against a plain loop and finite differences, known cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor, nn
from torch.nn import functional

from personalization.feddg import boundaries, contrast, embeddings, interpolated, low_amplitudes
from personalization.networks import registry
from personalization.networks.capabilities import Traits
from tests.helpers.training.sites import (
    EMPTY,
    TASK,
    client_step,
    context,
    noise,
    phase_of,
    result_of,
    server_step,
    site_data,
)
from training.algorithm import SiteSize
from training.bounds import FeatureBounds
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.local.schedule import Batch
from training.methods.fedavg import FedAvg
from training.methods.feddg import FedDg, FedDgConfig
from training.state_tree import part

SMALL = {"recipe": "paper", "width": 2, "batch_size": 4, "augment": False, "rounds": 1}
SITES = {"A": site_data("A", 8, 2, 0), "B": site_data("B", 6, 2, 5), "C": site_data("C", 4, 2, 9)}


def algorithm(**options: object) -> FedDg:
    return FedDg(FedDgConfig(**{**SMALL, **options}), TASK)


def amplitudes(found: FedDg, **bounds: object) -> dict[str, Mapping[str, Tensor]]:
    where = [
        replace(context("amplitudes", 0, site=site), bounds=FeatureBounds(**bounds), noise=noise)
        for site in SITES
    ]
    return {
        site: client_step(found, here, {}, EMPTY, SITES[site]).uploads["amplitudes"]
        for here, site in zip(where, SITES, strict=True)
    }


# ---------------------------------------------------------------------- amplitudes


def test_interpolation_is_that_of_a_loop_over_frequencies() -> None:
    draw = torch.Generator().manual_seed(0)
    images, others = (torch.randn(2, 3, 8, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    shares = torch.tensor([0.3, 1.0])
    found = interpolated(images, low_amplitudes(others, 2).double(), shares)
    for image, other, share, result in zip(
        images.numpy(), others.numpy(), shares.tolist(), found, strict=True
    ):
        for channel in range(3):
            mine, theirs = np.fft.fft2(image[channel]), np.fft.fft2(other[channel])
            for row in range(-2, 3):
                for column in range(-2, 3):
                    old, phase = abs(mine[row, column]), np.angle(mine[row, column])
                    new = (1 - share) * old + share * abs(theirs[row, column])
                    mine[row, column] = new * np.exp(1j * phase)
            expected = np.fft.ifft2(mine).real.clip(image[channel].min(), image[channel].max())
            # Amplitudes travel in float32.
            np.testing.assert_allclose(result[channel], expected, atol=1e-6)


def test_the_authors_replacement_of_a_centred_window_is_lambda_1() -> None:
    """liuquande/FedDG-ELCFS, dataloaders/fundus_dataloader.py: the window around the centre of the shifted
    spectrum, floor(side L) frequencies each way, is the other's; clipped to the range."""
    draw = np.random.default_rng(1)
    image, other = draw.normal(size=(2, 16, 16))
    for each_way in (0, 1):
        spectrum = np.fft.fft2(image)
        shifted = np.fft.fftshift(np.abs(spectrum))
        place = slice(8 - each_way, 8 + each_way + 1)
        shifted[place, place] = np.fft.fftshift(np.abs(np.fft.fft2(other)))[place, place]
        mixed = np.fft.ifft2(np.fft.ifftshift(shifted) * np.exp(1j * np.angle(spectrum))).real
        expected = mixed.clip(image.min(), image.max())
        one, two = torch.from_numpy(image)[None, None], torch.from_numpy(other)[None, None]
        found = interpolated(one, low_amplitudes(two, each_way).double(), torch.ones(1))
        np.testing.assert_allclose(found[0, 0], expected, atol=1e-6)
        assert abs(expected - image).max() > 1e-3


def test_with_lambda_0_an_image_stays_and_volumes_and_signals_are_mixed_too() -> None:
    for sides in ((16,), (16, 16), (8, 12, 16)):
        images = torch.randn(2, 1, *sides, dtype=torch.float64)
        others = low_amplitudes(torch.randn(2, 1, *sides), 1)
        assert others.shape == (2, 1, *(3 for _ in sides))
        torch.testing.assert_close(interpolated(images, others, torch.zeros(2)), images)
        assert not torch.allclose(interpolated(images, others, torch.ones(2)), images)


def test_only_low_frequencies_of_some_images_leave_a_site_and_never_phases() -> None:
    sent = amplitudes(algorithm(periods=2, spectra_share=0.5))
    assert {site: list(state["amplitudes"].shape) for site, state in sent.items()} == {
        "A": [4, 1, 5, 5],
        "B": [3, 1, 5, 5],
        "C": [2, 1, 5, 5],
    }
    every = low_amplitudes(torch.from_numpy(SITES["A"].train.images), 2)
    for window in sent["A"]["amplitudes"]:
        assert min(float((window - one).abs().max()) for one in every) < 1e-4


def test_a_site_s_bounds_hold_for_single_images() -> None:
    for bounds in ({"minimum_images": 2}, {"minimum_patients": 2}):
        assert all(not state for state in amplitudes(algorithm(), **bounds).values())
    bounded = amplitudes(algorithm(), clip=1.0)["A"]["amplitudes"]
    assert bounded.flatten(1).norm(dim=1).max() <= 1 + 1e-6
    noised = amplitudes(algorithm(), clip=1.0, noise=0.1)["A"]["amplitudes"]
    assert 0.02 < float((noised - bounded).std()) < 0.2
    assert noised.min() >= 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"amplitudes": torch.zeros(9, 1, 3, 3)}, r"of 1 to 8 images, found \[9, 1, 3, 3\]"),
        ({"amplitudes": torch.zeros(2, 1, 32, 32)}, r"expected \[N, 1, 3, 3\]"),
        ({"amplitudes": -torch.ones(2, 1, 3, 3)}, "at least 0"),
        ({"phases": torch.zeros(2, 1, 3, 3)}, "expected the float32 tensor 'amplitudes'"),
    ],
)
def test_what_is_no_window_of_amplitudes_is_rejected(state: dict[str, Tensor], message: str) -> None:
    [group] = phase_of(algorithm(), "amplitudes").uploads
    assert (group.kind, group.essential, group.bounded) == ("features", False, True)
    group.check({"amplitudes": torch.zeros(8, 1, 3, 3)}, SiteSize(images=8))
    with pytest.raises(ValueError, match=message):
        group.check(state, SiteSize(images=8))


def test_a_site_keeps_the_others_amplitudes_alone() -> None:
    found = algorithm()
    sent = amplitudes(found)
    results = {
        site: client_step(found, context("amplitudes", 0, site=site), {}, EMPTY, SITES[site])
        for site in SITES
    }
    server = found.initial(context("initial", 0))
    collected = result_of(results, mean=None, collect=("amplitudes",))
    server = server_step(found, context("amplitudes", 0), server, collected)
    received = phase_of(found, "bank").broadcast(server, "A")
    kept = client_step(found, context("bank", 0, site="A"), received, EMPTY, SITES["A"]).memory
    bank = part(kept.tensors, "amplitudes/amplitudes")
    assert sorted(bank) == ["B", "C"]
    assert torch.equal(bank["B"], sent["B"]["amplitudes"])


# ---------------------------------------------------------------------- contrast


def test_boundaries_are_a_pixel_inside_and_five_outside() -> None:
    targets = torch.zeros(1, 32, 32, dtype=torch.uint8)
    targets[0, 10:20, 10:20] = 1
    edge, around = boundaries(targets, 1)
    # The rim of a 10 x 10 square, and the diamond of radius 5 around it without its corners.
    assert edge.sum() == 36
    assert around.sum() == 4 * 10 * 5 + 4 * (4 + 3 + 2 + 1)
    assert not (edge * around).any()
    assert not (around.bool() & (targets > 0)).any()


def test_contrast_is_that_of_the_authors_library() -> None:
    """kevinmusgrave/pytorch-metric-learning, losses/ntxent_loss.py, with cosine similarity and labels."""
    draw = torch.Generator().manual_seed(2)
    found, labels = torch.randn(7, 4, generator=draw, dtype=torch.float64), [1, 1, 0, 0, 0, 1, 0]
    losses = []
    for anchor in range(7):
        for positive in range(7):
            if anchor == positive or labels[anchor] != labels[positive]:
                continue
            similar = functional.cosine_similarity(found[anchor], found[positive], dim=0).item() / 0.05
            negatives = [
                functional.cosine_similarity(found[anchor], found[other], dim=0).item() / 0.05
                for other in range(7)
                if labels[other] != labels[anchor]
            ]
            top = max(similar, *negatives)
            below = sum(math.exp(n - top) for n in negatives) + math.exp(similar - top)
            losses.append(-math.log(math.exp(similar - top) / below + 1e-300))
    torch.testing.assert_close(
        contrast(found, torch.tensor(labels)).item(), sum(losses) / len(losses), rtol=1e-10, atol=0
    )


def test_images_without_the_class_have_no_embedding_and_no_pair_costs_nothing() -> None:
    features = torch.randn(3, 2, 8, 8)
    mask = torch.zeros(3, 8, 8)
    mask[1, 2, 2:4] = 1
    torch.testing.assert_close(embeddings(features, mask), features[1:2, :, 2, 2:4].mean(-1))
    assert contrast(torch.randn(1, 2), torch.tensor([1])).item() == 0
    assert contrast(torch.zeros(0, 2), torch.zeros(0)).item() == 0


# ---------------------------------------------------------------------- episodes


class Small(nn.Module):
    """Two convolutions with instance norm between them, in float64."""

    traits = Traits("segmentation", head=("last",))

    def __init__(self, **_: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1, dtype=torch.float64)
        self.last = nn.Conv2d(3, 2, 1, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(functional.silu(functional.instance_norm(self.first(images))))


def answer(w: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The network as a function of its weights."""
    inner = functional.conv2d(x, w["first.weight"], w["first.bias"], padding=1)
    features = functional.silu(functional.instance_norm(inner))
    return functional.conv2d(features, w["last.weight"], w["last.bias"]), features


def dice_loss(logits: Tensor, targets: Tensor) -> Tensor:
    score, truth = logits.softmax(1), functional.one_hot(targets.long(), 2).permute(0, 3, 1, 2)
    parts = [
        (2 * (score[:, c] * truth[:, c]).sum() + 1e-5) / (score[:, c].sum() + truth[:, c].sum() + 1e-5)
        for c in range(2)
    ]
    return 1 - sum(parts) / 2


def means(features: Tensor, masks: np.ndarray) -> list[Tensor]:
    return [(f * torch.from_numpy(m)).sum((-1, -2)) / m.sum() for f, m in zip(features, masks, strict=True)]


def total_of(w: Mapping[str, Tensor], x: Tensor, seen: Tensor, targets: Tensor, *, second: bool) -> Tensor:
    """liuquande/FedDG-ELCFS, train_ELCFS.py: inner + outer Dice + 0.1 contrast, at w - 1e-3 clamp(grad, 100).

    There `autograd.grad` keeps the graph but makes none of the gradient: the first order.
    """
    logits, features = answer(w, x)
    inner = dice_loss(logits, targets)
    slopes = torch.autograd.grad(inner, list(w.values()), create_graph=second, retain_graph=True)
    moved = {n: v - 1e-3 * g.clamp(-100, 100) for (n, v), g in zip(w.items(), slopes, strict=True)}
    outer, others = answer(moved, seen)
    masks = targets.numpy().astype(bool)
    edge = np.stack([m & ~ndimage.binary_erosion(m) for m in masks])
    around = np.stack([ndimage.binary_dilation(m, iterations=5) & ~m for m in masks])
    both = torch.stack(
        [*means(features, edge), *means(others, edge), *means(features, around), *means(others, around)]
    )
    labels = torch.tensor([1] * (len(both) // 2) + [0] * (len(both) // 2))
    return inner + dice_loss(outer, targets) + 0.1 * contrast(both, labels)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    monkeypatch.setitem(registry._NETWORKS, "small", Small)
    torch.manual_seed(0)
    return Small()


def batch_of(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    images, targets = (torch.from_numpy(a) for a in (SITES["A"].train.images, SITES["A"].train.targets))
    shown = interpolated(
        images[:count].double(),
        low_amplitudes(images[count : 2 * count], 1).double(),
        torch.full((count,), 0.5),
    )
    return images[:count].double(), shown, targets[:count]


@pytest.mark.parametrize("reading", ["paper", "code"])
def test_an_episode_s_gradient_is_that_of_the_update_rule(small: Small, reading: str) -> None:
    found = algorithm(network="small", reading=reading)
    x, seen, targets = batch_of()
    total = found.episode(small, Batch(x, targets), seen)
    slopes = torch.autograd.grad(total, list(small.parameters()))
    w = {name: p.detach().clone().requires_grad_() for name, p in small.named_parameters()}
    expected = total_of(w, x, seen, targets, second=reading == "paper")
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-13)
    for slope, other in zip(slopes, torch.autograd.grad(expected, list(w.values())), strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-9, atol=1e-12)


def test_the_second_order_is_the_gradient_by_finite_differences_and_the_first_is_not(small: Small) -> None:
    x, seen, targets = batch_of()
    # A long inner step, so that the orders differ.
    options = {"network": "small", "inner_rate": 5.0}
    slopes = {
        order: torch.autograd.grad(
            algorithm(**options, order=order).episode(small, Batch(x, targets), seen),
            list(small.parameters()),
        )
        for order in ("second", "first")
    }
    second, step = algorithm(**options, order="second"), 1e-5
    errors = {"second": 0.0, "first": 0.0}
    for index, weight in enumerate(small.parameters()):
        flat = weight.detach().view(-1)
        for place in (0, len(flat) - 1):
            there, values = flat[place].item(), []
            for moved in (there + step, there - step):
                flat[place] = moved
                values.append(second.episode(small, Batch(x, targets), seen).item())
            flat[place] = there
            slope = (values[0] - values[1]) / (2 * step)
            for order, own in slopes.items():
                errors[order] = max(errors[order], abs(own[index].view(-1)[place].item() - slope))
    assert errors["second"] < 1e-7 < 1e-4 < errors["first"]


def test_a_round_is_that_of_a_plain_loop(small: Small) -> None:
    """Adam on the total, on views that are drawn with the round's generator."""
    found = algorithm(network="small")
    site = replace(
        SITES["A"], train=replace(SITES["A"].train, images=SITES["A"].train.images.astype(np.float64))
    )
    bank = {s: low_amplitudes(torch.from_numpy(SITES[s].train.images), 1) for s in ("B", "C")}
    w = {name: p.detach().clone().requires_grad_() for name, p in small.named_parameters()}
    here = context("train", 0, 1, "A")
    found.episodes(here, small, site.train, bank)
    adam = torch.optim.Adam(w.values(), lr=1e-3)
    images, targets = torch.from_numpy(site.train.images), torch.from_numpy(site.train.targets)
    train, draw = here.generator("train"), here.generator("interpolation")
    for chosen in torch.randperm(8, generator=train).split(4):
        others = []
        for _ in chosen:
            others.append(int(torch.randint(2, (), generator=draw)))
        own = [bank["BC"[o]] for o in others]
        picked = torch.stack([b[int(torch.randint(len(b), (), generator=draw))] for b in own])
        seen = interpolated(images[chosen], picked, torch.rand(4, generator=draw))
        adam.zero_grad()
        total_of(w, images[chosen], seen, targets[chosen], second=True).backward()
        adam.step()
    for name, parameter in small.named_parameters():
        torch.testing.assert_close(parameter, w[name], rtol=1e-7, atol=1e-9)


def test_without_a_bank_and_an_outer_step_a_step_is_fedavg_s_of_twice_the_rate() -> None:
    """x' is x, w' is w and there is no contrast: the total is 2 L."""
    plain = FedAvg(FedAvgConfig(**SMALL, optimiser="sgd", learning_rate=0.02), TASK)
    options = {"inner_rate": 1e-12, "boundary_weight": 0.0, "optimiser": "sgd", "learning_rate": 0.01}
    received = {"weights": part(plain.initial(context("initial", 0)).tensors, "train/w_g")}
    once, twice = (
        client_step(method, context("train", 0, 1, "A"), received, EMPTY, SITES["A"]).uploads["weights"]
        for method in (plain, algorithm(**options))
    )
    for name, tensor in once.items():
        # The second pass leaves the statistics as they are, but is counted.
        if "num_batches" not in name:
            torch.testing.assert_close(twice[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_code_s_reading_sets_what_is_not_given() -> None:
    found = FedDgConfig(reading="code", periods=3)
    assert (found.periods, found.spectra_share, found.mixing, found.order) == (3, 0.125, "replaced", "first")
    assert FedDgConfig().order == "second"


def test_more_frequencies_than_an_image_has_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="periods: expected at most 15 in images of 32x32, found 16"):
        algorithm(periods=16)
