"""Parts, what they keep in a memory, and the run that they make together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from pydantic import ValidationError

from tests.helpers.training.sites import context
from training.algorithm import Group, Memory, Phase, Plan, Publication, State, StepContext
from training.errors import AlgorithmError
from training.local.scores import ValidationScore
from training.parts.part import Added, Part, Parted, Slot


@dataclass(frozen=True)
class Content:
    weights: State = field(default_factory=dict)
    sites: Mapping[str, State] = field(default_factory=dict)
    scores: Mapping[str, ValidationScore] = field(default_factory=dict)
    rounds: int = 0
    best: float | None = None
    shares: tuple[float, ...] = ()


SLOT = Slot("part", Content())
FULL = Content(
    {"a.weight": torch.ones(2), "b/odd": torch.zeros(1)},
    {"north": {"w": torch.ones(1)}, "south": {}},
    {"north": ValidationScore(1.5, 2, {"iou": (0.5, 2)})},
    3,
    0.25,
    (0.0, 0.5),
)


def test_content_comes_back_from_tensors_and_json_as_it_was_written() -> None:
    memory = SLOT.write(Memory(), FULL)
    # A memory travels as tensors and JSON.
    again = SLOT.read(Memory(memory.tensors, json.loads(json.dumps(memory.facts))))
    assert again.weights.keys() == FULL.weights.keys()
    # A state that has no tensor is still there, in its place.
    assert [*again.sites] == ["north", "south"]
    assert again.sites["south"] == {}
    assert (again.scores, again.rounds, again.best, again.shares) == (FULL.scores, 3, 0.25, (0.0, 0.5))
    # An engine writes tensors once that are the same objects.
    assert again.weights["b/odd"] is FULL.weights["b/odd"]
    assert again.sites["north"]["w"] is FULL.sites["north"]["w"]


def test_nothing_is_there_before_it_is_written_and_after_it_is_cleared() -> None:
    assert SLOT.read(Memory()) == Content()
    assert not SLOT.holds(Memory())
    memory = SLOT.write(Memory(), Content())
    assert SLOT.holds(memory)
    assert SLOT.clear(memory) == Memory()


def test_slots_leave_each_other_alone_and_a_new_content_leaves_nothing_of_the_old() -> None:
    longer = Slot("part two", Content())
    memory = longer.write(SLOT.write(Memory(), FULL), Content(rounds=1))
    after = SLOT.write(memory, Content({"c": torch.ones(1)}))
    assert SLOT.read(after).weights.keys() == {"c"}
    assert not [name for name in after.tensors if "a.weight" in name or "north" in name]
    assert longer.read(after).rounds == 1
    assert longer.read(SLOT.clear(after)).rounds == 1


def test_json_of_another_type_is_refused() -> None:
    memory = SLOT.write(Memory(), FULL)
    memory.facts["part"]["rounds"] = "many"
    with pytest.raises(ValidationError, match="valid integer"):
        SLOT.read(memory)


class Counts(Part):
    """A part that says its name in everything."""

    def __init__(self, name: str) -> None:
        self.slot = Slot(name, Content())

    def begin(self, context: StepContext, server: Memory) -> Memory:
        return self.slot.write(server, Content(rounds=len(self.slot.name)))

    def plan(self) -> Plan:
        total = Group("total", "statistics", "sum")
        return (Phase(self.slot.name, 1, (), (total,), lambda *_: None),)

    def publish(self, server: Memory) -> Added:
        name, found = self.slot.name, self.slot.read(server)
        return Added({name: float(found.rounds)}, {"last": name}, {name: b""})


class Both(Parted):
    def __init__(self) -> None:
        self.parts = (Counts("one"), Part(), Counts("three"))

    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        return Publication("none", (), {**metrics, "own": True})


def test_a_run_is_its_parts_in_their_order() -> None:
    method = Both()
    assert [step.name for step in method.plan()] == ["one", "three"]
    found = method.publication(method.initial(context("initial", 0)))
    assert found.details == {"one": 3.0, "three": 5.0, "last": "three", "own": True}
    assert found.files == {"one": b"", "three": b""}


def test_parts_are_exchanged_in_their_place_and_two_phases_of_one_name_are_refused() -> None:
    method = Both()
    method.exchange(method.parts[0], Counts("zero"), method.parts[0])
    assert [step.name for step in method.plan()] == ["zero", "one", "three"]
    method.exchange(method.parts[0], Counts("one"))
    with pytest.raises(AlgorithmError, match="names of their own, found one, one, three"):
        method.plan()
