"""How far the sites naturally are apart: their shift from the statistics of the published model.

A service compares a hospital's shift with that of the members (`personalization.iop_fl.spread`).

Shared:  six numbers per batch norm: the site's shift from the published statistics, and its sampling
         variance; with masks, the share of pixels that are a target, where it is large, and its pieces. All
         as means over sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from personalization.dose import targets_of
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import FEWEST, FILE, check_sent, sent_by
from personalization.iop_fl.spread import Spread as Measured
from training.algorithm import Group, Memory, RoundResult, SiteSize, State
from training.local.norms import moments_of
from training.local.site import SiteData
from training.parts.part import Added, Part, Slot


def _check_spread(state: State, size: SiteSize) -> None:  # noqa: ARG001
    check_sent(state)


def _check_one(state: State, size: SiteSize) -> None:  # noqa: ARG001
    if state["members"].tolist() != [1.0]:
        raise ValueError(f"expected 1 member, found {state['members'].tolist()}")


# With noise on the weights the shift from them is not that between hospitals.
SPREAD = Group("spread", "statistics", "mean", essential=False, check=_check_spread, beside_noise=False)
MEMBERS = Group("spread_members", "statistics", "sum", essential=False, check=_check_one, beside_noise=False)


@dataclass(frozen=True)
class _Noted:
    """None where fewer sites than two measured."""

    spread: Measured | None = None


class Spread(Part):
    """What the sites measure on the published model, in a phase of another part."""

    groups = (SPREAD, MEMBERS)

    def __init__(self, network: NetworkSpec, classes: int, batch_size: int) -> None:
        self.network = network
        self.classes = classes
        self.batch_size = batch_size
        self.slot = Slot("spread", _Noted())

    def measure(self, network: nn.Module, data: SiteData) -> Mapping[str, State]:
        """A site's uploads; empty states without training slices."""
        if not len(data.all_train):
            return {SPREAD.name: {}, MEMBERS.name: {}}
        slices = data.all_train.met()
        # A copy is aligned as torch aligns (`predict`).
        images = torch.from_numpy(slices.images).clone()
        shift, targets = profile(network, images, slices.patients, self.batch_size), None
        if slices.dense:
            found = targets_of(torch.from_numpy(slices.targets), slices.patients, self.classes)
            targets = found.share, found.largest, found.pieces
        sent = sent_by(shift, targets)
        members: State = {"members": torch.ones(1, dtype=torch.float64)} if sent else {}
        return {SPREAD.name: sent, MEMBERS.name: members}

    def note(self, server: Memory, result: RoundResult) -> Memory:
        """The server's memory with what two sites or more measured."""
        mean, members = result.reduced.get(SPREAD.name), result.reduced.get(MEMBERS.name)
        if mean is None or members is None or (count := int(members["members"])) < FEWEST:
            return server
        layers = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in moments_of(self.network)))
        return self.slot.write(server, _Noted(Measured.of(layers, mean, count)))

    @override
    def publish(self, server: Memory) -> Added:
        spread = self.slot.read(server).spread
        return Added() if spread is None else Added(files={FILE: spread.to_bytes()})
