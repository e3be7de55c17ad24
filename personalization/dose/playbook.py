"""The playbook: what the members practised of the dose by shift, as an artefact carries it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from personalization.gate.parent import Targets
from personalization.options.presets import PLAYBOOK

FILE = PLAYBOOK
# Members that can be compared.
FEWEST = 2
# Change of Dice: an episode that loses more is counted.
POINT = -0.01


@dataclass(frozen=True)
class Episode:
    """The dose by shift at one member behind one scanner.

    `served` is the mean over the patients of their Dice minus that of the global model, as the gate serves
    the dose: none where it refuses; for a classification that of balanced accuracy. `shift` is the larger
    of the two halves'.
    """

    severity: float
    served: float
    shift: float


class ShiftRecord(BaseModel):
    """How the dose by shift did in practice.

    Attributes:
        episodes: how many there are.
        mean: change of Dice as it is served, by its gate; the mean of the members' means.
        worst: the lowest of an episode.
        lost: share of the episodes that lose more than a point.
        largest: the largest shift that was practised: through the lens, where one was.
        lensed: whether a lens moved the scans first.
        members: of each member, the mean, the lowest and the highest change of its episodes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    episodes: int = Field(ge=1)
    mean: FiniteFloat
    worst: FiniteFloat
    lost: FiniteFloat = Field(ge=0, le=1)
    largest: FiniteFloat = Field(gt=0)
    members: dict[str, tuple[FiniteFloat, FiniteFloat, FiniteFloat]]
    lensed: bool = False


class Playbook(BaseModel):
    """What the federation practised, and what its targets look like.

    A file of the first format has recipes with regressions beside these; they are not read.

    Attributes:
        members: who practised.
        severities: of the drawn scanners.
        targets: what the members' targets look like.
        by_shift: the dose by shift; None in a file of the first format: the members did not practise it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["locum-playbook/1", "locum-playbook/2"] = "locum-playbook/2"
    members: tuple[str, ...]
    severities: tuple[FiniteFloat, ...]
    targets: Targets
    by_shift: ShiftRecord | None = None

    @classmethod
    def of(
        cls, episodes: Mapping[str, Sequence[Episode]], targets: Targets, *, lensed: bool = False
    ) -> Playbook:
        """The playbook of the members' episodes; `targets` are those of the members.

        `lensed`: a lens moved the scans first.

        Raises ValueError for episodes of fewer than two members.
        """
        found = {member: own for member, own in sorted(episodes.items()) if own}
        if len(found) < FEWEST:
            raise ValueError(f"expected episodes of at least two members, found those of {[*found]}")
        every = [each for own in found.values() for each in own]
        ranges = {member: _range([each.served for each in own]) for member, own in found.items()}
        return cls(
            members=tuple(found),
            severities=tuple(sorted({each.severity for each in every})),
            targets=targets,
            by_shift=ShiftRecord(
                episodes=len(every),
                mean=_mean([mean for mean, _, _ in ranges.values()]),
                worst=min(each.served for each in every),
                lost=_mean([each.served < POINT for each in every]),
                largest=max(each.shift for each in every),
                members=ranges,
                lensed=lensed,
            ),
        )

    def to_bytes(self) -> bytes:
        """As JSON; equal playbooks give equal bytes."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def _range(changes: Sequence[float]) -> tuple[float, float, float]:
    """Mean, lowest and highest."""
    return _mean(changes), min(changes), max(changes)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
