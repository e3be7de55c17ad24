"""The planning of a federation of volumes: one round in which sites send fingerprints, and no training.

It runs before a method, on the same engine, and is no method that a person asks for by name.

Shared:  counts that add up over sites (`training.planning.fingerprint`), of the training cases; nothing of a
         site that has fewer patients than the least number, or refuses statistics.
Stays:   everything else, each case's spacing and size included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field
from typing_extensions import override

from model_store.errors import LocumStoreError
from model_store.task import Task
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    Publication,
    RoundResult,
    State,
    StepContext,
)
from training.config import MethodConfig
from training.data.cases import Site
from training.data.scan_files import mask_of, read_case
from training.errors import FederationError
from training.methods.registry import register
from training.planning.fingerprint import (
    LEAST_PATIENTS,
    Measured,
    capped,
    check,
    fingerprint,
    measure,
)

FINGERPRINT = "fingerprint"


class PlanningConfig(MethodConfig):
    """Planning has nothing to choose."""

    rounds: int = Field(1, ge=1, le=1, description="one: every site sends once")


@dataclass(frozen=True)
class MeasuredSite:
    """A site's training cases, measured. `images` is what the site announces before the round."""

    cases: tuple[Measured, ...]

    @property
    def images(self) -> int:
        """The number of training cases."""
        return len(self.cases)

    @classmethod
    def load(cls, site: Site, task: Task) -> MeasuredSite:
        """Measure every training case. Raises FederationError naming the file."""
        found = []
        for case in site.of_split("train"):
            try:
                found.append(measure(case.patient, read_case(case, task), mask_of(case), task))
            except LocumStoreError as error:
                raise FederationError(
                    f"site '{site.name}' cannot be planned with:", [f"{site.name}/{case.name}: {error}"]
                ) from error
        return cls(tuple(found))


@register("plan", PlanningConfig, load=MeasuredSite.load, listed=False)
class Planning(Algorithm):
    """One phase: `fingerprint`. The exhibits of its publication have the sum, and the sites that sent one."""

    def __init__(self, config: PlanningConfig, task: Task) -> None:
        self._channels = task.channel_count

    @override
    def plan(self) -> Plan:
        group = Group(
            FINGERPRINT,
            "statistics",
            "collect",
            essential=False,
            check=partial(check, channels=self._channels),
        )
        return (Phase(FINGERPRINT, 1, (), (group,), self.measure_step, self.add, everyone=True),)

    @override
    def initial(self, context: StepContext) -> Memory:
        return Memory()

    def measure_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: MeasuredSite
    ) -> ClientResult:
        """A site's part: its fingerprint, or nothing of too few patients."""
        least = max(LEAST_PATIENTS, context.bounds.minimum_patients)
        return ClientResult({FINGERPRINT: fingerprint(data.cases, self._channels, least)}, weight=1.0)

    def add(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Sum the fingerprints, in site order; no site counts more than the others together."""
        sent = {site: state for site, state in result.collected.get(FINGERPRINT, {}).items() if state}
        merged: dict[str, Any] = {}
        counted, words = capped(sent)
        for state in counted.values():
            merged = {name: merged[name] + tensor if merged else tensor for name, tensor in state.items()}
        return Memory(merged, {"sites": list(sent), "capped": words})

    @override
    def publication(self, server: Memory) -> Publication:
        return Publication("none", (), exhibits=server)
