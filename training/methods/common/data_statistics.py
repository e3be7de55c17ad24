"""The phase in which sites tell, once, what their training scans look like: what a service's guard knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch

from model_store.guard import ReferenceStatistics
from training.algorithm import ClientResult, Group, Phase, RoundResult, State
from training.data.classification import LabelledData
from training.data.segmentation.dataset import SiteData


def _check(state: State, cases: int | None) -> None:  # noqa: ARG001
    _unpack(state)


STATISTICS = Group("statistics", "statistics", "collect", essential=False, check=_check)
DESCRIBE = Phase("describe", 1, (), (STATISTICS,), everyone=True)


def describe(data: SiteData | LabelledData, weight: float) -> ClientResult:
    """A site's part of the phase."""
    return ClientResult({STATISTICS.name: _pack(data.statistics)}, weight)


def merge_described(result: RoundResult) -> dict[str, Any]:
    """The server's: a fact to keep, of the sites that let their statistics out."""
    found = [_unpack(state) for state in result.collected.get(STATISTICS.name, {}).values()]
    known = [statistics for statistics in found if statistics is not None]
    return {"statistics": reduce(ReferenceStatistics.merge, known).model_dump(mode="json") if known else None}


def described(facts: Mapping[str, Any]) -> ReferenceStatistics | None:
    """What `merge_described` put into the server's facts."""
    content = facts.get("statistics")
    return None if content is None else ReferenceStatistics.model_validate(content)


def _pack(statistics: ReferenceStatistics | None) -> State:
    """Statistics as the bytes of their JSON, so that they are counted and refused like all that travels."""
    content = json.dumps(None if statistics is None else statistics.model_dump(mode="json")).encode()
    return {"json": torch.tensor(list(content), dtype=torch.uint8)}


def _unpack(state: State) -> ReferenceStatistics | None:
    content = json.loads(bytes(state["json"].tolist()))
    return None if content is None else ReferenceStatistics.model_validate(content)
