"""Recipes that learn, against plain loops written from their papers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.iop_fl.network import route, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import Prompted, build
from personalization.options.presets import PRESETS
from personalization.scanner import augment_intensities
from personalization.state import State
from personalization.test_time import losses
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import ensemble
from personalization.test_time.objective import Batch
from personalization.test_time.presets import anchored, distilled, grata, prompt, sar
from personalization.test_time.recipe import Adapted, recipe_of
from personalization.test_time.trust import loss_and_trust
from tests.helpers.personalization.discs import discs, headed, space

CPU = torch.device("cpu")
IMAGES = discs(6, 3, contrast=1.5)[0]


def space_for(preset: str) -> RoutingSpace:
    """The space; with rotation heads for the preset that needs them."""
    return headed(space()) if preset == "ttt" else space()


def adapted(preset: str, over: RoutingSpace | None = None, **options: object) -> Adapted:
    config = AdaptationConfig(**{"preset": preset, "epochs": 2, "batch_size": 3, **options})
    return recipe_of(preset).adapt(over or space_for(preset), IMAGES, config, CPU)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].norm != "instance"])
def test_every_recipe_ends_in_one_plain_network_the_same_at_every_call(preset: str) -> None:
    found = adapted(preset)
    assert not found.merged.training
    assert not routed_layers(found.merged)
    again = adapted(preset)
    for name, tensor in found.merged.state_dict().items():
        assert torch.equal(again.merged.state_dict()[name], tensor)
    assert to_onnx(found.merged, 1, (32, 32)) == to_onnx(again.merged, 1, (32, 32))
    if preset != "intent":  # an answer to one scan, not a network of a hospital
        over = space_for(preset)
        name, arguments = recipe_of(preset).architecture(over, IMAGES, AdaptationConfig(preset=preset))
        build(name, **arguments).load_state_dict(found.merged.state_dict())


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.learns])
def test_a_recipe_that_learns_resumes_bit_for_bit(preset: str) -> None:
    config = AdaptationConfig(preset=preset, epochs=3, batch_size=3)
    points: list[AdaptationCheckpoint] = []
    recipe = recipe_of(preset)
    over = space_for(preset)
    whole = recipe.adapt(over, IMAGES, config, CPU, after_epoch=lambda _, point: points.append(point))
    content = points[1].to_bytes()
    again = recipe.adapt(over, IMAGES, config, CPU, resume=AdaptationCheckpoint.from_bytes(content))
    assert again.adaptation.history == whole.adaptation.history
    for name, tensor in whole.merged.state_dict().items():
        assert torch.equal(again.merged.state_dict()[name], tensor)


@pytest.mark.parametrize("preset", ["distilled", "anchored", "prompt"])
def test_the_loss_falls(preset: str) -> None:
    history = adapted(preset, epochs=4).adaptation.history
    measured = [record.loss for record in history if record.loss is not None]
    assert measured[-1] < measured[0]
    assert history[-1].reason is None


# ---------------------------------------------------------------------- prompt


def test_a_prompt_multiplies_the_amplitudes_of_the_lowest_frequencies() -> None:
    network = Prompted("unet", {"in_channels": 2, "classes": 2, "width": 2}, 32, 48)
    images = torch.randn(2, 2, 32, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.filtered(images), images)
    network.prompt.data.uniform_(0.5, 2)
    factors = torch.ones(2, 32, 48, dtype=torch.float64)
    index = 0
    for down in range(-2, 3):
        for right in range(3):
            if right == 0 and down < 0:
                continue
            for sign in (1, -1):
                factors[:, sign * down % 32, sign * right % 48] = network.prompt.data[:, index].double()
            index += 1
    expected = torch.fft.ifft2(factors * torch.fft.fft2(images.double())).real
    torch.testing.assert_close(network.filtered(images).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_for_one_size_and_only_it_is_learned() -> None:
    found = adapted("prompt")
    with pytest.raises(NetworkError, match=r"expected images of 32x32"):
        found.merged(torch.zeros(1, 1, 16, 32))
    plain = space().plain().state_dict()
    for name, tensor in found.merged.state_dict().items():
        if name != "prompt":
            assert torch.equal(plain[name.removeprefix("network.")], tensor)
    assert not torch.equal(found.merged.get_parameter("prompt"), torch.ones(1, 13))


def test_the_prompt_s_loss_is_the_distance_of_means_and_deviations() -> None:
    network = space().plain().eval()
    expected, features = [], IMAGES
    with torch.no_grad():
        for layer in network.encoder1:
            if isinstance(layer, nn.BatchNorm2d):
                mean, deviation = features.mean((0, 2, 3)), features.var((0, 2, 3)).sqrt()
                away = (mean - layer.running_mean).abs().mean()
                expected.append(away + (deviation - layer.running_var.sqrt()).abs().mean())
            features = layer(features)
        first = prompt.mismatch(network.encoder1[1], network.encoder1[0](IMAGES))
    torch.testing.assert_close(first, expected[0])
    steps = prompt.Matching().epoch_batches(6, AdaptationConfig(preset="prompt", batch_size=3), 0)
    assert len(steps) >= prompt.STEPS


class _AdaBN(nn.Module):
    """Batch norm as VPTTA's authors describe it for the first sample."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm, self.loss = norm, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        norm, wide = self.norm, (1, -1, 1, 1)
        moment = 1 / (1 / 5 + 1)
        mean = moment * x.mean((0, 2, 3)).detach() + (1 - moment) * norm.running_mean
        variance = moment * x.var((0, 2, 3)).detach() + (1 - moment) * norm.running_var
        self.loss = (mean.view(wide) - x.mean((2, 3), keepdim=True)).abs().mean() + (
            variance.sqrt().view(wide) - x.std((2, 3), keepdim=True)
        ).abs().mean()
        normal = (x - mean.view(wide)) / (variance.view(wide) + norm.eps).sqrt()
        return normal * norm.weight.view(wide) + norm.bias.view(wide)


