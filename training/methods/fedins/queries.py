"""What the frozen backbone makes of a site's images, once, and the federation's mean query.

Shared:  what `describe` shares. Where queries are centred, their sum and number (kind `features`, within the
         site's bounds, not essential).
Stays:   the queries and, of blocks that are not adapted, what these make of the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from typing_extensions import override

from personalization.fedins import InstanceAdaptive
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
from training.local.data import slices_of
from training.local.site import SiteData
from training.methods.fedins.client import see, summed_queries
from training.methods.fedins.config import FedInsConfig
from training.parts.describe import GROUPS, Describe
from training.parts.part import Slot


def check_queries(state: State, size: SiteSize) -> None:  # noqa: ARG001
    """Raise ValueError without an image: the server divides by their number."""
    if not state["count"].item() >= 1:
        raise ValueError(f"expected the sum of 1 image at least, found {state['count'].item():g}")


# A sum and a number are a mean of what a network makes of images.
QUERIES = Group("queries", "features", "sum", essential=False, bounded=True, check=check_queries)
CENTRE = Group("centre", "features")


@dataclass(frozen=True)
class Seen:
    """What `see` makes of the images of a split."""

    train: State = field(default_factory=dict)
    val: State = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """The mean query of the training images; zero where none is known."""

    query: State


class DescribeQueries(Describe):
    """`Describe`, in a phase in which every site also makes its queries."""

    def __init__(self, config: FedInsConfig, classes: int, width: int, *, centred: bool) -> None:
        super().__init__(config.aggregation)
        self.config = config
        self.classes = classes
        self.centred = centred
        self.seen = Slot("seen", Seen())
        self.mean = Slot("mean", Mean({"centre": torch.zeros(width)}))

    @override
    def plan(self) -> Plan:
        uploads = (*GROUPS, QUERIES) if self.centred else GROUPS
        return (Phase("describe", 1, (), uploads, self.step, self.keep, expected=self.expect, everyone=True),)

    def expect(self, server: Memory) -> Mapping[str, State]:
        """A sum of queries, where they are centred."""
        if not self.centred:
            return {}
        total = torch.zeros_like(self.mean.read(server).query["centre"], dtype=torch.float64)
        return {QUERIES.name: {"sum": total, "count": torch.zeros(())}}

    def centre(self, server: Memory) -> Mapping[str, State]:
        """The mean query as it travels, where queries are centred."""
        return {CENTRE.name: self.mean.read(server).query} if self.centred else {}

    @override
    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Describe the data, and make the queries."""
        described = super().step(context, received, memory, data)
        seen = self.see(self.config.network(self.classes, context.device), memory, data)
        uploads = dict(described.uploads)
        if self.centred:
            queries, patients = seen.train["queries"], data.train.patients
            uploads[QUERIES.name] = summed_queries(queries, patients, context.bounds, context.noise)
        return replace(described, uploads=uploads, memory=self.seen.write(memory, seen))

    def see(self, network: InstanceAdaptive, memory: Memory, data: SiteData) -> Seen:
        """What the site has of its images, or makes now."""
        if self.seen.holds(memory):
            return self.seen.read(memory)
        size, augment = self.config.batch_size, self.config.augment
        # Images that are augmented give others in every batch.
        train = see(network, slices_of(data.train), size, stems=not augment)
        if data.val is data.train:
            return Seen(train, train)
        return Seen(train, see(network, slices_of(data.val), size))

    @override
    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Merge the statistics, and keep the mean query."""
        server, total = super().keep(context, server, result), result.reduced.get(QUERIES.name)
        if total is None:
            return server
        centre = (total["sum"] / total["count"].double()).float()
        return self.mean.write(server, Mean({"centre": centre}))
