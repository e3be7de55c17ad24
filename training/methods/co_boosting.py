"""Co-Boosting: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting,
ICLR 2024.

Every hospital k uploads its model f_k once. The server has no image. In every epoch it trains a fresh
generator G on a weighted ensemble of the uploads, improves the ensemble's weights w on the images so far, and
trains a student S on the ensemble's answers to them (Alg. 1; equations in `personalization.co_boosting`):

    T_G times:                  G <- Adam on L_G, x = G(z): images that the ensemble is not sure of, and of
                                which S answers otherwise
    for the images x so far:    w <- one signed step on CE(A_w(x), y), of size mu 0.99^epoch
    for the images x so far:    x moved by one signed step;   S <- SGD on KL(A_w(x) || S(x))

z and y are drawn for each epoch. S, the one global model, is published; w is in the server's log. `pool` says
of how many epochs the images are; the paper's are all. The student's moments go on over the epochs.

`reading: code` is the authors' code (rong-dai/Co-Boosting at b95d715) where it differs: A_w is divided by the
sum of w, and w is fitted to the images of earlier epochs alone, from the second one on. The code also moves
z with G, clips gradients to the norm 10, pools the images of the step with the least loss, crops and flips
them, lets the student's rate fall by a cosine, and draws G from a normal distribution of its own; here G is
PyTorch's default draw, the images are those after the last step, and the rate is constant. It moves images in
units of their standard deviation, as here. Its generator ends in a sigmoid (`personalization.dense`).

Classification only: the generator starts from a class. By default all f_k begin alike, and S from their
average.

Shared:  f_k with its batch-norm statistics, once; the number of training images; summary statistics of the
         training scans; right answers by class on validation images; once, accuracy on test and validation
         images.
Stays:   images, labels, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.co_boosting import (
    TEMPERATURE,
    boosted,
    diversified,
    generator_loss,
    members_logits,
    weighted,
)
from personalization.fedbicross.distillation import divergence
from personalization.precision import mixed_precision, to_float32
from training.algorithm import State, StepContext
from training.local.loop import mean_loss
from training.methods.one_student import GeneratorConfig, GeneratorStudent, descend, moments_of
from training.methods.registry import register
from training.parts.part import Slot


class CoBoostingConfig(GeneratorConfig):
    """What Co-Boosting takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    adversarial_weight: float = Field(1.0, ge=0, description="b, of the disagreement with the student")
    ensemble_rate: float = Field(0.01, ge=0, description="mu, of the steps of w; 0 keeps the plain mean")
    ensemble_decay: float = Field(0.99, gt=0, le=1, description="factor of mu per epoch")
    image_step: float = Field(
        8 / 255, ge=0, description="e, by which each pixel is moved before the student sees an image"
    )
    pool: int = Field(10, ge=1, description="epochs of which w and the student see the images")
    temperature: float = Field(TEMPERATURE, gt=0, description="of the student's loss")
    reading: Literal["paper", "code"] = Field(
        "paper", description="the printed ensemble, or the authors' code's"
    )

    PAPER: ClassVar[Mapping[str, Any]] = {
        "width": 64,
        "local_epochs": 100,
        "milestones": (),
        "batch_size": 128,
        "weight_decay": 1e-4,
        "epochs": 200,
        "generator_steps": 30,
        "synthesis_batch": 128,
        "generator_width": 64,
        "pool": 200,
        "init": "random",
        "domain_randomisation": "none",
    }


@dataclass(frozen=True)
class Stage:
    """What an epoch leaves: w, equal where it is empty; the images so far with their classes and the members'
    logits for them; the moments of the student's optimiser."""

    w: tuple[float, ...] = ()
    pool: State = field(default_factory=dict)
    moments: State = field(default_factory=dict)


@register("co-boosting", CoBoostingConfig, kinds=("classification",))
class CoBoosting(GeneratorStudent[Stage]):
    """One upload per hospital, and a student of an ensemble that improves with its images."""

    stage = Slot("stage", Stage())

    def __init__(self, config: CoBoostingConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: CoBoostingConfig = config

    @property
    def _normalised(self) -> bool:
        return self.config.reading == "code"

    @override
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: Stage
    ) -> tuple[Stage, dict[str, Any]]:
        count = len(members)
        w = torch.tensor(stage.w or (1 / count,) * count, dtype=torch.float64)
        newest, loss = self._generate(context, members, student, w)
        pool = self.pooled(stage.pool, newest, self.config.pool)
        w = self._boost(context, w, stage.pool if self.config.reading == "code" else pool)
        sgd = self.sgd(student, self.config.student_rate, stage.moments)
        learned = self._distil(context, members, student, pool, w, sgd)
        notes = {"generator": loss, "distillation": learned, "ensemble": w.tolist()}
        return Stage(tuple(w.tolist()), pool, moments_of(sgd)), notes

    def _generate(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, w: Tensor
    ) -> tuple[State, float]:
        """T_G steps of a fresh generator: its images with their classes and the members' logits for them, and
        the mean of its loss."""
        config, draw = self.config, context.generator("noise")
        generator = self.generator(context, {})
        noise, labels = self.noise(context, draw), self.labels(context, draw)
        student.eval().requires_grad_(False)
        adam = torch.optim.Adam(generator.parameters(), lr=config.generator_rate, betas=(0.5, 0.999))
        losses = []
        for _ in range(config.generator_steps):
            with mixed_precision(config.precision, context.device):
                images = to_float32(generator(noise))
                ensemble = weighted(members_logits(members, images), w, self._normalised)
                answers = to_float32(student(images))
            loss = generator_loss(ensemble, answers, labels, config.adversarial_weight)
            losses.append(descend(loss, adam))
        student.requires_grad_(True)
        with torch.no_grad():
            images = generator(noise)
            found = {"images": images, "labels": labels, "logits": members_logits(members, images)}
        return {name: tensor.cpu() for name, tensor in found.items()}, mean_loss(losses)

    def _boost(self, context: StepContext, w: Tensor, pool: State) -> Tensor:
        """One pass of w over the images of the pool, if there are any."""
        if not pool:
            return w
        rate = self.config.ensemble_rate * self.config.ensemble_decay**context.round
        order = torch.randperm(len(pool["labels"]), generator=context.generator("ensemble"))
        for chosen in torch.split(order, self.config.synthesis_batch):
            w = boosted(w, pool["logits"][chosen], pool["labels"][chosen], rate, self._normalised)
        return w

    def _distil(
        self,
        context: StepContext,
        members: Sequence[nn.Module],
        student: nn.Module,
        pool: State,
        w: Tensor,
        sgd: torch.optim.Optimizer,
    ) -> float:
        """One pass of the student over the pool; the mean loss of its batches."""
        config, draw = self.config, context.generator("directions")
        student.train()
        losses = []
        order = torch.randperm(len(pool["labels"]), generator=context.generator("order"))
        for chosen in torch.split(order, config.synthesis_batch):
            images = pool["images"][chosen].to(context.device)
            directions = (2 * torch.rand(len(chosen), self.classes, generator=draw) - 1).to(context.device)
            with mixed_precision(config.precision, context.device):
                images = diversified(members, images, w, directions, config.image_step, self._normalised)
                with torch.no_grad():
                    taught = weighted(members_logits(members, images), w, self._normalised)
                answers = student(images)
            losses.append(descend(divergence(to_float32(answers), taught, config.temperature), sgd))
        return mean_loss(losses)
