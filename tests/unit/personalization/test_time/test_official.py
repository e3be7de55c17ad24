"""`official` and `as-published` beside the reference loop written out once more, slowly and literally.

Nothing of the package's routing is used on the slow side: per sample and per expert loops, batch norm by its
formula, the losses as the public code has them, three forwards a step. float64; dropout 0 and 0.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from personalization.cancellation import never_cancelled
from personalization.iop_fl.network import coefficients, route
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build, initialise
from personalization.seeds import seed_of
from personalization.state import State, clone
from personalization.test_time.adapt import learn
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, recipe_of
from tests.helpers.personalization.discs import UNGUARDED, discs

ARGUMENTS = {"in_channels": 1, "classes": 2, "width": 2}


class Reference:
    """The routed U-Net as a function of its trained parameters, by name."""

    def __init__(self, experts: list[State], parameters: State, dropout: float = 0.0) -> None:
        self.experts = experts
        self.parameters = {name: value.requires_grad_() for name, value in parameters.items()}
        self.dropout = dropout
        self.masks = torch.Generator()

    def __call__(self, images: Tensor) -> Tensor:
        skips, h = [], images
        for level in (1, 2, 3, 4):
            h = self.block(h, f"encoder{level}.enc{level}")
            skips.append(h)
            h = functional.max_pool2d(h, 2)
        h = self.block(h, "bottleneck.bottleneck")
        for level in (4, 3, 2, 1):
            h = self.convolution(h, f"upconv{level}", transposed=True)
            h = torch.cat((h, skips.pop()), dim=1)
            h = self.block(h, f"decoder{level}.dec{level}")
        return self.convolution(h, "conv", padding=0)

    def block(self, h: Tensor, name: str) -> Tensor:
        for number in (1, 2):
            h = self.convolution(h, f"{name}_conv{number}")
            mean = h.mean(dim=(0, 2, 3), keepdim=True)
            variance = ((h - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
            gamma, beta = (
                self.parameters[f"{name}_bn{number}.{field}"].view(1, -1, 1, 1)
                for field in ("weight", "bias")
            )
            h = torch.relu((h - mean) / torch.sqrt(variance + 1e-5) * gamma + beta)
        return h

    def convolution(self, h: Tensor, name: str, transposed: bool = False, padding: int = 1) -> Tensor:
        rows = []
        drawn = torch.ones(len(h), 2 * h.shape[1])
        if self.dropout:
            drawn = torch.rand(drawn.shape, generator=self.masks, dtype=h.dtype)
        for b in range(len(h)):
            pooled = functional.adaptive_avg_pool2d(h[b : b + 1], 1).flatten(1)
            hidden = self.linear(pooled, f"{name}.router.first")
            hidden = torch.where(drawn[b] < self.dropout, 0.0, hidden / (1 - self.dropout))
            r = torch.sigmoid(self.linear(hidden, f"{name}.router.second"))[0]
            weight = sum(r[k] * expert[f"{name}.weight"] for k, expert in enumerate(self.experts))
            bias = None
            if f"{name}.bias" in self.experts[0]:
                bias = sum(r[k] * expert[f"{name}.bias"] for k, expert in enumerate(self.experts))
            if transposed:
                rows.append(functional.conv_transpose2d(h[b : b + 1], weight, bias, stride=2))
            else:
                rows.append(functional.conv2d(h[b : b + 1], weight, bias, padding=padding))
        return torch.cat(rows)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]


def reference_loop(
    model: Reference, images: Tensor, batch: int, epochs: int, seed: int, left_out: str = "nothing"
) -> list[State]:
    """The parameters after every step; those of routers in `left_out` are not trained."""
    trained = [
        value for name, value in model.parameters.items() if not (left_out in name and "router" in name)
    ]
    optimiser = torch.optim.Adam(trained, lr=1e-3, betas=(0.9, 0.999))
    after = []
    for _ in range(epochs):
        for start in range(0, len(images), batch):
            x = images[start : start + batch]
            generator = torch.Generator().manual_seed(seed_of(seed, "step"))  # a new one for every step
            spread = torch.stack([image.std(correction=0) for image in x]).view(-1, 1, 1, 1)
            noisy = x + 0.5 * spread * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            flips = torch.randint(2, (len(x),), generator=generator).tolist()
            turns = torch.randint(4, (len(x),), generator=generator).tolist()
            u1 = torch.stack(
                [
                    torch.rot90(torch.flip(u, [1]) if f else u, t, [1, 2])
                    for u, f, t in zip(noisy, flips, turns, strict=True)
                ]
            )
            model.masks.manual_seed(seed_of(seed, "step"))
            o = torch.softmax(model(x), dim=1)
            o1 = torch.softmax(model(u1), dim=1)
            o2 = torch.softmax(model(x), dim=1)
            back = []
            for p, f, t in zip(o1, flips, turns, strict=True):
                p = torch.rot90(p, 4 - t, [1, 2])
                back.append(torch.flip(p, [1]) if f else p)
            entropy = (-(o * torch.log(o + 1e-6)).sum(dim=0) / math.log(2)).mean()
            consistency = ((torch.stack(back) - o2) ** 2).mean()
            p = o[:, 1:]
            largest = functional.max_pool2d(p, 21, stride=1, padding=10)
            smallest = functional.max_pool2d(-p, 21, stride=1, padding=10)
            shape = torch.linalg.norm((1e-6 * (largest + smallest)).flatten())
            loss = 10 * entropy + 0.1 * consistency + shape
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            after.append(clone(model.parameters))
    return after


def expert_states() -> list[State]:
    """Two members' and the global one."""
    return [
        {
            name: value.double() if value.is_floating_point() else value
            for name, value in initialise(build("unet", **ARGUMENTS), torch.Generator().manual_seed(seed))
            .state_dict()
            .items()
        }
        for seed in range(3)
    ]


