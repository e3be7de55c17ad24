"""What joining is told: loss, rates, epochs, seed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from personalization.errors import AdaptationError

_MOST_EPOCHS = 1000
_MOST_BATCH = 4096


@dataclass(frozen=True)
class JoiningConfig:
    """One fine-tuning, fully said. Raises AdaptationError naming the field that does not fit.

    `loss` is the perturbed boundary loss of FedOAP's second stage or, as its control, the plain one of the
    first. `trains` all weights, as Alg. 1 does, or the personal ones alone: query stage, W_q and adapter. The
    rate goes from `learning_rate` to `least_rate` along a cosine over all epochs.
    """

    loss: Literal["perturbed", "plain"] = "perturbed"
    trains: Literal["all", "personal"] = "all"
    epochs: int = 30
    batch_size: int = 8
    learning_rate: float = 1e-3
    least_rate: float = 1e-6
    weight_decay: float = 1e-5
    augment: bool = True
    threshold: float = 0.75
    variance: float = 0.1
    trade_off: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("loss", ("perturbed", "plain")), ("trains", ("all", "personal"))):
            if getattr(self, name) not in choices:
                raise _refusal(name, f"one of {', '.join(choices)}", getattr(self, name))
        for name, most in (("epochs", _MOST_EPOCHS), ("batch_size", _MOST_BATCH)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise _refusal(name, f"a whole number from 1 to {most}", value)
        for name in ("learning_rate", "least_rate", "weight_decay", "variance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise _refusal(name, "zero or a positive number", value)
        if self.least_rate > self.learning_rate:
            raise _refusal("least_rate", f"at most learning_rate, {self.learning_rate}", self.least_rate)
        for name in ("threshold", "trade_off"):
            if not 0 <= getattr(self, name) <= 1:
                raise _refusal(name, "a number from 0 to 1", getattr(self, name))

    def facts(self) -> dict[str, Any]:
        """Every field, as JSON has it: what a checkpoint is held against."""
        return asdict(self)


def _refusal(name: str, expected: str, found: object) -> AdaptationError:
    return AdaptationError(f"joining: {name}: expected {expected}, found {found!r}")
