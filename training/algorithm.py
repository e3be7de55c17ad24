"""The interface of a federated method, independent of the engine that runs it.

A method is an object with pure steps. It reads and writes no files, uses no global random state and chooses
no device: steps get their inputs as arguments and return their results. An engine runs the method: processes
on one machine, or real hospitals over a network.

The method's `plan` lists phases (rounds at the sites, then one server step per round) and server stages
(steps on the server alone). Each carries its steps, and the engine runs them in order:

    for each phase, for each round:
        site:    received = phase.broadcast(...)   -> phase.client_step(...)  -> uploads; a memory that stays
        server:  uploads reduced group by group    -> phase.server_step(...)  -> the server's memory
    for each server stage, for each step:
        server:  stage.step(...)                                              -> the server's memory

Tensors that sites and server exchange are declared in groups. A group has a *kind*, by which a site's egress
policy may refuse it, and a *reduction*, by which the engine combines the sites' uploads:

    mean     weighted by each site's `ClientResult.weight`; integer tensors are copied from the first site
    sum      plain sum
    concat   along the first axis, in site order
    collect  kept apart, by site

A complete toy method that federates a mean:

    class Mean(Algorithm):
        def plan(self):
            total = Group("total", "statistics", "sum")
            return (Phase("sum", 1, (), (total,), self.add, self.divide),)
        def initial(self, context): return Memory()
        def add(self, context, received, memory, data):
            total = torch.tensor([sum(data), len(data)], dtype=torch.float64)
            return ClientResult({"total": {"sum_count": total}}, weight=len(data))
        def divide(self, context, server, result):
            total, count = result.reduced["total"]["sum_count"]
            return Memory({}, {"mean": float(total / count)})
        def publication(self, server): return Publication("none", ())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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
    "Plan",
    "Publication",
    "Reduction",
    "RoundResult",
    "ServerStage",
    "SiteSize",
    "State",
    "StepContext",
]

GroupKind = Literal["weights", "features", "statistics", "images"]
Reduction = Literal["mean", "sum", "concat", "collect"]
Noise = Callable[[str, State, float], np.random.Generator]


@dataclass(frozen=True)
class SiteSize:
    """What a site announced of its data before the first round; None where it is unknown.

    `cases` is the number of its cases, `scored` the most that a score of the site can count, `images` the
    number of its training images, which its weight in a mean cannot exceed. A segmentation is scored by
    patient, a classification by image, and a case may have many images: slices.
    """

    cases: int | None = None
    scored: int | None = None
    images: int | None = None


@dataclass(frozen=True)
class Group:
    """A named set of tensors that are sent together.

    A site that refuses the kind of an `essential` group cannot take part in the phase. Without `essential`, a
    site that refuses the kind, or has no tensor to send, takes part without the group. `bounded` says that
    the method applies the site's bounds on features (`StepContext.bounds`); features that are not bounded do
    not leave a site with bounds. `check(state, size)` raises where an upload cannot be what it should be of a
    site with this size. A site that fails it is dropped from the round.
    A group that is not `beside_noise` stays at a site that adds noise for differential privacy to any of its
    uploads: it would be wrong there.
    `repair(noisy, received)` returns an upload that got noise for differential privacy with values that a
    network can have, such as variances above zero.
    """

    name: str
    kind: GroupKind
    reduction: Reduction = "mean"
    essential: bool = True
    bounded: bool = False
    beside_noise: bool = True
    check: Callable[[State, SiteSize], None] | None = None
    repair: Callable[[State, State], State] | None = None


@dataclass(frozen=True)
class Memory:
    """State that the server, or one site, keeps from round to round: tensors, and small JSON facts."""

    tensors: State = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def _no_key(purpose: str, content: State, deviation: float) -> np.random.Generator:  # noqa: ARG001
    raise TypeError(f"noise for '{purpose}' is available only in the client steps that an engine runs")


@dataclass(frozen=True)
class StepContext:
    """The context of a step. `phase` names the phase or stage, `round` counts from 0 within it.

    `generator(purpose)` creates a CPU generator that depends only on the run's seed, the phase, the round,
    the site and the purpose: the same call gives the same numbers again. `bounds` are the site's bounds on
    features that leave it. `noise(purpose, content, deviation)` creates a generator for the privacy noise of
    this deviation on `content`. It also depends on the site's secret key, because the run's seed is
    published, and on what it hides, because an operator can have a step repeated with other weights: the same
    noise twice could be subtracted.
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
    """The result of a round at one site.

    Only `uploads`, `weight` and `metrics` leave the site; `memory` stays (None keeps the old one). Metrics
    are numbers for people to watch. They count as statistics: a site that refuses statistics withholds them.
    """

    uploads: Mapping[str, State]
    weight: float
    memory: Memory | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """The reduced round for the server: groups reduced by mean, sum or concat, and groups collected by site.

    `weights` has the sites that delivered, in site order. A group that every site withheld is absent.
    """

    reduced: Mapping[str, State]
    collected: Mapping[str, Mapping[str, State]]
    weights: Mapping[str, float]
    metrics: Mapping[str, Mapping[str, float]]