def space_of(states: list[State]) -> RoutingSpace:
    """The routing space of the two members."""
    return RoutingSpace.of("unet", ARGUMENTS, {"a": states[0], "b": states[1]}, states[2])


def test_the_official_preset_is_the_reference_loop_step_by_step() -> None:
    states = expert_states()
    images = discs(5)[0].double()
    network = route(
        space_of(states),
        "pooled",
        "official",
        generator=torch.Generator().manual_seed(9),
    )
    start = clone(dict(network.named_parameters()))
    expected = reference_loop(Reference(states, clone(start)), images, batch=3, epochs=2, seed=4)

    seen: list[State] = []
    config = AdaptationConfig(preset="official", router="pooled", epochs=2, batch_size=3, seed=4)
    adapt(
        network, images, config, check_cancelled=lambda: seen.append(clone(dict(network.named_parameters())))
    )
    # Of 2 batches: masks 0-1, loss 2-3, steps 4-5, loss 6-7, steps 8-9, loss 10-11. The state after a step is
    # what the next call sees.
    assert len(seen) == 12
    assert all(torch.equal(seen[4][name], value) for name, value in start.items())
    for found, reference in zip((seen[5], seen[6], seen[9], seen[10]), expected, strict=True):
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    largest = max(float((seen[10][name] - value).abs().max()) for name, value in start.items())
    assert largest > 1e-3  # four steps of Adam at 1e-3: there was something to compare


def test_as_published_is_the_reference_loop_with_its_routers_dropout_and_untrained_bottleneck() -> None:
    states, images = expert_states(), discs(7)[0].double()
    config = AdaptationConfig(preset="as-published", epochs=2, seed=4)
    assert (config.router, config.batch_size, config.rate) == ("pooled", 5, 1e-3)
    learning = recipe_of(config.preset).learning(space_of(states), images, config, never_cancelled)
    assert learning is not None
    start = clone(dict(learning.network.named_parameters()))
    expected = reference_loop(
        Reference(states, clone(start), 0.2), images, batch=5, epochs=2, seed=4, left_out="bottleneck"
    )

    after: list[State] = []
    learn(
        learning,
        images,
        config,
        after_epoch=lambda _: after.append(clone(dict(learning.network.named_parameters()))),
        limits=UNGUARDED,
    )
    for found, reference in zip(after, (start, expected[1], expected[3]), strict=True):
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    moved = {name for name, value in start.items() if not torch.equal(after[2][name], value)}
    assert {name for name in start if name not in moved} == {
        name for name in start if name.startswith("bottleneck") and "router" in name
    }


def test_as_published_starts_near_a_half_by_the_seed_and_serves_one_plain_network() -> None:
    space, images = space_of(expert_states()), discs(5)[0].double()
    recipe, config = recipe_of("as-published"), AdaptationConfig(preset="as-published", epochs=1)
    starts = {}
    for seed in (0, 1):
        learning = recipe.learning(space, images, config.model_copy(update={"seed": seed}), never_cancelled)
        assert learning is not None
        starts[seed] = coefficients(learning.network, images)
        assert 0.3 < float(starts[seed].mean()) < 0.7
        assert float(starts[seed].std()) > 0.01
    assert not torch.equal(starts[0], starts[1])
    merged = recipe.adapt(space, images, config, torch.device("cpu")).merged
    assert merged.state_dict().keys() == space.plain().state_dict().keys()
