"""Checks of the arguments of MONAI's networks: plain, bounded, and norms and activations of short lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from personalization.errors import NetworkError

# A name of the list, or [name, options].
Layer: TypeAlias = str | Sequence[Any]
# One number for all axes, or one per axis.
PerAxis: TypeAlias = int | Sequence[int]

MOST_CHANNELS, MOST_STAGES, MOST_BLOCKS = 2048, 10, 8
MOST_KERNEL, MOST_STRIDE, MOST_CLASSES, MOST_INPUTS = 9, 8, 256, 64
_NORMS: Mapping[str, Mapping[str, Any]] = {
    "batch": {"affine": True, "eps": 1e-5, "momentum": 0.1},
    "instance": {"affine": True, "eps": 1e-5, "track": False},
    "group": {"affine": True, "eps": 1e-5, "num_groups": 8},
}
"""Norm -> its options with their defaults. MONAI's `INSTANCE` alone has `affine` false; `track` is ours."""
_ACTIVATIONS: Mapping[str, Mapping[str, Any]] = {
    "relu": {"inplace": True},
    "leakyrelu": {"inplace": True, "negative_slope": 0.01},
    "prelu": {"num_parameters": 1, "init": 0.25},
    "elu": {"inplace": True, "alpha": 1.0},
    "gelu": {},
}


class Arguments:
    """Checks of one network's arguments; each raises NetworkError naming network and argument."""

    def __init__(
        self, network: str, spatial_dims: int, in_channels: int, classes: int, width: int = 1
    ) -> None:
        self.network, self.dims, self.in_channels = network, spatial_dims, in_channels
        self.tracks = False
        self.whole("spatial_dims", spatial_dims, 2, 3)
        self.whole("in_channels", in_channels, 1, MOST_INPUTS)
        self.whole("classes", classes, 1, MOST_CLASSES)
        self.whole("width", width, 1, MOST_CHANNELS)

    def refuse(self, name: str, expected: str, found: object) -> None:
        """Raise NetworkError."""
        raise NetworkError(f"{self.network}: {name}: expected {expected}, found {found!r}")

    def whole(self, name: str, value: int, least: int, most: int) -> int:
        """A whole number within bounds."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(name, f"a whole number within {least}..{most}", value)
        return value

    def one_of(self, name: str, value: str, known: Sequence[str]) -> str:
        """One of a list of words."""
        if value not in known:
            self.refuse(name, f"one of {', '.join(known)}", value)
        return value

    def items(self, name: str, value: Sequence[Any], least: int, most: int) -> list[Any]:
        """A list of `least` to `most`."""
        if isinstance(value, str) or not isinstance(value, Sequence) or not least <= len(value) <= most:
            count = str(least) if least == most else f"{least} to {most}"
            self.refuse(name, f"a list of {count}", value)
        return list(value)

    def numbers(self, name: str, value: Sequence[int], top: int, least: int, most: int) -> list[int]:
        """A list of whole numbers from 1 to `top`."""
        return [self.whole(name, each, 1, top) for each in self.items(name, value, least, most)]

    def per_axis(self, name: str, value: PerAxis, top: int) -> PerAxis:
        """One whole number from 1 to `top`, or one per axis."""
        if isinstance(value, int):
            return self.whole(name, value, 1, top)
        return self.numbers(name, value, top, self.dims, self.dims)

    def per_stage(
        self, name: str, value: Sequence[PerAxis], top: int, least: int = 1, most: int = MOST_STAGES
    ) -> list[PerAxis]:
        """A list of these."""
        return [self.per_axis(name, each, top) for each in self.items(name, value, least, most)]

    def channels(
        self, channels: Sequence[int] | None, width: int, strides: Sequence[PerAxis]
    ) -> tuple[list[int], list[PerAxis]]:
        """Channels of every stage, and the strides between them."""
        strides = self.per_stage("strides", strides, MOST_STRIDE)
        if channels is None:
            channels = [min(width * 2**stage, MOST_CHANNELS) for stage in range(len(strides) + 1)]
        count = len(strides) + 1
        return self.numbers("channels", channels, MOST_CHANNELS, count, count), strides

    def each_axis(self, value: PerAxis) -> tuple[int, ...]:
        """The number of each axis."""
        return (value,) * self.dims if isinstance(value, int) else tuple(value)

    def norm(self, name: str, value: Layer, channels: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """A norm of the list as MONAI takes it, for layers of these channels."""
        kind, options = self._layer(name, value, _NORMS)
        self.tracks = bool(options.pop("track", False))
        groups = options.get("num_groups")
        if groups is not None:
            groups = self.whole(f"{name}.num_groups", groups, 1, MOST_CHANNELS)
            uneven = [count for count in channels if count % groups]
            if uneven:
                self.refuse(name, f"channels that are multiples of its {groups} groups", uneven[0])
        return kind, options

    def activation(self, name: str, value: Layer) -> tuple[str, dict[str, Any]]:
        """An activation of the list as MONAI takes it."""
        return self._layer(name, value, _ACTIVATIONS)

    def _layer(
        self, name: str, value: Layer, known: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, dict[str, Any]]:
        """The layer's kind as MONAI calls it, and all of its options."""
        kind, options = (value, {}) if isinstance(value, str) else self.items(name, value, 2, 2)
        if not isinstance(kind, str) or kind.lower() not in known:
            self.refuse(name, f"one of {', '.join(known)}, or [name, options]", value)
        defaults = known[kind.lower()]
        if not isinstance(options, Mapping) or options.keys() - defaults.keys():
            self.refuse(name, f"options among {', '.join(defaults) or 'none'}", options)
        for option, given in options.items():
            wanted = bool if isinstance(defaults[option], bool) else (int, float)
            if not isinstance(given, wanted) or (wanted is not bool and isinstance(given, bool)):
                self.refuse(f"{name}.{option}", f"a value such as {defaults[option]}", given)
        return kind.upper() if known is _NORMS else kind.lower(), {**defaults, **options}