# (context, received groups, the site's memory, the site's data); the first three must not be changed in place
ClientStep: TypeAlias = Callable[[StepContext, Mapping[str, State], Memory, Any], ClientResult]
ServerStep: TypeAlias = Callable[[StepContext, Memory, RoundResult], Memory]


def keep_memory(context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG001
    """The server step of a phase that changes nothing at the server."""
    return server


def send_nothing(server: Memory, site: str) -> Mapping[str, State]:  # noqa: ARG001
    """The broadcast of a phase without downloads."""
    return {}


def take_all(metrics: Mapping[str, float], size: SiteSize) -> None:
    """The check of a phase that takes all metrics."""


def as_received(server: Memory) -> Mapping[str, State]:  # noqa: ARG001
    """The expectation of a phase with uploads that are like the downloads of the same name."""
    return {}


@dataclass(frozen=True)
class Phase:
    """Rounds of work at the sites, with the steps that do it: mostly methods of the algorithm.

    Attributes:
        name: names the phase in records, messages and seeds; unique in a plan.
        downloads: the groups that `broadcast` makes (their reduction is ignored).
        uploads: the groups that `client_step` makes.
        client_step: runs one round at one site.
        server_step: computes the server's memory after a round.
        broadcast: makes the downloads for one site, from the server's memory. It returns the *same* tensor
            objects for sites with equal downloads: the engine then writes them once.
        expected: makes, by group, tensors with the names, shapes and types that uploads must have, from the
            server's memory. Only for groups that were not sent, or differ from what was sent under their
            name. Their values are what an update begins at, which a bound on its norm needs; tensors on the
            `meta` device have none, and their groups have no bound.
        consent: runs the phase only at sites that consented to it.
        everyone: takes all sites, regardless of the run's participation.
        check: raises ValueError for metrics that a site of this size cannot have; the site is dropped.
    """

    name: str
    rounds: int
    downloads: tuple[Group, ...]
    uploads: tuple[Group, ...]
    client_step: ClientStep
    server_step: ServerStep = keep_memory
    broadcast: Callable[[Memory, str], Mapping[str, State]] = send_nothing
    expected: Callable[[Memory], Mapping[str, State]] = as_received
    consent: bool = False
    everyone: bool = False
    check: Callable[[Mapping[str, float], SiteSize], None] = take_all


@dataclass(frozen=True)
class ServerStage:
    """Work of the server alone. `step` computes its memory; a checkpoint is written after each step."""

    name: str
    steps: int
    step: Callable[[StepContext, Memory], Memory]


Plan: TypeAlias = tuple[Phase | ServerStage, ...]


@dataclass(frozen=True)
class ModelDraft:
    """One trained network, ready to become an artefact. `site` is None for a model of the federation.

    `cluster` names the cluster that the model is for. `sources` names the columns of the graph's output
    "attention", for a network that has one.
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
    """The content to publish from a finished run: the artefact's kind, its models, and facts for the lineage.

    `statistics` describes the training scans for the service's guard, if the sites allowed it. `composite`
    has the fields of a composite's manifest beside its parts, `files` its files by name. `exhibits` is
    content for the report that no artefact stores, and never a patient's.
    """

    kind: str
    models: tuple[ModelDraft, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    statistics: ReferenceStatistics | None = None
    composite: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    exhibits: Memory = field(default_factory=Memory)


class Algorithm(ABC):
    """A federated method. Must be picklable: engines send it to other processes."""

    @abstractmethod
    def plan(self) -> Plan:
        """List the phases and server stages of the run, in order, with their steps."""

    @abstractmethod
    def initial(self, context: StepContext) -> Memory:
        """Make the server's memory before the first round."""

    def longest_part(self, sites: int) -> str:  # noqa: ARG002
        """Return the longest name that a run over `sites` sites may give a model that is not a site's own."""
        return "global"

    @abstractmethod
    def publication(self, server: Memory) -> Publication:
        """Return the content to publish, from the server's memory after the last step of the plan."""
