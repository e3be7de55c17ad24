"""Only the homes of kinds of task test for a kind: all other code asks the object of the kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from model_store.task import Task, TaskKind, VolumeGeometry
from personalization.metrics import metrics_of
from personalization.networks import capabilities, outline
from personalization.networks.capabilities import traits_of
from training.choices.loss import LossConfig
from training.choices.network import NetworkConfig
from training.data.federation import layout_of
from training.local.data import Data
from training.local.images import Images
from training.local.registry import kind_of
from training.local.slices import Slices
from training.local.volumes import Volumes

ROOT = Path(__file__).parents[3]
ROOMS = ("training", "benchmarks", "locum/demo")
# The objects, and the folders in which the files of a kind lie.
HOMES = ("training/local", "training/data/classification", "training/data/segmentation")
TYPE_TEST = re.compile(
    r"isinstance\([^)]*\b(Data|Examples|Masked|Slices|Images|Volumes|SiteData)\b|\.(is_volume|has_masks)\b"
    rf"""|\bkind (==|!=|in|not in) [(]?["']({"|".join(get_args(TaskKind))})["']"""
)


def type_tests(place: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / place).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if TYPE_TEST.search(line)
    ]


def test_only_the_homes_of_kinds_test_for_a_kind() -> None:
    found = [line for room in ROOMS for line in type_tests(room) if not line.startswith(HOMES)]
    assert not found, "ask kind_of(task), or the data:\n" + "\n".join(found)


def test_what_is_looked_for_is_in_the_homes() -> None:
    assert all(type_tests(home) for home in HOMES)


TASKS = {
    Slices: Task(name="a", labels={"a": (1,)}, size=(32, 32)),
    Volumes: Task(name="a", labels={"a": (1,)}, geometry=VolumeGeometry(patch=(32, 32, 32))),
    Images: Task(name="a", kind="classification", class_names=("a", "b"), size=(32, 32)),
}


@pytest.mark.parametrize("kind", TASKS)
def test_kind_has_what_a_method_asks_of_it(kind: type[Data]) -> None:
    task = TASKS[kind]
    assert kind_of(task) is kind
    assert kind.kind == task.kind
    none = kind.joined([], task)
    assert len(none) == 0
    assert len(kind.joined([kind.unpacked(none.packed(), task)] * 2, task)) == 0
    spec = NetworkConfig().network_for(task)
    network = outline(spec.name, **spec.arguments)
    assert traits_of(network).task == kind.kind
    assert (metrics_of(kind.kind)[0].best, metrics_of(kind.kind)[0].most) == ("highest", 1.0)
    assert LossConfig().loss_for(task)
    assert layout_of(task).inferred(task)


def test_rooms_know_the_same_kinds() -> None:
    assert {kind.kind for kind in TASKS} == {*get_args(TaskKind)} == {*get_args(capabilities.TaskKind)}
