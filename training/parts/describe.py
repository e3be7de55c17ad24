"""What the sites' training scans look like, told once: what a service's guard and its lens know.

Shared:  summary statistics of the training scans; the number of training examples; means over patients of
         three features of the images (`model_store.lens`), and their variance between patients, of a site
         with as many patients as its policy asks for, and three at least.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from typing_extensions import override

from model_store.guard import ReferenceStatistics
from model_store.lens import FINGERPRINT as FILE
from model_store.lens import KINDS, Fingerprint, Kind, Seen, check_seen, seen_of
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    RoundResult,
    SiteSize,
    State,
    StepContext,
)
from training.bounds import FeatureBounds
from training.local.scores import Aggregation, weight_of
from training.local.site import SiteData
from training.parts.part import Added, Part, Slot

MOST_BYTES = 2**20
MOST_SCANS = 2**40
MOST_NAME = 64
# Of fewer a mean shows too much of one.
LEAST_PATIENTS = 3
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
    if not found.has_appearance:
        raise ValueError("expected sums and products, found neither")
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


def _check_seen(state: State, size: SiteSize) -> None:
    """Raise for features that no site of this size can have."""
    if state.keys() != {*KINDS, "variances", "patients"}:
        expected = ", ".join(KINDS)
        raise ValueError(f"expected the tensors {expected}, variances and patients, found {sorted(state)}")
    variances, most = state["variances"], MOST_SCANS if size.cases is None else size.cases
    if variances.shape != (len(KINDS),) or not LEAST_PATIENTS <= int(state["patients"]) <= most:
        raise ValueError(f"expected a variance of each feature, and {LEAST_PATIENTS} to {most} patients")
    for kind, variance in zip(KINDS, variances.tolist(), strict=True):
        check_seen(kind, state[kind].numpy(), variance)


STATISTICS = Group("statistics", "statistics", "collect", essential=False, check=_check)
FINGERPRINT = Group("fingerprint", "statistics", "collect", essential=False, check=_check_seen)
GROUPS = (STATISTICS, FINGERPRINT)


def describe(data: SiteData, bounds: FeatureBounds) -> dict[str, State]:
    """A site's uploads; no features of fewer patients than its policy asks for."""
    seen = seen_of(data.all_train.viewed())
    enough = seen and seen["field"].patients >= max(LEAST_PATIENTS, bounds.minimum_patients)
    return {STATISTICS.name: _pack(data.statistics), FINGERPRINT.name: _packed(seen) if enough else {}}


@dataclass(frozen=True)
class Described:
    """What the sites that let it out said together, and the weight in means of all of them.

    `fingerprint` is None where fewer than two sites said anything.
    """

    statistics: ReferenceStatistics | None = None
    weight: float = 0.0
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, result: RoundResult) -> Described:
        """What a round says, of which `describe` made the uploads."""
        found = [_unpack(state) for state in result.collected.get(STATISTICS.name, {}).values()]
        known = [statistics for statistics in found if statistics is not None]
        together = reduce(ReferenceStatistics.merge, known) if known else None
        members = [_unpacked(state) for state in result.collected.get(FINGERPRINT.name, {}).values() if state]
        return cls(together, sum(result.weights.values()), _fingerprint_of(members))

    def added(self) -> Added:
        """What the version has of it."""
        files = {} if self.fingerprint is None else {FILE: self.fingerprint.to_bytes()}
        return Added(statistics=self.statistics, files=files)


class Describe(Part):
    """One phase, in which a site announces its weight in means beside its statistics."""

    def __init__(self, aggregation: Aggregation) -> None:
        self.aggregation: Aggregation = aggregation
        self.slot = Slot("describe", Described())

    @override
    def plan(self) -> Plan:
        return (Phase("describe", 1, (), GROUPS, self.step, self.keep, everyone=True),)

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A site's part of the phase."""
        return ClientResult(describe(data, context.bounds), weight_of(data, self.aggregation))

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep what they said together."""
        return self.slot.write(server, Described.of(result))

    def share(self, server: Memory, result: RoundResult) -> float:
        """The share of a round's sites in the weight of all."""
        here = sum(result.weights.values())
        return here / max(here, self.slot.read(server).weight)

    @override
    def publish(self, server: Memory) -> Added:
        return self.slot.read(server).added()


def _fingerprint_of(members: list[dict[Kind, Seen]]) -> Fingerprint | None:
    """Make it of two members or more, with the channels and axes that most members have."""
    shapes = Counter(member["field"].mean.shape for member in members)
    alike = [each for each in members if each["field"].mean.shape == max(shapes, key=shapes.__getitem__)]
    return Fingerprint.of(alike) if len(alike) > 1 else None


def _packed(seen: Mapping[Kind, Seen]) -> State:
    means: State = {kind: torch.from_numpy(own.mean) for kind, own in seen.items()}
    variances = torch.tensor([seen[kind].variance for kind in KINDS], dtype=torch.float64)
    return {**means, "variances": variances, "patients": torch.tensor(seen["field"].patients)}


def _unpacked(state: State) -> dict[Kind, Seen]:
    patients = int(state["patients"])
    variances = state["variances"].tolist()
    return {
        kind: Seen(state[kind].numpy(), variance, patients)
        for kind, variance in zip(KINDS, variances, strict=True)
    }


def _pack(statistics: ReferenceStatistics | None) -> State:
    """Statistics as the bytes of their JSON, so that they are counted and refused like all that travels."""
    content = json.dumps(None if statistics is None else statistics.model_dump(mode="json")).encode()
    return {"json": torch.tensor(list(content), dtype=torch.uint8)}


def _unpack(state: State) -> ReferenceStatistics | None:
    content = json.loads(state["json"].numpy().tobytes())
    return None if content is None else ReferenceStatistics.model_validate(content)