def test_vptta_is_one_step_of_the_prompt_and_statistics_near_the_scan_s() -> None:
    naive = prompt.prompted(space(), IMAGES)
    for module in [*naive.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, _AdaBN(child))
    norms = [module for module in naive.modules() if isinstance(module, _AdaBN)]
    naive(IMAGES)
    loss = torch.stack([norm.loss for norm in norms]).mean()
    optimiser = torch.optim.Adam([naive.prompt], lr=0.05, betas=(0.9, 0.99))
    loss.backward()
    optimiser.step()
    found = recipe_of("vptta").adapt(space(), IMAGES, AdaptationConfig(preset="vptta"), CPU).merged
    torch.testing.assert_close(found.get_parameter("prompt"), naive.prompt)
    assert (found.get_parameter("prompt") - 1).abs().max() == pytest.approx(0.05, rel=1e-3)
    torch.testing.assert_close(found(IMAGES), naive(IMAGES), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "images",
    [
        torch.cat([torch.zeros(1, 1, 32, 32), IMAGES[:2], torch.zeros(1, 1, 32, 32)]),
        torch.zeros(1, 1, 32, 32),
        IMAGES[:2, :, :16, :16],
        IMAGES[:1, :, :16, :16],
    ],
    ids=["empty end slices", "empty scan", "one pixel at the bottom", "one slice, one pixel at the bottom"],
)
@pytest.mark.parametrize("preset", ["vptta", "prompt"])
def test_a_prompt_is_finite_where_a_slice_has_no_variance(preset: str, images: Tensor) -> None:
    config = AdaptationConfig(preset=preset, epochs=1)
    found = recipe_of(preset).adapt(space(), images, config, CPU).merged
    assert found.get_parameter("prompt").isfinite().all()
    assert found(images).isfinite().all()


# ---------------------------------------------------------------------- distilled


