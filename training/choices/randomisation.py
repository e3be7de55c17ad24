"""When a method's training randomises domains (`personalization.domain_randomisation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from training.config import MethodConfig
from training.local.schedule import DomainRandomisation, randomises


class RandomisationConfig(MethodConfig):
    """Configuration of a method that trains on images, as they are and randomised."""

    domain_randomisation: DomainRandomisation = Field(
        "none",
        description="late: in the second half of training, one batch of two has all its images randomised "
        "(convolutions, inversion, resolution, strong drawn scanners), the other has them as they are; "
        "throughout: from the beginning",
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {"domain_randomisation": "none"}

    def randomises(self, round_: int) -> bool:
        """Whether a round of training, from 0, has domain randomisation."""
        return randomises(self.domain_randomisation, round_, self.rounds)

    def selectable(self, rounds_done: int) -> bool:
        """Whether a model after so many rounds may be selected: with `late`, not before it has been trained
        with domain randomisation, of which the hospitals' own scans do not show the worth."""
        return self.domain_randomisation != "late" or self.randomises(rounds_done - 1)
