"""One-shot methods that make one global model: the server distils a student from the uploads, epoch by epoch.

A method has an `epoch`, and a slot for what an epoch leaves for the next one, the optimisers' moments too, so
that a resumed run has the same bits. After the last epoch the student alone is kept, for its validation at
the sites and its test.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.dense import Generator
from personalization.networks import initialise
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
from training.local.classifier import ClassCounts
from training.local.images import Images
from training.local.networks import network_of, state_of
from training.local.site import SiteData
from training.methods.one_shot import COUNTS, Counted, OneShot, OneShotConfig, Start, check_student
from training.parts.part import Added, Part, Slot
from training.parts.test import Model, Predict, Test, predicting
from training.parts.train import WEIGHTS

Left = TypeVar("Left")


class OneStudentConfig(OneShotConfig):
    """How the server distils. The student's SGD has `momentum` too."""

    epochs: int = Field(30, ge=1, description="of synthesis and distillation in turn")
    synthesis_batch: int = Field(64, ge=2, description="images that are made at once")
    init: Start = Field("average", description="the student's first weights")
    student_rate: float = Field(0.01, gt=0, description="of the student's SGD, with `momentum`")


@dataclass(frozen=True)
class Distilled:
    """The student, and the notes of every epoch."""

    student: State = field(default_factory=dict)
    log: tuple[Mapping[str, Any], ...] = ()


class Distil(Part, Generic[Left]):
    """The epochs at the server, and the validation of the student at the sites."""

    def __init__(self, method: OneStudent[Left]) -> None:
        self.method = method
        self.slot = Slot("distil", Distilled())
        self.counted = Slot("counts", Counted())

    @override
    def plan(self) -> Plan:
        return (
            ServerStage("distil", self.method.config.epochs, self.distil),
            Phase(
                "validate",
                1,
                (WEIGHTS,),
                (COUNTS,),
                self.step,
                self.keep,
                self.send,
                self.method.expect_counts,
                everyone=True,
            ),
        )

    def distil(self, context: StepContext, server: Memory) -> Memory:
        """One epoch; after the last one, the uploads and what epochs left are dropped."""
        method, before = self.method, self.slot.read(server)
        uploads = method.upload.slot.read(server)
        members = [
            network_of(method.network, model, context.device).eval().requires_grad_(False)
            for model in uploads.models.values()
        ]
        begun = before.student or uploads.student(
            method.config.init, method.network, context.generator("student"), uploads.models
        )
        student = network_of(method.network, begun, context.device)
        left, notes = method.epoch(context, members, student, method.stage.read(server))
        check_student("the student", student, "student_rate")
        after = self.slot.write(server, Distilled(state_of(student), (*before.log, notes)))
        if context.round == context.rounds - 1:
            return method.upload.slot.clear(method.stage.clear(after))
        return method.stage.write(after, left)

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """S, to every site the same."""
        return {WEIGHTS.name: self.slot.read(server).student}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Count the student's right answers."""
        student = network_of(self.method.network, received[WEIGHTS.name], context.device)
        counts = ClassCounts.of(student, data.val, self.method.classes)
        return ClientResult(
            {COUNTS.name: counts.state()}, float(len(data.train)), metrics=counts.metrics("val_")
        )

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the right answers."""
        return self.counted.write(server, Counted.of(result))

    @override
    def publish(self, server: Memory) -> Added:
        return Added(self.counted.read(server).metrics())


class OneStudent(OneShot, Generic[Left]):
    """One upload per hospital, and one student of all of them."""

    # What an epoch leaves for the next one.
    stage: Slot[Left]

    def __init__(self, config: OneStudentConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: OneStudentConfig = config
        self.distil = Distil(self)
        self.test = Test(task, self.answers, ("",), (WEIGHTS,), self.distil.send)
        self.parts = (self.upload, self.distil, self.test)

    @abstractmethod
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: Left
    ) -> tuple[Left, dict[str, Any]]:
        """Train the student in place for an epoch.

        `members` are the uploads, in evaluation mode and without gradients. `stage` is what the last epoch
        returned, empty before the first one. Returns what the next one needs, and the means of its losses.
        """

    def sgd(self, student: nn.Module, rate: float, moments: State) -> torch.optim.Optimizer:
        """The student's optimiser, which goes on from these moments."""
        decay, momentum = self.config.weight_decay, self.config.momentum
        sgd = torch.optim.SGD(student.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
        return with_moments(sgd, moments)

    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The model that a site tests: S."""
        student = network_of(self.network, received[WEIGHTS.name], context.device)
        return {"": predicting(student, self.config.batch_size)}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """S."""
        student = self.distil.slot.read(server).student
        return Publication("model", (ModelDraft("global", self.network, student, metrics=metrics),))


class GeneratorConfig(OneStudentConfig):
    """The generator of a method that has one."""

    generator_steps: int = Field(10, ge=1, description="T_G, steps of the generator in an epoch")
    noise_size: int = Field(256, ge=1, description="values of z")
    generator_width: int = Field(32, ge=1, description="channels of the generator at full resolution")
    generator_rate: float = Field(0.001, gt=0, description="of Adam on the generator")


class GeneratorStudent(OneStudent[Left]):
    """The student learns from what a generator makes."""

    def __init__(self, config: GeneratorConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: GeneratorConfig = config

    def generator(self, context: StepContext, state: State) -> Generator:
        """G with this state; without one, drawn."""
        generator = Generator(self.config.noise_size, self.config.generator_width, self.shape)
        if state:
            generator.load_state_dict(state)
        else:
            initialise(generator, context.generator("generator"))
        return generator.to(context.device)

    def noise(self, context: StepContext, draw: torch.Generator) -> Tensor:
        """A batch of z."""
        return torch.randn(self.config.synthesis_batch, self.config.noise_size, generator=draw).to(
            context.device
        )

    def labels(self, context: StepContext, draw: torch.Generator) -> Tensor:
        """A class y for each z of a batch."""
        return torch.randint(self.classes, (self.config.synthesis_batch,), generator=draw).to(context.device)

    def pooled(self, before: State, newest: State, epochs: int) -> State:
        """What an epoch made, after what the earlier ones did, of so many `epochs` in all."""
        most = (epochs - 1) * self.config.synthesis_batch
        if not before or not most:
            return newest
        return {name: torch.cat([before[name][-most:], tensor]) for name, tensor in newest.items()}


def descend(loss: Tensor, optimiser: torch.optim.Optimizer) -> Tensor:
    """One step down a loss; returns it without its graph."""
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    optimiser.step()
    return loss.detach()


def means(names: Sequence[str], notes: Sequence[Tensor]) -> dict[str, Any]:
    """The mean over the steps of every term of a loss: `notes` are one tensor of all terms for each step."""
    columns = zip(*torch.stack(list(notes)).tolist(), strict=True)
    return dict(zip(names, map(fmean, columns), strict=True))


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
