"""One joining, completely specified: the options of a client, with strict types."""

from __future__ import annotations

from typing import Any, ClassVar

from personalization.options.checked import Checked
from personalization.options.joining import JoiningOptions


class JoiningConfig(Checked, JoiningOptions):
    """The fields of JoiningOptions. Raises AdaptationError naming the field that does not fit.

    `loss` is the perturbed boundary loss of FedOAP's second stage or, as its control, the plain one of the
    first. `trains` all weights, as Alg. 1 does, or the personal ones alone: query stage, W_q and adapter. The
    rate goes from `learning_rate` to `least_rate` along a cosine over all epochs. `validation` decides which
    patients are given to `join`, which does not read it.
    """

    WHAT: ClassVar[str] = "joining"

    def facts(self) -> dict[str, Any]:
        """Every field that `join` reads, as JSON has it: what a checkpoint is compared with."""
        return self.model_dump(exclude={"validation"})
