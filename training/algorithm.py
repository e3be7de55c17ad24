"""What a federated method is, said without any engine.

A method is an object with pure steps. It reads and writes no files, uses no global random state and chooses
no device: whatever it needs is handed to it, whatever it makes it returns. An engine runs it: processes on
one machine, or real hospitals over a network.

The run follows the method's `plan`: phases (rounds at the sites, then one server step per round) and server
stages (steps on the server alone), in order.

    for each phase, for each round:
        site:    received = broadcast(...)       -> client_step(...)  -> uploads; and a memory that stays
        server:  uploads reduced group by group  -> server_step(...)  -> the server's memory
    for each server stage, for each step:
        server:  server_stage(...)                                    -> the server's memory

What travels is declared in groups. A group has a *kind*, by which a site's egress policy may refuse it, and a
*reduction*, by which the engine combines what the sites sent:

    mean     weighted by each site's `ClientResult.weight`; integer tensors are copied from the first site
    sum      plain sum
    concat   along the first axis, in site order
    collect  kept apart, by site

A toy that federates a mean, in full:

    class Mean(Algorithm[list[float]]):
        def plan(self): return (Phase("sum", 1, (), (Group("total", "statistics", "sum"),)),)
        def initial(self, context): return Memory()
        def broadcast(self, phase, server, site): return {}
        def client_step(self, context, received, memory, data):
            total = torch.tensor([sum(data), len(data)], dtype=torch.float64)
            return ClientResult({"total": {"sum_count": total}}, weight=len(data))
        def server_step(self, context, server, round_):
            total, count = round_.reduced["total"]["sum_count"]
            return Memory({}, {"mean": float(total / count)})
        def publication(self, server): return Publication("none", ())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

from model_store.guard import ReferenceStatistics
from model_store.manifest import NetworkSpec
from personalization.state import State
from training.bounds import NO_BOUNDS, FeatureBounds

__all__ = [
    "Algorithm",
    "ClientResult",
    "Group",
    "GroupKind",
    "Memory",
    "ModelDraft",
    "Noise",
    "Phase",
    "Publication",
    "Reduction",
    "RoundResult",
    "ServerStage",
    "State",
    "StepContext",
]

GroupKind = Literal["weights", "features", "statistics", "images"]
Reduction = Literal["mean", "sum", "concat", "collect"]
Data = TypeVar("Data")
Noise = Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class Group:
    """A named set of tensors that travels together.

    `essential` says whether a site that does not let this kind out can take part at all. When it is False,
    such a site takes part without the group, and so does one that has no tensor to send. `bounded` says of
    features that the method keeps the site's own bounds on them (`Context.bounds`); without it they do not
    leave a site that has some.
    """

    name: str
    kind: GroupKind
    reduction: Reduction = "mean"
    essential: bool = True
    bounded: bool = False


@dataclass(frozen=True)
class Phase:
    """Rounds of work at the sites.

    `downloads` names the groups of `broadcast` (their reduction plays no part). A phase with `consent` runs
    only at sites of hospitals that agreed to it. `everyone` takes all sites whatever the run's participation.
    """

    name: str
    rounds: int
    downloads: tuple[Group, ...]
    uploads: tuple[Group, ...]
    consent: bool = False
    everyone: bool = False


@dataclass(frozen=True)
class ServerStage:
    """Work of the server alone, in steps that are checkpointed one by one."""

    name: str
    steps: int


@dataclass(frozen=True)
class Memory:
    """What the server, or one site, carries from round to round: tensors, and small JSON facts."""

    tensors: State = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def _no_key(purpose: str) -> np.random.Generator:
    raise TypeError(f"noise for '{purpose}': an engine gives it to the steps of a site, and to no other")


@dataclass(frozen=True)
class StepContext:
    """Where a step finds itself. `round` counts from 0 within its phase or stage.

    `generator(purpose)` gives a fresh CPU generator that depends on the run's seed, the phase, the round, the
    site and the purpose, and on nothing else: the same call gives the same numbers again. `bounds` are the
    site's own, on features that leave it. `noise(purpose)` draws what is to hide something in them: from a
    key of the site's too, since the seed is published and would let a reader subtract the noise.
    """

    phase: str
    round: int
    rounds: int
    device: torch.device
    generator: Callable[[str], torch.Generator]
    site: str | None = None
    bounds: FeatureBounds = NO_BOUNDS
    noise: Noise = _no_key


@dataclass(frozen=True)
class ClientResult:
    """What one site made of a round.

    Only `uploads`, `weight` and `metrics` leave the site; `memory` stays (None: leave it as it was). Metrics
    are numbers for a person to watch; they count as statistics: a site that keeps those in keeps them too.
    """

    uploads: Mapping[str, State]
    weight: float
    memory: Memory | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """What the server receives: groups reduced by mean, sum or concat, and groups collected by site.

    `weights` has the sites that delivered, in site order. A group that no site let out is absent.
    """

    reduced: Mapping[str, State]
    collected: Mapping[str, Mapping[str, State]]
    weights: Mapping[str, float]
    metrics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ModelDraft:
    """One trained network, ready to become an artefact. `site` is None for a model of the federation.

    `cluster` names the hospitals that a cluster's model is for. `sources` names what the shares in the
    graph's output "attention" are of, for a network that has one.
    """

    role: str
    network: NetworkSpec
    weights: State
    site: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    cluster: str | None = None
    sources: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Publication:
    """What a finished run offers: the artefact's kind, its models, and facts for the lineage.

    `statistics` is what the guard of a service should know of the scans the federation trained on, if the
    sites let it out. `composite` has what a composite's manifest says beside its parts. `exhibits` is what a
    report may show and no artefact holds, never a patient's.
    """

    kind: str
    models: tuple[ModelDraft, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    statistics: ReferenceStatistics | None = None
    composite: Mapping[str, Any] = field(default_factory=dict)
    exhibits: Memory = field(default_factory=Memory)


class Algorithm(ABC, Generic[Data]):
    """A federated method. Must be picklable: engines send it to other processes."""

    @abstractmethod
    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """Everything the run does, in order."""

    @abstractmethod
    def initial(self, context: StepContext) -> Memory:
        """The server's memory before the first round."""

    @abstractmethod
    def broadcast(self, phase: Phase, server: Memory, site: str) -> Mapping[str, State]:
        """The groups of `phase.downloads` for one site.

        Return the *same* tensors for sites that get the same: the engine then writes them once.
        """

    @abstractmethod
    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: Data
    ) -> ClientResult:
        """One round at one site. `received` and `memory` must not be changed in place."""

    @abstractmethod
    def server_step(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """The server's memory after a round."""

    def server_stage(self, context: StepContext, server: Memory) -> Memory:  # noqa: ARG002
        """One step of a server stage; `context` names the stage and the step."""
        raise TypeError(
            f"{type(self).__name__} plans the server stage '{context.phase}' but does not define it"
        )

    def longest_part(self, sites: int) -> str:  # noqa: ARG002
        """The longest name of a model that a run over so many sites may publish and that is no site's own."""
        return "global"

    @abstractmethod
    def publication(self, server: Memory) -> Publication:
        """What the server's memory is worth publishing after the last step of the plan."""
