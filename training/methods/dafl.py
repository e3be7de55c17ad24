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
from statistics import fmean
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from personalization.dafl import Reading, generator_loss
from personalization.dense import Generator
from personalization.fedbicross.distillation import divergence
from personalization.networks import initialise
from personalization.precision import mixed_precision, to_float32
from training.algorithm import State, StepContext
from training.local.networks import state_of
from training.methods.one_student import OneStudent, OneStudentConfig, fallen, moments_of, with_moments
from training.methods.registry import register
from training.state_tree import join, part

_GENERATOR, _GENERATORS_MOMENTS, _STUDENTS_MOMENTS = "generator", "generator_moments", "student_moments"


class DaflConfig(OneStudentConfig):
    """What DAFL takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    generator_steps: int = Field(10, ge=1, description="steps of the generator and the student in an epoch")
    noise_size: int = Field(256, ge=1, description="values of z")
    generator_width: int = Field(32, ge=1, description="channels of the generator at full resolution")
    generator_rate: float = Field(0.001, gt=0, description="of Adam on the generator")
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


@register("dafl", DaflConfig, kinds=("classification",))
class Dafl(OneStudent):
    """One upload per hospital, and a student of what a generator makes."""

    def __init__(self, config: DaflConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: DaflConfig = config

    @override
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: State
    ) -> tuple[State, dict[str, float]]:
        config, draw = self.config, context.generator("noise")
        generator = Generator(config.noise_size, config.generator_width, self.shape)
        if begun := part(stage, _GENERATOR):
            generator.load_state_dict(begun)
        else:
            initialise(generator, context.generator("generator"))
        generator.to(context.device).train()
        rate = fallen(config.student_rate, config.student_milestones, context)
        adam = with_moments(
            torch.optim.Adam(generator.parameters(), lr=config.generator_rate),
            part(stage, _GENERATORS_MOMENTS),
        )
        sgd = with_moments(
            torch.optim.SGD(
                student.parameters(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
            ),
            part(stage, _STUDENTS_MOMENTS),
        )
        student.train()
        notes = []
        for _ in range(config.generator_steps):
            noise = torch.randn(config.synthesis_batch, config.noise_size, generator=draw).to(context.device)
            adam.zero_grad(set_to_none=True)
            with mixed_precision(config.precision, context.device):
                images = to_float32(generator(noise))
                loss = generator_loss(
                    members, images, config.activation_weight, config.entropy_weight, config.reading
                )
                answers = student(images.detach())
            torch.autograd.backward(loss.total)
            adam.step()
            sgd.zero_grad(set_to_none=True)
            learned = divergence(to_float32(answers), loss.logits, config.temperature)
            torch.autograd.backward(learned)
            sgd.step()
            terms = (loss.one_hot, loss.activation, loss.entropy, learned)
            notes.append(torch.stack([term.detach() for term in terms]))
        names = ("one_hot", "activation", "entropy", "distillation")
        means = [fmean(values) for values in zip(*torch.stack(notes).tolist(), strict=True)]
        left = {
            _GENERATOR: state_of(generator),
            _GENERATORS_MOMENTS: moments_of(adam),
            _STUDENTS_MOMENTS: moments_of(sgd),
        }
        return join(left), dict(zip(names, means, strict=True))