def test_distillation_is_soft_dice_and_cross_entropy_with_the_teacher() -> None:
    teacher = ensemble(space(), IMAGES, (0.5, 0.5, 0.5))
    chosen = torch.tensor([4, 1])
    network = space().plain().eval()
    with torch.no_grad():
        terms = distilled.Distillation(teacher).terms(
            network, Batch.of(IMAGES, chosen), AdaptationConfig(preset="distilled"), 0
        )
        p, q = torch.softmax(network(IMAGES[chosen]), dim=1), teacher[chosen]
    dice = [2 * (p[:, c] * q[:, c]).sum() / (p[:, c].square().sum() + q[:, c].square().sum()) for c in (0, 1)]
    entropy = -(q * p.log()).sum(dim=1).mean()
    torch.testing.assert_close(terms.loss, 1 - sum(dice) / 2 + entropy, rtol=1e-4, atol=1e-5)


def test_the_student_learns_at_fixed_statistics() -> None:
    over = space()
    learning = distilled.RECIPE.learning(over, IMAGES, AdaptationConfig(preset="distilled"), lambda: None)
    before = {name: value.clone() for name, value in learning.network.named_buffers()}
    adapted_network = adapted("distilled").merged
    for name, value in before.items():
        assert torch.equal(dict(adapted_network.named_buffers())[name], value)


# ---------------------------------------------------------------------- anchored


def test_anchored_routing_starts_near_the_global_model_with_one_coefficient_per_stage() -> None:
    learning = anchored.RECIPE.learning(space(), IMAGES, AdaptationConfig(preset="anchored"), lambda: None)
    layers = list(routed_layers(learning.network).values())
    shares = [layer.router(IMAGES).tolist() for layer in layers]
    assert all(share == pytest.approx([0.15, 0.15, 0.7]) for share in shares)
    assert len({id(layer.router) for layer in layers}) == anchored.STAGES
    [(logits, _)] = learning.groups
    assert sum(value.numel() for value in logits) == 5 * 3


def test_the_anchored_loss_is_its_four_terms() -> None:
    config = AdaptationConfig(preset="anchored", noise=0.0)
    learning = anchored.RECIPE.learning(space(), IMAGES, config, lambda: None)
    teacher = learning.origin["teacher"]
    [(logits, _)] = learning.groups
    start = [value.detach().clone() for value in logits]
    with torch.no_grad():
        logits[0][0] += 0.5
        batch = Batch.of(IMAGES, torch.tensor([0, 3]))
        terms = learning.objective.terms(learning.network.eval(), batch, config, 0)
        p, q = terms.probabilities, teacher[[0, 3]]
        dice = [2 * (p[:, c] * q[:, c]).sum() / (p[:, c] ** 2 + q[:, c] ** 2).sum() for c in (0, 1)]
        share, ratio = p.mean((0, 2, 3)), teacher.mean((0, 2, 3))
        divergence = (share * (share / ratio).log()).sum()
        entropy = -(p * p.log()).sum(1) / math.log(2)
        found = p.argmax(1) > 0
        balanced = (entropy[found].mean() + entropy[~found].mean()) / 2
        pull = sum((now - then).square().sum() for now, then in zip(logits, start, strict=True))
    expected = 1 - sum(dice) / 2 + 0.1 * balanced + divergence + 0.1 * pull
    torch.testing.assert_close(terms.loss, expected, rtol=1e-4, atol=1e-5)


def test_the_anchor_is_between_what_is_found_and_the_federation_s_size() -> None:
    found = torch.tensor([0.9, 0.06, 0.04])
    assert torch.equal(anchored.anchor(found, 20, None), found)
    drawn = anchored.anchor(found, 20, 0.4)  # as many images as the prior counts for: the geometric mean
    torch.testing.assert_close(drawn, torch.tensor([0.8, 0.12, 0.08]))
    assert anchored.anchor(found, 10**6, 0.4)[0] == pytest.approx(0.9, abs=1e-4)


def test_trust_is_1_where_gradients_agree_and_0_where_they_are_opposed() -> None:
    along, across = (
        [torch.tensor([1.0, 0.0]), torch.tensor([0.0])],
        [torch.tensor([0.0, 2.0]), torch.tensor([0.0])],
    )
    assert loss_and_trust(torch.tensor(0.5), along, [3 * part for part in along]) == pytest.approx((0.5, 1))
    assert loss_and_trust(torch.tensor(0.5), along, [-part for part in along]) == pytest.approx((0.5, 0))
    assert loss_and_trust(torch.tensor(0.5), along, across) == pytest.approx((0.5, 0.25))


