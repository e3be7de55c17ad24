"""What an adaptation is told: the preset of its loss, rates, epochs, seed.

The loss of one batch is  c C + s S + e E  (IOP-FL, Eqs. 7-10): consistency C under noise, shape distance S,
entropy E. The paper and its public code weigh and reduce them so differently that they are two methods:

    paper     C + 0.01 (S + E)         mean reductions; noise only
    official  0.1 C + S + 10 E         the code's reductions: E grows with the batch, S is 1e-6 times a norm;
                                       noise, then a random flip and quarter turns; noise repeats every step

And one that is ours:

    statistics                         nothing is learned: the global model alone, batch norm measured anew
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from personalization.errors import AdaptationError
from personalization.iop_fl.routers import ROUTING_RATES, Router

_MOST_EPOCHS = 1000
_MOST_BATCH = 4096
_SEEDS = 2**63
_HIGHEST_RATE = 1000.0  # far beyond any use, and short of where a step overflows


@dataclass(frozen=True)
class LossWeights:
    """How much each term of the loss counts.

    `official` means the reference code's reductions, perturbation and repeated noise as well as its weights.
    """

    consistency: float
    shape: float
    entropy: float
    official: bool = False


STATISTICS = "statistics"
PRESETS: Mapping[str, LossWeights] = MappingProxyType(
    {
        "paper": LossWeights(consistency=1.0, shape=0.01, entropy=0.01),
        "official": LossWeights(consistency=0.1, shape=1.0, entropy=10.0, official=True),
        # For the record of step 0 only
        STATISTICS: LossWeights(consistency=1.0, shape=0.01, entropy=0.01),
    }
)


@dataclass(frozen=True)
class AdaptationConfig:
    """One adaptation, fully said. Raises AdaptationError naming the field that does not fit.

    `router` says which coefficients the network was built with (`route`): `adapt` refuses another.
    `routing_rate` None means 0.1 for direct coefficients and 1e-3 for the pooled router; `bn_rate` is batch
    norm's scales and shifts, left as they are without `train_bn_affine`. `noise` is a standard deviation in
    units of each image's own. `shape_weight` replaces the preset's: 0 for targets that are not compact.
    """

    preset: str = "paper"
    router: Router = "direct"
    epochs: int = 10
    batch_size: int = 16
    routing_rate: float | None = None
    bn_rate: float = 1e-3
    train_bn_affine: bool = True
    noise: float = 0.5
    shape_weight: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise _refusal("preset", f"one of {', '.join(PRESETS)}", self.preset)
        if self.router not in ROUTING_RATES:
            raise _refusal("router", f"one of {', '.join(ROUTING_RATES)}", self.router)
        _whole("epochs", self.epochs, 1, _MOST_EPOCHS)
        _whole("batch_size", self.batch_size, 1, _MOST_BATCH)
        _whole("seed", self.seed, 0, _SEEDS - 1)
        for name in ("routing_rate", "bn_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate <= _HIGHEST_RATE:
                raise _refusal(name, f"a positive number of at most {_HIGHEST_RATE:g}", rate)
        for name in ("noise", "shape_weight"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise _refusal(name, "zero or a positive number", value)

    @property
    def weights(self) -> LossWeights:
        """The preset's, with `shape_weight` in place of its own where one is given."""
        weights = PRESETS[self.preset]
        return weights if self.shape_weight is None else replace(weights, shape=self.shape_weight)

    @property
    def passes(self) -> int:
        """Over the images, to learn from them: `epochs`, or none where nothing is learned."""
        return 0 if self.preset == STATISTICS else self.epochs

    @property
    def rate(self) -> float:
        """The coefficients' learning rate, the router's default where none is given."""
        return ROUTING_RATES[self.router] if self.routing_rate is None else self.routing_rate

    def facts(self) -> dict[str, Any]:
        """Every field, as JSON has it: what a checkpoint is held against."""
        return asdict(self) | {"routing_rate": self.rate}


def _whole(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refusal(name, f"a whole number from {least} to {most}", value)


def _refusal(name: str, expected: str, found: object) -> AdaptationError:
    return AdaptationError(f"adaptation: {name}: expected {expected}, found {found!r}")
