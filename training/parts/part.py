"""A run is a list of parts.

A part is one concern of a run. It owns its groups, the phases in which they travel with the steps of these, a
slot of the server's memory, and what it adds to the version that the run publishes. A method is the equation
of its paper, a list of parts, and the model that it publishes:

    class FedAvg(Parted):
        def __init__(self, config, task):
            self.train = Train(self)
            self.parts = (Describe(config.aggregation), self.train, Validate(self.train), ...)

A part that needs what another one keeps is given that part, and asks it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter
from torch import nn
from typing_extensions import override

from model_store.guard import ReferenceStatistics
from training.algorithm import Algorithm, Memory, Plan, Publication, State, StepContext
from training.errors import AlgorithmError
from training.local.loop import Penalty
from training.local.site import SiteData
from training.state_tree import join, part

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Slot(Generic[Kept]):
    """A place of its owner's in a memory, of the server or of a site.

    Its content is one dataclass; `empty` is its value before anything was written. Fields of the types
    `State` and `Mapping[str, State]` are kept as tensors, all others as JSON.
    """

    name: str
    empty: Kept

    @property
    def _kind(self) -> Any:
        return type(self.empty)

    def read(self, memory: Memory) -> Kept:
        """The content; the tensors are those of the memory."""
        if not self.holds(memory):
            return self.empty
        tensors, facts = part(memory.tensors, self.name), memory.facts[self.name]
        values: dict[str, Any] = {}
        for name, adapter in _adapters(self._kind).items():
            states = part(tensors, name)
            if adapter == State:
                values[name] = states
            elif adapter == _STATES:
                values[name] = {key: part(states, key) for key in facts[name]}
            else:
                values[name] = adapter.validate_python(facts[name])
        content: Kept = self._kind(**values)
        return content

    def write(self, memory: Memory, content: Kept) -> Memory:
        """The memory with this content, and all that others keep in it."""
        states: dict[str, State] = {}
        facts: dict[str, Any] = {}
        for name, adapter in _adapters(self._kind).items():
            value = getattr(content, name)
            if adapter == State:
                states[name] = value
            elif adapter == _STATES:
                states |= {f"{name}/{key}": state for key, state in value.items()}
                facts[name] = list(value)
            else:
                facts[name] = adapter.dump_python(value, mode="json")
        others = self.clear(memory)
        tensors = {**others.tensors, **join({self.name: join(states)})}
        return Memory(tensors, {**others.facts, self.name: facts})

    def holds(self, memory: Memory) -> bool:
        """Whether anything was written."""
        return self.name in memory.facts

    def clear(self, memory: Memory) -> Memory:
        """The memory without the content."""
        tensors = {n: t for n, t in memory.tensors.items() if not n.startswith(f"{self.name}/")}
        return Memory(tensors, {n: fact for n, fact in memory.facts.items() if n != self.name})


_STATES = Mapping[str, State]


@cache
def _adapters(content: Any) -> Mapping[str, Any]:
    """How each field of a dataclass is kept: as tensors, or by an adapter to JSON."""
    hints = get_type_hints(content)
    tensors = (State, _STATES)
    return {
        each.name: hints[each.name] if hints[each.name] in tensors else TypeAdapter(hints[each.name])
        for each in fields(content)
    }


@dataclass(frozen=True)
class Added:
    """What a part adds to a version: metrics of the model that all share, and facts and files beside it.

    `statistics` describes the training scans for the service's guard.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    statistics: ReferenceStatistics | None = None

    def __add__(self, other: Added) -> Added:
        return Added(
            {**self.metrics, **other.metrics},
            {**self.details, **other.details},
            {**self.files, **other.files},
            other.statistics or self.statistics,
        )


class Part:
    """One concern of a run."""

    def begin(self, context: StepContext, server: Memory) -> Memory:
        """The server's memory with what the part begins with."""
        return server

    def plan(self) -> Plan:
        """Its phases and server stages, with their steps."""
        return ()

    def term(self, context: StepContext, network: nn.Module, data: SiteData) -> Penalty | None:
        """What it adds to the loss of every batch at a site; nothing by default."""
        return None

    def publish(self, server: Memory) -> Added:
        """What it adds to the version."""
        return Added()


class Parted(Algorithm):
    """A method that is made of parts, which run in their order."""

    parts: Sequence[Part]

    def exchange(self, old: Part, *new: Part) -> None:
        """Put others in the place of one of the parts."""
        place = [*self.parts].index(old)
        self.parts = (*self.parts[:place], *new, *self.parts[place + 1 :])

    @override
    def plan(self) -> Plan:
        """The phases of all parts. Raises AlgorithmError for two of one name, by which records know them."""
        steps = tuple(step for each in self.parts for step in each.plan())
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            raise AlgorithmError(f"expected phases with names of their own, found {', '.join(names)}")
        return steps

    @override
    def initial(self, context: StepContext) -> Memory:
        return reduce(lambda server, each: each.begin(context, server), self.parts, Memory())

    @override
    def publication(self, server: Memory) -> Publication:
        """What the method makes of the run, with all that its parts add to the version."""
        added = sum((each.publish(server) for each in self.parts), Added())
        found = self.made(server, added.metrics)
        return replace(
            found,
            details={**added.details, **found.details},
            statistics=added.statistics,
            files={**added.files, **found.files},
        )

    @abstractmethod
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The kind of the version, its models, and what no part adds.

        `metrics` are those of the model that all sites share.
        """
