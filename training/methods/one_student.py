"""One-shot methods that make one global model: the server distils a student from the uploads, epoch by epoch.

A method has an `epoch`. The phases around it are here: the one upload, the student's validation at the sites,
and its test. What an epoch leaves for the next one is in the server's memory as `stage/...`, the optimisers'
moments too, so that a resumed run has the same bits. After the last epoch the student alone is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import (
    ClientResult,
    Memory,
    ModelDraft,
    Phase,
    Plan,
    Publication,
    RoundResult,
    ServerStage,
    State,
    StepContext,
)
from training.local.classifier import ClassCounts, counts_from
from training.local.images import Images
from training.local.networks import network_of, state_of
from training.local.site import SiteData
from training.methods.fedavg import WEIGHTS
from training.methods.one_shot import (
    COUNTS,
    OneShot,
    OneShotConfig,
    Start,
    check_student,
    first_student,
    uploaded,
)
from training.parts.describe import described
from training.parts.test import predicting, score_once, scored_metrics, scoring_phase
from training.state_tree import join, part

_STAGE, _STUDENT = "stage", "student"


class OneStudentConfig(OneShotConfig):
    """How the server distils. The student's SGD has `momentum` too."""

    epochs: int = Field(30, ge=1, description="of synthesis and distillation in turn")
    synthesis_batch: int = Field(64, ge=2, description="images that are made at once")
    init: Start = Field("average", description="the student's first weights")
    student_rate: float = Field(0.01, gt=0, description="of the student's SGD, with `momentum`")


class OneStudent(OneShot):
    """One upload per hospital, and one student of all of them."""

    def __init__(self, config: OneStudentConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: OneStudentConfig = config

    @abstractmethod
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: State
    ) -> tuple[State, dict[str, Any]]:
        """Train the student in place for an epoch.

        `members` are the uploads, in evaluation mode and without gradients. `stage` is what the last epoch
        returned, empty before the first one. Returns what the next one needs, and the means of its losses.
        """

    @override
    def plan(self) -> Plan:
        """Train and upload; distil; validate and test the student at the hospitals."""
        return (
            replace(self.local_phase(), client_step=self.upload),
            ServerStage("distil", self.config.epochs, self.distil),
            Phase(
                "validate",
                1,
                (WEIGHTS,),
                (COUNTS,),
                self.count_right,
                self.add_counts,
                self.send_student,
                self.expect_counts,
                everyone=True,
            ),
            scoring_phase(self.task, (WEIGHTS,), self.score_step, self.send_student),
        )

    def send_student(self, server: Memory, site: str) -> Mapping[str, State]:
        """S, to every site the same."""
        return {WEIGHTS.name: part(server.tensors, f"{_STAGE}/{_STUDENT}")}

    def upload(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Train once. The hospital does not need its model again."""
        return replace(self.train_once(context, received, memory, data), memory=None)

    def count_right(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Count the student's right answers."""
        student = network_of(self.network, received[WEIGHTS.name], context.device)
        counts = ClassCounts.of(student, data.val, self.classes)
        return ClientResult(
            {COUNTS.name: counts.state()}, float(len(data.train)), metrics=counts.metrics("val_")
        )

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Score the student on the test images."""
        student = network_of(self.network, received[WEIGHTS.name], context.device)
        return score_once({"": predicting(student, self.config.batch_size)}, data, self.task)

    def add_counts(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Add up the right answers."""
        found = [ClassCounts(**state) for state in result.collected.get(COUNTS.name, {}).values()]
        if not found:
            return server
        total = sum(found[1:], found[0])
        facts = {**server.facts, "counts": [total.right.tolist(), total.images.tolist()]}
        return Memory(server.tensors, facts)

    def distil(self, context: StepContext, server: Memory) -> Memory:
        """One epoch; after the last one, the uploads and what epochs left are dropped."""
        members = [network_of(self.network, state, context.device) for state in uploaded(server).values()]
        for member in members:
            member.eval().requires_grad_(False)
        stage = part(server.tensors, _STAGE)
        begun = part(stage, _STUDENT) or self._first(context, server)
        student = network_of(self.network, begun, context.device)
        left, notes = self.epoch(context, members, student, stage)
        check_student("the student", student, "student_rate")
        facts = {**server.facts, "log": [*server.facts.get("log", ()), notes]}
        after = join({_STUDENT: state_of(student)})
        if context.round == context.rounds - 1:
            return Memory(join({_STAGE: after}), facts)
        models = {name: t for name, t in server.tensors.items() if name.startswith("model/")}
        return Memory({**models, **join({_STAGE: {**after, **left}})}, facts)

    def _first(self, context: StepContext, server: Memory) -> State:
        models = list(uploaded(server).values())
        sizes = list(server.facts["sites"].values())
        return first_student(self.config.init, self.network, models, sizes, context.generator("student"))

    @override
    def publication(self, server: Memory) -> Publication:
        counts = server.facts.get("counts")
        metrics = counts_from(counts).metrics("val_") if counts else {}
        metrics |= scored_metrics(server.facts, self.task)
        weights = part(server.tensors, f"{_STAGE}/{_STUDENT}")
        draft = ModelDraft("global", self.network, weights, metrics=metrics)
        return Publication("model", (draft,), statistics=described(server.facts))


def moments_of(optimiser: torch.optim.Optimizer) -> State:
    """An optimiser's moments on the CPU, as `PARAMETER/NAME`."""
    return {
        f"{index}/{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for index, moments in optimiser.state_dict()["state"].items()
        for name, tensor in moments.items()
        if isinstance(tensor, torch.Tensor)
    }


def with_moments(optimiser: torch.optim.Optimizer, moments: State) -> torch.optim.Optimizer:
    """The optimiser, with the moments that `moments_of` returned; of none, as it is."""
    if moments:
        found: dict[int, State] = {}
        for key, tensor in moments.items():
            index, name = key.split("/")
            # A copy, because steps change the moments in place.
            found.setdefault(int(index), {})[name] = tensor.clone()
        optimiser.load_state_dict({**optimiser.state_dict(), "state": found})
    return optimiser


def fallen(rate: float, milestones: Sequence[float], context: StepContext) -> float:
    """The rate of this epoch: a tenth after each of the `milestones`, shares of the epochs."""
    passed = sum(context.round >= round(share * context.rounds) for share in milestones)
    return float(rate * 0.1**passed)
