"""What methods and recipes ask of a network: its kinds of layers, its sides, its head. None asks for a name.

Layers are found by their class, in any number of spatial dimensions, on any `nn.Module`. What a module
cannot tell (`Traits`) its author declares: as a class attribute `traits`, or with `declare` on a network of a
class from elsewhere.

Legend: B batch, C channels, ... one to three spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor, nn

from personalization.errors import NetworkError

Module = TypeVar("Module", bound=nn.Module)
# What a network answers. A manifest says the same of a task (`model_store.task`).
TaskKind: TypeAlias = Literal["segmentation", "classification"]
# A convolution of one to three dimensions, plain or transposed.
Convolution: TypeAlias = nn.modules.conv._ConvNd
TransposedConvolution: TypeAlias = nn.modules.conv._ConvTransposeNd
BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
InstanceNorm: TypeAlias = nn.modules.instancenorm._InstanceNorm
# Every layer that normalises; torch's instance norms are among the first.
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
MOST_DIMENSIONS = 3


@dataclass(frozen=True)
class Traits:
    """What a network declares of itself.

    Attributes:
        task: what it answers: class scores of every pixel, or of the image.
        head: paths of the modules from the features to the output, the output's layer last. The others are
            its body. FedPer and FedRep leave the head at the sites.
        dimensions: spatial axes of its images, 1 to 3.
        multiples: what each side must be a multiple of: one number for all sides, or one per axis.
        least_side: the shortest side, in pixels.
        least_pixels: the fewest pixels, or voxels, of an image.
        sides: the only sides that it takes; None: all of these multiples.
    """

    task: TaskKind
    head: tuple[str, ...]
    dimensions: int = 2
    multiples: int | tuple[int, ...] = 1
    least_side: int = 1
    least_pixels: int = 1
    sides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.dimensions <= MOST_DIMENSIONS or len(self.each_multiple) != self.dimensions:
            raise NetworkError(
                f"traits: expected 1 to {MOST_DIMENSIONS} dimensions and a multiple for each, found "
                f"{self.dimensions} and {self.multiples}"
            )

    @property
    def each_multiple(self) -> tuple[int, ...]:
        """What each side must be a multiple of, axis by axis."""
        if isinstance(self.multiples, int):
            return (self.multiples,) * self.dimensions
        return self.multiples

    @property
    def example_sides(self) -> tuple[int, ...]:
        """Small sides that it takes, of which its deepest layers see more than a pixel."""
        if self.sides is not None:
            return self.sides
        sides = [2 * math.ceil(self.least_side / multiple) * multiple for multiple in self.each_multiple]
        sides[0] *= math.ceil(self.least_pixels / math.prod(sides))
        return tuple(sides)

    def check_images(self, images: Tensor, channels: int, network: str) -> None:
        """Raise NetworkError, naming `network`, for images that are not [B, channels, *sides it takes]."""
        if images.ndim != 2 + self.dimensions or images.shape[1] != channels:
            axes = ", ".join("DHW"[-self.dimensions :])
            raise NetworkError(
                f"{network}: expected images [B, {channels}, {axes}], found {list(images.shape)}"
            )
        # Whole numbers: while a graph is traced, sizes are tensors.
        self.check_sides([int(side) for side in images.shape[2:]], network)

    def check_sides(self, sides: Sequence[int], network: str) -> None:
        """Raise NetworkError, naming `network`, for sides that it does not take."""
        found = "x".join(map(str, sides))
        if len(sides) != self.dimensions:
            raise NetworkError(f"{network}: expected {self.dimensions} spatial axes, found {found}")
        if any(not side or side % multiple for side, multiple in zip(sides, self.each_multiple, strict=True)):
            wanted = "x".join(map(str, dict.fromkeys(self.each_multiple)))
            raise NetworkError(
                f"{network}: expected sides that are multiples of {wanted}, found {found}; set such a `size` "
                "in the task"
            )
        if self.sides not in (None, tuple(sides)):
            wanted = "x".join(map(str, self.sides or ()))
            raise NetworkError(f"{network}: expected images of {wanted}, found {found}")
        if min(sides) < self.least_side:
            raise NetworkError(
                f"{network}: expected at least {self.least_side} pixels per side, found {found}; set such a "
                "`size` in the task"
            )
        if math.prod(sides) < self.least_pixels:
            raise NetworkError(
                f"{network}: expected at least {self.least_pixels} pixels, found {found}: of fewer, its "
                "deepest layers see one; set such a `size` or `patch` in the task"
            )


def declare(network: Module, traits: Traits) -> Module:
    """Attach its traits to a network of a class from elsewhere; returns the network."""
    network.traits = traits  # type: ignore[assignment]  # no tensor, no module: a plain attribute
    return network


def traits_of(network: nn.Module) -> Traits:
    """The declared traits. Raises NetworkError for a network without them."""
    found = getattr(network, "traits", None)
    if not isinstance(found, Traits):
        raise NetworkError(
            f"{type(network).__name__}: expected `traits` (personalization.networks.capabilities), found "
            "none; only the method that it belongs to can use this network"
        )
    return found


def head_paths(network: nn.Module) -> tuple[str, ...]:
    """Paths of the modules of its head. Raises NetworkError where they are not declared, or not there."""
    paths = traits_of(network).head
    missing = sorted(set(paths) - {name for name, _ in network.named_modules()})
    if missing or not paths:
        raise NetworkError(
            f"{type(network).__name__}: expected the paths of its head in `traits.head`, found "
            f"{', '.join(missing) or 'no path'}"
        )
    return paths


def convolutions(network: nn.Module) -> dict[str, Convolution]:
    """Every convolution by path, in registration order."""
    return {path: module for path, module in network.named_modules() if isinstance(module, Convolution)}


def norms(network: nn.Module) -> dict[str, nn.Module]:
    """Every layer that normalises, of any kind, by path."""
    return {path: module for path, module in network.named_modules() if isinstance(module, NORMS)}


def batch_norms(network: nn.Module) -> dict[str, BatchNorm]:
    """Every batch norm by path, in registration order."""
    return {path: module for path, module in network.named_modules() if isinstance(module, BatchNorm)}


def moving_norms(network: nn.Module) -> dict[str, BatchNorm]:
    """Every batch norm that has running statistics, by path: what recipes on statistics can move."""
    return {path: norm for path, norm in batch_norms(network).items() if norm.running_mean is not None}


def running(norm: BatchNorm | InstanceNorm) -> tuple[Tensor, Tensor]:
    """Running mean and variance [C] of one of the `moving_norms`, or of an instance norm that tracks."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def required_norms(network: nn.Module, use: str) -> dict[str, BatchNorm]:
    """The `moving_norms`, of which there is at least one.

    `use` names the recipe and what it does with them. Raises NetworkError for a network without any, where
    the recipe would change nothing.
    """
    found = moving_norms(network)
    if not found:
        kinds = sorted({type(norm).__name__ for norm in norms(network).values()})
        raise NetworkError(
            f"{use}: expected a network with batch norm that keeps running statistics, found "
            f"{type(network).__name__} with {', '.join(kinds) or 'no layer that normalises'}; there is "
            "nothing to move: choose a recipe that mixes models or learns weights"
        )
    return found


def spatial_axes(images_BC: Tensor) -> tuple[int, ...]:
    """The spatial axes of [B, C, ...]: 2, 3 of images."""
    return tuple(range(2, images_BC.ndim))


def per_channel(values_C: Tensor, like_BC: Tensor) -> Tensor:
    """Values [C] as [1, C, 1, ...], to be combined with features [B, C, ...]."""
    return values_C.view(1, -1, *(1 for _ in spatial_axes(like_BC)))