# ---------------------------------------------------------------------- GraTa and SAR


def stepped(objective: grata.GraTa | sar.Sar, preset: str, images: Tensor) -> tuple[nn.Module, State, State]:
    """One step of SGD at rate 1 over scale and shift of batch norm in float64, what they were and the change.

    The change is a millionth of a parameter: in float32 little of it would be left.
    """
    network = route(space(dtype=torch.float64).alone()).train()
    learned = {n: p for n, p in network.named_parameters() if n.endswith(("bn1.weight", "bn1.bias"))}
    network.requires_grad_(False)
    for parameter in learned.values():
        parameter.requires_grad_(True)
    before = {name: parameter.detach().clone() for name, parameter in learned.items()}
    optimiser = torch.optim.SGD(learned.values(), lr=1.0)
    batch = Batch(images, torch.arange(len(images)))
    objective.step(network, batch, AdaptationConfig(preset=preset), optimiser, seed=7)
    return network, before, {name: network.get_parameter(name).detach() - before[name] for name in before}


def gradients(network: nn.Module, at: State, loss: Callable[[nn.Module], Tensor]) -> State:
    """By names, with the parameters `at`."""
    copied = copy.deepcopy(network)
    with torch.no_grad():
        for name, value in at.items():
            copied.get_parameter(name).copy_(value)
    names = list(at)
    found = torch.autograd.grad(loss(copied), [copied.get_parameter(name) for name in names])
    return dict(zip(names, found, strict=True))


def test_sar_climbs_to_the_worst_point_and_steps_along_its_gradient() -> None:
    images = IMAGES[:3].double()
    network, before, change = stepped(sar.Sar(), "sar", images)

    def entropy(net: nn.Module) -> Tensor:
        p = torch.softmax(net(images), dim=1)
        return -(p * p.log()).sum(1) / math.log(2)

    with torch.no_grad():
        start = copy.deepcopy(network)
        for name, value in before.items():
            start.get_parameter(name).copy_(value)
        reliable = entropy(start) < 0.4
    first = gradients(network, before, lambda net: entropy(net)[reliable].mean())
    norm = math.sqrt(sum(float(part.square().sum()) for part in first.values()))
    climbed = {name: value + 0.05 * first[name] / norm for name, value in before.items()}

    def worst(net: nn.Module) -> Tensor:
        each = entropy(net)
        return each[reliable & (each.detach() < 0.4)].mean()

    second = gradients(network, climbed, worst)
    for name, found in change.items():
        torch.testing.assert_close(found, -second[name], rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("width", [32, 16], ids=["square", "oblong"])
def test_grata_steps_along_consistency_as_far_as_entropy_agrees(width: int) -> None:
    images = IMAGES[:3, :, :, :width].double()
    turns = (1, 2, 3) if width == 32 else (2,)  # the others change an oblong image's size
    network, before, change = stepped(grata.GraTa(), "grata", images)

    def answer(net: nn.Module, view: Tensor) -> Tensor:
        return torch.softmax(net(view), dim=1)

    def consistency(net: nn.Module) -> Tensor:
        with torch.no_grad():
            weak = [answer(net, images), *(answer(net, images.flip(axis)).flip(axis) for axis in (2, 3))]
            for turn in turns:
                weak.append(answer(net, images.rot90(turn, (2, 3))).rot90(-turn, (2, 3)))
            wanted = sum(weak) / len(weak)
        strong = augment_intensities(images, 2.0, torch.Generator().manual_seed(7))
        return functional.binary_cross_entropy(answer(net, strong), wanted)

    auxiliary = gradients(network, before, lambda net: losses.entropy(answer(net, images)))
    moved = {name: value - auxiliary[name] for name, value in before.items()}
    pseudo = gradients(network, moved, consistency)
    one, other = (torch.cat([part.flatten() for part in each.values()]) for each in (auxiliary, pseudo))
    rate = (1 + float(one @ other / (one.norm() * other.norm()))) ** 2 / 4
    for name, found in change.items():
        torch.testing.assert_close(found, -rate * pseudo[name], rtol=1e-3, atol=1e-12)
