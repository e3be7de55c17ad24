"""DENSE: Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022.

Every hospital k uploads its model f_k once. The server has no image. In every epoch it trains a generator G
on the ensemble D of the uploads (`personalization.dense` has the loss), and a student S on D's answers to
what G makes (Alg. 1):

    T_G times:                  G <- Adam on CE(D(x), y) + lambda_1 BN(x) + lambda_2 DIV(x), x = G(z)
    for the images x so far:    S <- SGD on KL(D(x) || S(x))

z and y are drawn for each epoch, and D is the mean of the members' logits. S, the one global model, is
published. The printed algorithm trains S on the epoch's own images; the authors' code on those of all epochs.
`pool` says of how many. By default both answers are softened by FedBiCross's temperature, 20; the paper has
none (`temperature: 1`). The code also draws a fresh G in every epoch, moves z with it, crops and flips what D
sees, adds up BN over the members, and leaves S in training mode under G; here G goes on, as printed. Its Adam
for G has betas (0.5, 0.999), here (0.9, 0.999); it pools the images of the step with the least loss, here
those after the last step; and it keeps one SGD optimiser over all epochs, while here both optimisers start
afresh in every epoch.

Classification only: the generator starts from a class. By default all f_k begin alike.

Shared:  f_k with its batch-norm statistics, once; the number of training images; summary statistics of the
         training scans; right answers by class on validation images; once, accuracy on test and validation
         images.
Stays:   images, labels, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from personalization.dense import Generator, ensemble_logits, generator_loss
from personalization.fedbicross.distillation import TEMPERATURE, divergence
from personalization.precision import mixed_precision, to_float32
from training.algorithm import State, StepContext
from training.local.loop import mean_loss
from training.local.networks import state_of
from training.methods.one_student import GeneratorConfig, GeneratorStudent, descend, means
from training.methods.registry import register
from training.parts.part import Slot


class DenseConfig(GeneratorConfig):
    """What DENSE takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    epochs: int = Field(30, ge=1, description="of the generator and the student in turn")
    synthesis_batch: int = Field(64, ge=2, description="images that the generator makes in an epoch")
    bn_weight: float = Field(1.0, ge=0, description="lambda_1")
    boundary_weight: float = Field(0.5, ge=0, description="lambda_2")
    pool: int = Field(10, ge=1, description="epochs of which the student sees the images; 1 is Alg. 1")
    temperature: float = Field(TEMPERATURE, gt=0, description="of the student's loss")

    PAPER: ClassVar[Mapping[str, Any]] = {
        "width": 64,
        "local_epochs": 200,
        "milestones": (),
        "batch_size": 128,
        "weight_decay": 0.0,
        "epochs": 200,
        "generator_steps": 30,
        "synthesis_batch": 128,
        "generator_width": 64,
        "pool": 200,
        "init": "random",
        "temperature": 1.0,
        "domain_randomisation": "none",
    }


@dataclass(frozen=True)
class Stage:
    """What an epoch leaves: G, and the images of the epochs so far with D's logits for them."""

    generator: State = field(default_factory=dict)
    pool: State = field(default_factory=dict)


@register("dense", DenseConfig, kinds=("classification",))
class Dense(GeneratorStudent[Stage]):
    """One upload per hospital, and one student of all of them."""

    stage = Slot("stage", Stage())

    def __init__(self, config: DenseConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: DenseConfig = config

    @override
    def epoch(
        self, context: StepContext, members: Sequence[nn.Module], student: nn.Module, stage: Stage
    ) -> tuple[Stage, dict[str, Any]]:
        generator = self.generator(context, stage.generator)
        images, notes = self._generate(context, generator, members, student)
        newest = {"images": images.cpu(), "logits": ensemble_logits(members, images).cpu()}
        pool = self.pooled(stage.pool, newest, self.config.pool)
        notes["distillation"] = self._distil(context, student, pool)
        return Stage(state_of(generator), pool), notes

    def _generate(
        self, context: StepContext, generator: Generator, members: Sequence[nn.Module], student: nn.Module
    ) -> tuple[Tensor, dict[str, Any]]:
        """T_G steps of the generator; the images after them, and the means of the terms of its loss."""
        config, draw = self.config, context.generator("noise")
        noise, labels = self.noise(context, draw), self.labels(context, draw)
        student.requires_grad_(False)
        adam = torch.optim.Adam(generator.parameters(), lr=config.generator_rate)
        notes = []
        for _ in range(config.generator_steps):
            with mixed_precision(config.precision, context.device):
                images = to_float32(generator.train()(noise))
                loss = generator_loss(
                    members, student, images, labels, config.bn_weight, config.boundary_weight
                )
            descend(loss.total, adam)
            notes.append(torch.stack([loss.cross_entropy, loss.batch_norm, loss.disagreement]).detach())
        student.requires_grad_(True)
        with torch.no_grad():
            return generator(noise), means(("cross_entropy", "batch_norm", "disagreement"), notes)

    def _distil(self, context: StepContext, student: nn.Module, pool: State) -> float:
        """One pass over the pool; the mean loss of its batches."""
        config = self.config
        sgd = torch.optim.SGD(student.parameters(), lr=config.student_rate, momentum=config.momentum)
        student.train()
        order = torch.randperm(len(pool["images"]), generator=context.generator("order"))
        losses = []
        for chosen in torch.split(order, config.synthesis_batch):
            images, answers = (pool[name][chosen].to(context.device) for name in ("images", "logits"))
            with mixed_precision(config.precision, context.device):
                logits = student(images)
            losses.append(descend(divergence(to_float32(logits), answers, config.temperature), sgd))
        return mean_loss(losses)
