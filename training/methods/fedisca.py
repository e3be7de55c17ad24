"""FedISCA: Kang et al., One-shot Federated Learning on Medical Data using Knowledge Distillation with Image
Synthesis and Client Model Adaptation, MICCAI 2023.

Every hospital k uploads its model f_k once. F is the mean of the uploads' logits. The server has no image. In
every epoch it turns noise into images that F recognises, as FedBiCross does, of which this is the parent
(`personalization.fedbicross.inversion`), and keeps the images of every step (Section 2):

    T steps:                x <- Adam on CE(F(x), y) + a TV(x) + b BN(x), x rolled by up to 2 pixels

F~ is F with batch norm that is adapted to noise: its running statistics follow the trajectory, from images
back to noise and then forth again, while a student S learns from the noise on:

    t = T .. 1:             F~ adapts to x_t
    t = 1 .. T:             F~ adapts to x_t;   alpha = (t - 1) / T
                            S <- SGD on alpha KL(F(x_t) || S(x_t)) + (1 - alpha) KL(F~(x_t) || S(x_t))

S, the one global model, is published. FedBiCross learns while the images are made, and needs no more memory
than one batch; here those of all steps are kept for an epoch: T times `synthesis_batch` images.

`reading: code` is the authors' code (myeongkyunkang/FedISCA at c6c737e): F~ answers with the statistics of
the batch, which its running ones do not change. The code goes on with one F~ over all epochs; here it starts
from F in each, which after T steps back and forth differs by 0.9 to the power of 2 T. Its student starts at
random (`recipe: paper`), and the epoch is chosen by test images; here the last one is published.

Classification only: the synthesis starts from a class. By default all f_k begin alike, and S from their
average.

Shared:  f_k with its batch-norm statistics, once; the number of training images; summary statistics of the
         training scans; right answers by class on validation images; once, accuracy on test and validation
         images.
Stays:   images, labels, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.fedbicross.distillation import TEMPERATURE, distillation_loss
from personalization.fedbicross.inversion import InversionWeights, balanced_labels, inversion_loss, jitter
from personalization.fedbicross.teachers import Teacher
from personalization.precision import mixed_precision, to_float32
from training.algorithm import State, StepContext
from training.errors import ConfigurationError
from training.local.loop import mean_loss
from training.methods.one_student import OneStudent, OneStudentConfig, descend, fallen, means, moments_of
from training.methods.registry import register
from training.parts.part import Slot


class FedIscaConfig(OneStudentConfig):
    """What FedISCA takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    epochs: int = Field(2, ge=1, description="trajectories from fresh noise, one after the other")
    steps: int = Field(50, ge=1, description="T, steps of one trajectory, of which all images are kept")
    image_rate: float = Field(0.05, gt=0, description="of Adam on the images")
    tv_weight: float = Field(2.5e-5, ge=0, description="a")
    bn_weight: float = Field(10.0, ge=0, description="b")
    bn_per_member: bool = Field(True, description="divide the batch-norm term by the number of uploads")
    jitter: bool = Field(True, description="roll the images by up to 2 pixels each step")
    temperature: float = Field(TEMPERATURE, gt=0, description="of the student's loss")
    reading: Literal["paper", "code"] = Field(
        "paper", description="F~ answers with its running statistics, or, as the code's, with the batch's"
    )
    student_milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.5, 0.75), description="shares of the epochs after which the student's rate falls to a tenth"
    )

    PAPER: ClassVar[Mapping[str, Any]] = {
        "width": 64,
        "local_epochs": 100,
        "learning_rate": 0.001,
        "batch_size": 128,
        "epochs": 100,
        "steps": 500,
        "synthesis_batch": 256,
        "bn_per_member": False,
        "init": "random",
        "student_rate": 0.001,
        "domain_randomisation": "none",
    }


@dataclass(frozen=True)
class Stage:
    """What an epoch leaves: the moments of the student's optimiser."""

    moments: State = field(default_factory=dict)


@register("fedisca", FedIscaConfig, kinds=("classification",))
class FedIsca(OneStudent[Stage]):
    """One upload per hospital, and a student of trajectories from noise to images.

    Raises ConfigurationError for a `synthesis_batch` in which not every class of the task has an image.
    """

    stage = Slot("stage", Stage())

    def __init__(self, config: FedIscaConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedIscaConfig = config
        if config.synthesis_batch < self.classes:
            raise ConfigurationError(
                f"method fedisca does not fit the task '{task.name}'",
                [
                    f"synthesis_batch: expected at least {self.classes}, one image for each class, found "
                    f"{config.synthesis_batch}: of some classes none would be made; raise it"
                ],
            )

    @override
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: Stage
    ) -> tuple[Stage, dict[str, Any]]:
        config = self.config
        trajectory, notes = self._trajectory(context, members)
        teacher = Teacher(members, of_batch=config.reading == "code")
        for images in reversed(trajectory):
            teacher.adapt(images.to(context.device))
        rate = fallen(config.student_rate, config.student_milestones, context)
        sgd = self.sgd(student, rate, stage.moments)
        student.train()
        losses = []
        for done, kept in enumerate(trajectory):
            images = kept.to(context.device)
            teacher.adapt(images)
            with mixed_precision(config.precision, context.device):
                plain, adapted = teacher.logits(images)
                answers = student(images)
            share = 1 - done / len(trajectory)
            loss = distillation_loss(to_float32(answers), plain, adapted, share, config.temperature)
            losses.append(descend(loss, sgd))
        notes["distillation"] = mean_loss(losses)
        return Stage(moments_of(sgd)), notes

    def _trajectory(
        self, context: StepContext, members: Sequence[nn.Module]
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """The images [B, C, H, W] after each step, on the CPU, and the means of the terms of their loss."""
        config, draw = self.config, context.generator("noise")
        images = torch.randn(config.synthesis_batch, *self.shape, generator=draw)
        images = images.to(context.device).requires_grad_()
        labels = balanced_labels(len(images), self.classes).to(context.device)
        weights = InversionWeights(config.tv_weight, config.bn_weight, config.bn_per_member)
        adam = torch.optim.Adam([images], lr=config.image_rate)
        kept, notes = [], []
        for _ in range(config.steps):
            seen = jitter(images, draw) if config.jitter else images
            with mixed_precision(config.precision, context.device):
                loss = inversion_loss(members, seen, labels, weights)
            descend(loss.total, adam)
            kept.append(images.detach().cpu().clone())
            notes.append(torch.stack([loss.cross_entropy, loss.total_variation, loss.batch_norm]).detach())
        return kept, means(("cross_entropy", "total_variation", "batch_norm"), notes)
