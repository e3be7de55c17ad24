"""Class indices where a task's own values are expected are rejected by name, before a job and in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from model_store.task import Task
from service.errors import MasksMissing
from service.kinds.cross_attention import check
from service.worker.cohort_images import masks_of
from tests.helpers.service.cohort_bench import Bench

TASK = Task(name="tumour", labels={"tumour": (2,)}, background=(0, 1), size=(32, 32))
SAID = "what /segment answers has class indices"


def draw(bench: Bench, **values: list[int]) -> None:
    """A scan of each name, with a mask that has these values."""
    for name, found in values.items():
        bench.add(name, name.encode())
        bench.draw(name, f"mask of {name}".encode(), found)


def test_check_of_masks_without_a_target_is_rejected_with_the_reason(bench: Bench) -> None:
    draw(bench, a=[0, 1], b=[0, 1])
    parent: Any = SimpleNamespace(manifest=SimpleNamespace(task=TASK, lineage=SimpleNamespace(sites=())))
    with bench.database.read() as session, pytest.raises(MasksMissing, match=SAID) as refused:
        check(session, parent, bench.cohort)
    assert refused.value.status == 422


def test_masks_of_a_job_warns_of_masks_without_a_target(bench: Bench) -> None:
    draw(bench, a=[0, 1], b=[0, 2], c=[0, 2])
    warnings: list[str] = []
    attempt: Any = SimpleNamespace(
        job=SimpleNamespace(cohort=bench.cohort),
        database=bench.database,
        settings=bench.settings,
        warn=warnings.append,
    )
    files, ill = masks_of(attempt, TASK)
    assert sorted(files) == ["a", "b", "c"]
    assert ill == {"b", "c"}
    (warning,) = warnings
    assert warning.startswith("1 mask counts")
    assert SAID in warning
