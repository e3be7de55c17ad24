"""How far the hospitals of a federation are naturally apart, as its members measured it.

Every member k measures the shift D^k of its own slices under the published global model, and what of it is
the choice of its patients, s^k (`personalization.iop_fl.batch_norm.Profile`). Per batch norm, for means and
for variances, it sends

    t^k = max(D^k - s^k, 0.2 D^k)        and        log t^k        and        s^k P_k        of P_k patients

of which the server needs the means over the members alone. The natural squared shift of a hospital from
outside is

    tau = (K + 1) / (K - 1) mean_k t^k

since the K members are nearer to their own mean than a hospital that took no part in it: members of variance
1 are (K - 1) / K from it, another hospital (K + 1) / K.

Legend: L batch norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from personalization.iop_fl.batch_norm import Profile
from personalization.options.presets import SPREAD

FILE = SPREAD
# Share of a member's shift that counts as natural at least: its patients may explain all of it by chance.
LEAST_NATURAL = 0.2
# A layer without any shift has no logarithm.
_LEAST = 1e-8
FEWEST = 2
# The mean over the members: geometric where one of them is far from the others. Chosen on phantoms.
MEAN: Literal["arithmetic", "geometric"] = "geometric"

Pair = tuple[FiniteFloat, FiniteFloat]


class Spread(BaseModel):
    """Means over the members, each of its batch norms as (of the means, of the variances).

    Attributes:
        members: K, how many measured.
        layers: paths of the batch norms.
        natural: mean of t^k.
        logarithm: mean of log t^k.
        patient: mean of s^k P_k, the variance that the choice of one patient brings.
        share: of a member's pixels that are a target, the geometric mean; 0 where it is not known.
        largest: share of the pixels where a member's target is large.
        pieces: of a target, per slice and class.
        size: standard deviation over the members of the logarithm of that share; 0 where it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["locum-spread/1"] = "locum-spread/1"
    members: int = Field(ge=FEWEST)
    layers: tuple[str, ...]
    natural: tuple[Pair, ...]
    logarithm: tuple[Pair, ...]
    patient: tuple[Pair, ...]
    share: FiniteFloat = Field(0.0, ge=0, le=1)
    largest: FiniteFloat = Field(0.0, ge=0, le=1)
    pieces: FiniteFloat = Field(0.0, ge=0)
    size: FiniteFloat = Field(0.0, ge=0)

    @classmethod
    def of(cls, layers: tuple[str, ...], mean: Mapping[str, Tensor], members: int) -> Spread:
        """From the mean over so many members of what they sent (`sent_by`)."""
        share, largest, pieces, size = -math.inf, 0.0, 0.0, 0.0
        if "targets" in mean:
            share, largest, pieces, square = mean["targets"].tolist()
            # Rounding may leave less than nothing of equal sizes.
            size = math.sqrt(max(square - share**2, 0.0) * members / (members - 1))
        columns = {
            name: tuple(map(tuple, mean[name].tolist())) for name in ("natural", "logarithm", "patient")
        }
        return cls(
            members=members,
            layers=layers,
            share=math.exp(share),
            largest=largest,
            pieces=pieces,
            size=size,
            **columns,
        )

    def tau(self, mean: Literal["arithmetic", "geometric"] = MEAN) -> Tensor:
        """The natural squared shift [L, 2] of a hospital from outside."""
        found = (
            torch.tensor(self.natural, dtype=torch.float64)
            if mean == "arithmetic"
            else torch.tensor(self.logarithm, dtype=torch.float64).exp()
        )
        return (self.members + 1) / (self.members - 1) * found

    def sampling(self, patients: int) -> Tensor:
        """The variance [L, 2] that the choice of so many patients brings, where they are as the members'."""
        return torch.tensor(self.patient, dtype=torch.float64) / patients

    def to_bytes(self) -> bytes:
        """As JSON; equal spreads give equal bytes."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def sent_by(found: Profile, targets: tuple[float, float, float] | None) -> dict[str, Tensor]:
    """What a member sends, float64: nothing where it has one patient, or no target at all.

    `targets` are the share, the largest and the pieces of its targets; None of a task without any. The
    square of the share's logarithm goes with it, for the deviation over the members.
    """
    if found.sampling is None or (targets is not None and not targets[0]):
        return {}
    natural = torch.maximum(found.shift - found.sampling, LEAST_NATURAL * found.shift).clamp(min=_LEAST)
    sent = {"natural": natural, "logarithm": natural.log(), "patient": found.sampling * found.patients}
    if targets is not None:
        share, largest, pieces = targets
        logarithm = math.log(share)
        sent["targets"] = torch.tensor([logarithm, largest, pieces, logarithm**2], dtype=torch.float64)
    return sent


def check_sent(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for what no member can send."""
    natural, logarithm, patient = (state[name] for name in ("natural", "logarithm", "patient"))
    if bool((natural < _LEAST / 2).any() or (patient < 0).any()) or not torch.allclose(
        natural.log(), logarithm
    ):
        raise ValueError("expected shifts above 0 with their logarithms, and variances of at least 0")
    if "targets" in state:
        share, largest, pieces, square = state["targets"].tolist()
        if share > 0 or not 0 <= largest <= 1 or pieces < 0 or not math.isclose(square, share**2):
            raise ValueError(
                f"expected shares of pixels within 0..1, found {math.exp(share):g} and {largest:g}"
            )
