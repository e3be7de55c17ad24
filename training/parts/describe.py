"""The phase in which sites tell, once, what their training scans look like: what a service's guard knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import torch

from model_store.guard import ReferenceStatistics
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    Phase,
    RoundResult,
    ServerStep,
    SiteSize,
    State,
    StepContext,
)
from training.local.scores import Aggregation, AnySiteData, weight_of
from training.local.site import SiteData

MOST_BYTES = 2**20
MOST_SCANS = 2**40
MOST_NAME = 64
# Descriptors are of slices normalised to variance 1, where none is beyond 9.
MOST_DESCRIPTOR = 16.0


def _check(state: State, size: SiteSize) -> None:
    """Raise for statistics that no site of this size can have.

    They are merged after the round and stored with the model, where the guard computes with them.
    """
    if list(state) != ["json"]:
        raise ValueError(f"expected the tensor 'json', found {sorted(state)}")
    if state["json"].numel() > MOST_BYTES:
        raise ValueError(f"expected {MOST_BYTES} bytes at most, found {state['json'].numel()}")
    found = _unpack(state)
    if found is None:
        return
    count, most = found.count, MOST_SCANS if size.cases is None else size.cases
    if count > most:
        raise ValueError(f"expected statistics of {most} scans at most, found more")
    if min(found.kinds.values(), default=0) < 1 or sum(found.kinds.values()) != count:
        raise ValueError("expected 1 scan or more of every kind, as many as there are in sum")
    if not all(name.isprintable() and 1 <= len(name) <= MOST_NAME for name in (*found.kinds, *found.ranges)):
        raise ValueError(f"expected printable names of kinds and ranges, with {MOST_NAME} characters at most")
    if any(range_.low > range_.high for range_ in found.ranges.values()):
        raise ValueError("expected ranges from a lower to a higher value")
    sums, products = np.array(found.sums), np.array(found.products)
    if products.shape != (len(sums), len(sums)):
        raise ValueError(f"expected products of shape {(len(sums), len(sums))}, found {products.shape}")
    if max(np.abs(sums).max(), np.abs(products).max() / MOST_DESCRIPTOR) > count * MOST_DESCRIPTOR:
        raise ValueError(f"expected sums over descriptors of {MOST_DESCRIPTOR:g} at most")
    # A sum of (1, v)(1, v)^T; without it the guard's covariance may have no inverse.
    moments = np.block([[np.full((1, 1), count), sums[None]], [sums[:, None], products]])
    least = -1e-9 * count * MOST_DESCRIPTOR**2
    if not np.array_equal(moments, moments.T) or np.linalg.eigvalsh(moments).min() < least:
        raise ValueError("expected sums and products of the same descriptors")


STATISTICS = Group("statistics", "statistics", "collect", essential=False, check=_check)


def describe(data: SiteData, weight: float) -> ClientResult:
    """A site's part of the phase."""
    return ClientResult({STATISTICS.name: _pack(data.statistics)}, weight)


def merge_described(result: RoundResult) -> dict[str, Any]:
    """Merge the statistics of the sites that let them out, into a fact that the server keeps."""
    found = [_unpack(state) for state in result.collected.get(STATISTICS.name, {}).values()]
    known = [statistics for statistics in found if statistics is not None]
    return {"statistics": reduce(ReferenceStatistics.merge, known).model_dump(mode="json") if known else None}


def keep_described(context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG001
    """The server step of the phase: its memory with the merged statistics."""
    return Memory(server.tensors, {**server.facts, **merge_described(result)})


def describe_phase(aggregation: Aggregation, server_step: ServerStep = keep_described) -> Phase:
    """The phase, in which a site announces its weight in means beside its statistics."""
    client_step = partial(_describe, aggregation=aggregation)
    return Phase("describe", 1, (), (STATISTICS,), client_step, server_step, everyone=True)


def _describe(
    context: StepContext,  # noqa: ARG001
    received: Mapping[str, State],  # noqa: ARG001
    memory: Memory,  # noqa: ARG001
    data: AnySiteData,
    *,
    aggregation: Aggregation,
) -> ClientResult:
    return describe(data, weight_of(data, aggregation))


def described(facts: Mapping[str, Any]) -> ReferenceStatistics | None:
    """What `merge_described` put into the server's facts."""
    content = facts.get("statistics")
    return None if content is None else ReferenceStatistics.model_validate(content)


def _pack(statistics: ReferenceStatistics | None) -> State:
    """Statistics as the bytes of their JSON, so that they are counted and refused like all that travels."""
    content = json.dumps(None if statistics is None else statistics.model_dump(mode="json")).encode()
    return {"json": torch.tensor(list(content), dtype=torch.uint8)}


def _unpack(state: State) -> ReferenceStatistics | None:
    content = json.loads(state["json"].numpy().tobytes())
    return None if content is None else ReferenceStatistics.model_validate(content)
