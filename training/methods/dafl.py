"""DAFL: Chen et al., Data-Free Learning of Student Networks, ICCV 2019, as a federation of one upload.

Every hospital k uploads its model f_k once. The teacher is the mean of the uploads' logits, D. The server has
no image: a generator G makes some that the teacher is sure of, and a student S learns its answers to them
(Alg. 1; `personalization.dafl` has the loss of G). In every step, with a fresh z,

    x = G(z);   G <- Adam on L_oh + a L_a + b L_ie of D(x);   S <- SGD on KL(D(x) || S(x))

both from the same x. S, the one global model, is published. The paper has one teacher and no federation;
FedBiCross's Table 1 compares with DAFL as it is here. Steps are counted in epochs, after each of which the
run can be resumed, moments of both optimisers included. Beside the two readings of the loss, the published
code has sizes of its own for every set; `recipe: paper` takes those of CIFAR-10 but its epochs, of which it
has 2000 of 120 steps.

Classification only: the generator is judged by classes. By default all f_k begin alike, and S from their
average.

Shared:  f_k with its batch-norm statistics, once; the number of training images; summary statistics of the
         training scans; right answers by class on validation images; once, accuracy on test and validation
         images.
Stays:   images, labels, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from personalization.dafl import Reading, generator_loss
from personalization.fedbicross.distillation import divergence
from personalization.precision import mixed_precision, to_float32
from training.algorithm import State, StepContext
from training.local.networks import state_of
from training.methods.one_student import (
    GeneratorConfig,
    GeneratorStudent,
    descend,
    fallen,
    means,
    moments_of,
    with_moments,
)
from training.methods.registry import register
from training.parts.part import Slot


class DaflConfig(GeneratorConfig):
    """What DAFL takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    generator_steps: int = Field(10, ge=1, description="steps of the generator and the student in an epoch")
    activation_weight: float = Field(0.1, ge=0, description="a, of the features' size")
    entropy_weight: float = Field(5.0, ge=0, description="b, of classes that come alike")
    reading: Reading = Field("paper", description="the printed loss, or the authors' code's")
    temperature: float = Field(1.0, gt=0, description="of the student's loss")
    student_milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (), description="shares of the epochs after which the student's rate falls to a tenth"
    )

    PAPER: ClassVar[Mapping[str, Any]] = {
        "width": 64,
        "local_epochs": 200,
        "milestones": (0.4, 0.8),
        "batch_size": 128,
        "learning_rate": 0.1,
        "epochs": 200,
        "generator_steps": 120,
        "synthesis_batch": 1024,
        "noise_size": 1000,
        "generator_width": 64,
        "generator_rate": 0.02,
        "init": "random",
        "student_rate": 0.1,
        "student_milestones": (0.4, 0.8),
        "domain_randomisation": "none",
    }


@dataclass(frozen=True)
class Stage:
    """What an epoch leaves: G, and the moments of both optimisers."""

    generator: State = field(default_factory=dict)
    generator_moments: State = field(default_factory=dict)
    student_moments: State = field(default_factory=dict)


@register("dafl", DaflConfig, kinds=("classification",))
class Dafl(GeneratorStudent[Stage]):
    """One upload per hospital, and a student of what a generator makes."""

    stage = Slot("stage", Stage())

    def __init__(self, config: DaflConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: DaflConfig = config

    @override
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: Stage
    ) -> tuple[Stage, dict[str, Any]]:
        config, draw = self.config, context.generator("noise")
        generator = self.generator(context, stage.generator).train()
        adam = torch.optim.Adam(generator.parameters(), lr=config.generator_rate)
        with_moments(adam, stage.generator_moments)
        rate = fallen(config.student_rate, config.student_milestones, context)
        sgd = self.sgd(student, rate, stage.student_moments)
        student.train()
        notes = []
        for _ in range(config.generator_steps):
            noise = self.noise(context, draw)
            with mixed_precision(config.precision, context.device):
                images = to_float32(generator(noise))
                loss = generator_loss(
                    members, images, config.activation_weight, config.entropy_weight, config.reading
                )
                answers = student(images.detach())
            descend(loss.total, adam)
            learned = descend(divergence(to_float32(answers), loss.logits, config.temperature), sgd)
            notes.append(torch.stack([loss.one_hot, loss.activation, loss.entropy, learned]).detach())
        left = Stage(state_of(generator), moments_of(adam), moments_of(sgd))
        return left, means(("one_hot", "activation", "entropy", "distillation"), notes)
