"""The gate judged: its verdict on every candidate that routing made, and on bad ones planted for it.

A candidate is a merged network, which is what would be served. Its parent is the global model with the
statistics of training. The gate sees the scans that the candidate was made from and no label; the true change
in Dice is taken on scans of the hospital, and is for the table alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.outside.arms import Models, Turn
from benchmarks.harness.evaluation import Scans, mean_dice, predict
from benchmarks.harness.scores import pair
from model_store.guard import ReferenceStatistics, check
from model_store.task import Task
from personalization.gate import ROUTING, Observed, consensus, judge, shift_of_statistics
from personalization.iop_fl.space import GLOBAL


@dataclass(frozen=True)
class Judge:
    """What the gate needs beside a candidate and its replicas."""

    models: Models
    statistics: ReferenceStatistics | None
    task: Task

    def verdict(self, candidate: nn.Module, replicas: Sequence[nn.Module], learned: Scans) -> dict[str, Any]:
        """The gate's verdict, as a service would store it, over the scans the candidate was made from."""
        observed = Observed(
            _masks(candidate, learned),
            _masks(self.models.network(), learned),
            [_masks(replica, learned) for replica in replicas],
            torch.tensor(learned.patient_index),
            learned.classes,
            self._warned(learned),
            shift_of_statistics(self.models.states[GLOBAL], candidate, learned.images),
            references=consensus(self.models.space(), learned.images),
        )
        return judge(ROUTING, observed).to_json()

    def record(
        self, kind: str, candidate: nn.Module, replicas: Sequence[nn.Module], turn: Turn
    ) -> dict[str, Any]:
        """A line of the gate's table: what it said, and what was true."""
        reported = turn.reported
        after = reported.dice(predict(candidate, reported.images))
        before = reported.dice(predict(self.models.network(), reported.images))
        pairs = {patient: pair(before[patient], after[patient]) for patient in after}
        change = {patient: second - first for patient, (first, second) in pairs.items()}
        return {
            "candidate": kind,
            "verdict": self.verdict(candidate, replicas, turn.learned),
            "dice": _number(mean_dice(after)),
            "parent_dice": _number(mean_dice(before)),
            "change": _number(mean_dice(change)),
        }

    def _warned(self, scans: Scans) -> float:
        """Share of the scans on which the guard has a warning."""
        found = [bool(check(scan.summary, self.statistics, self.task)) for scan in scans.scans]
        return sum(found) / len(found)


def shuffled(network: nn.Module, generator: torch.Generator, only: str = "") -> nn.Module:
    """A copy with the weights of its convolutions, or of one of them, in random order."""
    changed = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if parameter.ndim == 4 and name.startswith(only):
                order = torch.randperm(parameter.numel(), generator=generator)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return changed


def _masks(network: nn.Module, scans: Scans) -> Tensor:
    return predict(network, scans.images).argmax(dim=1)


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
