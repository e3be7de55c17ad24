"""The configuration of a joining: the client's options, strictly validated."""

from __future__ import annotations

from typing import Any, ClassVar

from personalization.options.checked import Checked
from personalization.options.joining import JoiningOptions


class JoiningConfig(Checked, JoiningOptions):
    """The fields of JoiningOptions. Raises AdaptationError naming the invalid field.

    `loss` is the perturbed boundary loss of FedOAP's second stage or, as its control, the plain loss of the
    first. `trains` selects all weights, as Alg. 1, or the personal ones: query stage, W_q and adapter. The
    learning rate goes from `learning_rate` to `least_rate` along a cosine over all epochs. `validation`
    decides which patients the caller passes to `join`, which does not use it.
    """

    WHAT: ClassVar[str] = "joining"

    def facts(self) -> dict[str, Any]:
        """Return every field that `join` uses, as JSON, for comparison with a checkpoint."""
        return self.model_dump(exclude={"validation"})
