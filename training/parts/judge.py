"""The comparison of a version with the one that it started from, on the members' validation patients.

Both are scored at the sites, patient by patient; the sums of a site leave it. Nothing is chosen by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from model_store.task import Task
from personalization.metrics import metrics_of
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
from training.local.data import Data
from training.local.site import SiteData
from training.paired import PairedSums
from training.parts.own import ChooseOwn
from training.parts.part import Added, Part, Slot
from training.parts.test import Predict
from training.parts.train import WEIGHTS, Train

JUDGE = "judge"
PARENT = Group("parent", "weights")
# An upload: number, sums of the parent's and the version's scores, of their difference and its square.
_ROWS = 5


def check_judged(state: State, size: SiteSize) -> None:
    """Raise ValueError for sums that scores in 0..1 of so many patients or images cannot have."""
    sums = state["sums"]
    if sums.shape != (_ROWS,) or sums.dtype != torch.float64:
        raise ValueError(
            f"expected sums of shape [{_ROWS}] and float64, found {list(sums.shape)} {sums.dtype}"
        )
    PairedSums(*sums.tolist()).check(size.scored)


JUDGED = Group("judged", "statistics", "collect", essential=False, check=check_judged)


def judge_once(parent: Predict, version: Predict | None, data: SiteData, classes: int) -> ClientResult:
    """A site's part: nothing where it has no version, or no patients that are not trained on."""
    if version is None or data.val is data.all_train or not len(data.val):
        return ClientResult({JUDGED.name: {}}, 1.0)
    before, after = (_scores(answer, data.val, classes) for answer in (parent, version))
    sums = torch.tensor(PairedSums.of(before, after).row, dtype=torch.float64)
    return ClientResult({JUDGED.name: {"sums": sums}}, 1.0)


@dataclass(frozen=True)
class Judged:
    """The sums of the sites that let them out."""

    sums: Mapping[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, result: RoundResult) -> Judged:
        """What a round says, of which `judge_once` made the uploads."""
        sent = result.collected.get(JUDGED.name, {})
        return cls({site: state["sums"].tolist() for site, state in sent.items() if state})

    def facts(self, task: Task, parent: str | None) -> dict[str, Any]:
        """For a publication's details: the change against the parent at each site and of all patients
        together.

        `low` and `high` bound the mean change with 95 % certainty (Student's t over patients, or over images
        of a classification); None for fewer than two. Empty where nothing was judged.
        """
        if not self.sums:
            return {}
        sums = {site: PairedSums(*row) for site, row in self.sums.items()}
        return {
            JUDGED.name: {
                "parent": parent,
                "metric": metrics_of(task.kind)[0].name,
                "sites": {site: _change(found) for site, found in sums.items()},
                "all": _change(PairedSums.together(sums.values())),
            }
        }


class Judge(Part):
    """One phase of a run that started from a version which answers by itself; none of another run.

    The selected model is compared or, with `own`, each site's own one.
    """

    def __init__(self, train: Train, own: ChooseOwn | None = None) -> None:
        self.train = train
        self.own = own
        self.config = train.learner.config
        self.slot = Slot(JUDGE, Judged())

    @override
    def plan(self) -> Plan:
        if not self.config.is_judged:
            return ()
        downloads = (PARENT,) if self.own else (WEIGHTS, PARENT)
        return (Phase(JUDGE, 1, downloads, (JUDGED,), self.step, self.keep, self.send, everyone=True),)

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """The weights that the run started from, and the selected ones; to every site the same."""
        parent = {PARENT.name: self.config.start_state()}
        return parent if self.own else {**self.train.send_selected(server, site), **parent}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score both models on the validation patients."""
        parent = self.train.answers(context, received[PARENT.name])
        if self.own:
            version = self.own.answers(context, memory)
        else:
            version = self.train.answers(context, received[WEIGHTS.name])
        return judge_once(parent, version, data, len(self.train.learner.task.classes))

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the sums."""
        return self.slot.write(server, Judged.of(result))

    @override
    def publish(self, server: Memory) -> Added:
        return Added(details=self.slot.read(server).facts(self.train.learner.task, self.config.start))


def _change(sums: PairedSums) -> dict[str, Any]:
    found = sums.paired()
    return {
        "count": found.count if found else 0,
        "parent": found.before if found else None,
        "version": found.after if found else None,
        "change": found.change if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
    }


@torch.no_grad()
def _scores(answer: Predict, data: Data, classes: int) -> list[float]:
    """Dice of every patient, NaN without target and prediction; of images with classes, 1 where right."""
    return list(data.scores(answer(data), classes).values())
