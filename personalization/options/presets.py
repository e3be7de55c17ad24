"""The presets of test-time adaptation: what each starts from and what it learns.

The loss and the step of a preset are in `personalization.test_time.presets`, in a module of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

Learned = Literal["routing", "bn"]


@dataclass(frozen=True)
class Preset:
    """One preset.

    Attributes:
        name: as a client gives it, and of the module with its loss.
        description: for the API, after the name.
        models: what is adapted: a mixture of `all` models of the routing space, or its `global` model alone.
        learns: the parameters that change: coefficients of the models (`routing`), and scale and shift of
            batch norm (`bn`). Without any, only batch norm's statistics are measured.
        draws: whether the result depends on the seed.
    """

    name: str
    description: str
    models: Literal["all", "global"] = "all"
    learns: frozenset[Learned] = frozenset({"routing", "bn"})
    draws: bool = True


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("paper", "consistency + 0.01 (shape + entropy), noise only"),
            Preset("official", "as the published code of IOP-FL"),
            Preset(
                "statistics",
                "learns nothing: the global model alone, with batch norm's statistics of these scans",
                models="global",
                learns=frozenset(),
                draws=False,
            ),
            Preset(
                "tent",
                "entropy, minimised over batch norm's scale and shift: the global model alone",
                models="global",
                learns=frozenset({"bn"}),
                draws=False,
            ),
        )
    }
)

if TYPE_CHECKING:
    PresetName: TypeAlias = str
else:
    PresetName = Literal[tuple(PRESETS)]
