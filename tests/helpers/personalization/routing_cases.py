"""Small routed networks, and slow reference networks to compare them with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.iop_fl.network import routed_layers, share_copy
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build, initialise
from personalization.state import State

ARGUMENTS = {"in_channels": 2, "classes": 2, "width": 2}
SITES = ("aster", "birch", "cedar", "dune")


def state(seed: int, dtype: torch.dtype = torch.float64) -> State:
    """A U-Net's state with batch norms that are not the identity."""
    generator = torch.Generator().manual_seed(seed)
    result = initialise(build("unet", **ARGUMENTS), generator).state_dict()
    for name, tensor in result.items():
        if "_bn" in name and tensor.is_floating_point():
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in result.items()
    }


def space_of(inside: int, dtype: torch.dtype = torch.float64) -> RoutingSpace:
    """A space over the global model and this many inside models, given out of order."""
    models = {site: state(seed, dtype) for seed, site in enumerate(SITES[:inside], start=1)}
    return RoutingSpace.of("unet", ARGUMENTS, dict(reversed(models.items())), state(0, dtype))


def images(count: int, height: int = 32, width: int = 48, dtype: torch.dtype = torch.float64) -> Tensor:
    """Images that differ in brightness and contrast, so that their statistics differ."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(count, 2, height, width, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.5, 2, count, dtype=torch.float64)[:, None, None, None]
    return (scale * drawn + scale).to(dtype)


def moved(network: nn.Module, by: float = 0.5) -> nn.Module:
    """The network with every learned parameter moved away from its start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return network


class Fixed(nn.Module):
    """A router that gives the same coefficients [E], or [B, E], whatever it sees."""

    def __init__(self, coefficients: Tensor) -> None:
        super().__init__()
        self.coefficients = coefficients

    def forward(self, _features: Tensor) -> Tensor:
        return self.coefficients


def fixed(network: nn.Module, coefficients_LE: Tensor) -> nn.Module:
    """A copy of a routed network with these coefficients for every image."""
    copied = share_copy(network)
    for layer, row in zip(routed_layers(copied).values(), coefficients_LE, strict=True):
        layer.router = Fixed(row)
    return copied


class SlowConvolution(nn.Module):
    """Every image passes through the convolution of every expert; the results are weighted and added."""

    def __init__(self, experts: list[nn.Module], router: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts).requires_grad_(False)
        self.router = router

    def forward(self, features: Tensor) -> Tensor:
        results = []
        for image in features:
            coefficients = self.router(image)
            result = 0
            for coefficient, expert in zip(coefficients, self.experts, strict=True):
                result = result + coefficient * expert(image[None])[0]
            results.append(result)
        return torch.stack(results)


class SlowDirect(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, image: Tensor) -> Tensor:
        return self.logits.exp() / self.logits.exp().sum()


class SlowPooled(nn.Module):
    def __init__(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        for name, (weight, bias) in (("first", first), ("second", second)):
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.weight, linear.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
            self.add_module(name, linear)

    def forward(self, image: Tensor) -> Tensor:
        pooled = torch.stack([channel.sum() / channel.numel() for channel in image])
        return 1 / (1 + torch.exp(-self.second(self.first(pooled))))


class SlowNorm(nn.Module):
    """Batch norm with the statistics of the batch, written out."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]


def slow(space: RoutingSpace, learned: State) -> nn.Module:
    """The routed network with the state dict `learned`, built only from plain networks and loops.

    Its parameters have the names of the routed network's.
    """
    models = []
    for expert in space.experts.values():
        model = build(space.network, **space.arguments).to(expert["conv.weight"].dtype)
        model.load_state_dict(expert)
        models.append(model)
    network = build(space.network, **space.arguments).to(models[0].conv.weight.dtype)
    for name, module in list(network.named_modules()):
        mine = {key.removeprefix(f"{name}."): v for key, v in learned.items() if key.startswith(f"{name}.")}
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(name, SlowNorm(mine["weight"], mine["bias"]))
        elif isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            router: nn.Module
            if "router.logits" in mine:
                router = SlowDirect(mine["router.logits"])
            else:
                pairs = [(mine[f"router.{n}.weight"], mine[f"router.{n}.bias"]) for n in ("first", "second")]
                router = SlowPooled(*pairs)
            network.set_submodule(
                name, SlowConvolution([model.get_submodule(name) for model in models], router)
            )
    return network


def probabilities(network: nn.Module, batch: Tensor) -> Tensor:
    return functional.softmax(network(batch), dim=1)
