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

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from personalization.dense import Generator, ensemble_logits, generator_loss
from personalization.fedbicross.distillation import TEMPERATURE, divergence
from personalization.networks import initialise
from personalization.precision import mixed_precision, to_float32
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
from training.data.classification import LabelledData
from training.methods.common.classifier_training import ClassCounts, counts_from
from training.methods.common.data_statistics import described
from training.methods.common.local_training import network_of, state_of
from training.methods.common.one_shot import (
    COUNTS,
    OneShot,
    OneShotConfig,
    Start,
    check_student,
    first_student,
    uploaded,
)
from training.methods.common.state_tree import join, part
from training.methods.common.tested import predicting, score_once, scored_metrics, scoring_phase
from training.methods.fedavg import WEIGHTS
from training.methods.registry import register

_GENERATOR, _STUDENT, _POOL = "stage/generator", "stage/student", "stage/pool"


class DenseConfig(OneShotConfig):
    """What DENSE takes. The defaults suit a laptop; `recipe: paper` has the paper's sizes."""

    epochs: int = Field(30, ge=1, description="of the generator and the student in turn")
    generator_steps: int = Field(10, ge=1, description="T_G, steps of the generator in an epoch")
    synthesis_batch: int = Field(64, ge=2, description="images that the generator makes in an epoch")
    noise_size: int = Field(256, ge=1, description="values of z")
    generator_width: int = Field(32, ge=1, description="channels of the generator at full resolution")
    generator_rate: float = Field(0.001, gt=0, description="of Adam on the generator")
    bn_weight: float = Field(1.0, ge=0, description="lambda_1")
    boundary_weight: float = Field(0.5, ge=0, description="lambda_2")
    pool: int = Field(10, ge=1, description="epochs of which the student sees the images; 1 is Alg. 1")
    init: Start = Field("average", description="the student's first weights")
    student_rate: float = Field(0.01, gt=0, description="of the student's SGD, with `momentum`")
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


@register("dense", DenseConfig, kinds=("classification",))
class Dense(OneShot):
    """One upload per hospital, and one student of all of them."""

    def __init__(self, config: DenseConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: DenseConfig = config

    @override
    def plan(self) -> Plan:
        """Train and upload; generate and distil; validate and test the student at the hospitals."""
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
        return {WEIGHTS.name: part(server.tensors, _STUDENT)}

    def upload(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: LabelledData
    ) -> ClientResult:
        """Train once. The hospital does not need its model again."""
        return replace(self.train_once(context, received, memory, data), memory=None)

    def count_right(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: LabelledData
    ) -> ClientResult:
        """Count the student's right answers."""
        student = network_of(self.network, received[WEIGHTS.name], context.device)
        counts = ClassCounts.of(student, data.val, self.classes)
        return ClientResult(
            {COUNTS.name: counts.state()}, float(len(data.train)), metrics=counts.metrics("val_")
        )

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: LabelledData
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
        """One epoch; after the last one, the uploads, the generator and the images are dropped."""
        config = self.config
        members = [network_of(self.network, state, context.device) for state in uploaded(server).values()]
        for member in members:
            member.eval().requires_grad_(False)
        begun = part(server.tensors, _STUDENT) or self._first(context, server)
        student = network_of(self.network, begun, context.device)
        generator = self._generator(context, part(server.tensors, _GENERATOR))
        images, notes = self._generate(context, generator, members, student)
        pool = part(server.tensors, _POOL)
        kept = {name: tensor[-(config.pool - 1) * config.synthesis_batch :] for name, tensor in pool.items()}
        newest = {"images": images.cpu(), "logits": ensemble_logits(members, images).cpu()}
        if kept and config.pool > 1:
            newest = {name: torch.cat([kept[name], tensor]) for name, tensor in newest.items()}
        notes["distillation"] = self._distil(context, student, newest)
        check_student("the student", student, "student_rate")
        facts = {**server.facts, "log": [*server.facts.get("log", ()), notes]}
        after = {_STUDENT: state_of(student)}
        if context.round == context.rounds - 1:
            return Memory(join(after), facts)
        models = {name: t for name, t in server.tensors.items() if name.startswith("model/")}
        stage = {**after, _GENERATOR: state_of(generator), _POOL: newest}
        return Memory({**models, **join(stage)}, facts)

    def _first(self, context: StepContext, server: Memory) -> State:
        models = list(uploaded(server).values())
        sizes = list(server.facts["sites"].values())
        return first_student(self.config.init, self.network, models, sizes, context.generator("student"))

    def _generator(self, context: StepContext, state: State) -> Generator:
        """The generator of the last epoch, or a drawn one."""
        config = self.config
        generator = Generator(config.noise_size, config.generator_width, self.shape)
        if state:
            generator.load_state_dict(state)
        else:
            initialise(generator, context.generator("generator"))
        return generator.to(context.device)

    def _generate(
        self, context: StepContext, generator: Generator, members: list[nn.Module], student: nn.Module
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """T_G steps of the generator; the images after them, and the means of the terms of its loss."""
        config, draw = self.config, context.generator("noise")
        noise = torch.randn(config.synthesis_batch, config.noise_size, generator=draw).to(context.device)
        labels = torch.randint(self.classes, (config.synthesis_batch,), generator=draw).to(context.device)
        student.requires_grad_(False)
        optimiser = torch.optim.Adam(generator.parameters(), lr=config.generator_rate)
        notes = []
        for _ in range(config.generator_steps):
            optimiser.zero_grad(set_to_none=True)
            with mixed_precision(config.precision, context.device):
                images = to_float32(generator.train()(noise))
                loss = generator_loss(
                    members, student, images, labels, config.bn_weight, config.boundary_weight
                )
            torch.autograd.backward(loss.total)
            optimiser.step()
            notes.append([loss.cross_entropy.item(), loss.batch_norm.item(), loss.disagreement.item()])
        student.requires_grad_(True)
        means = [fmean(values) for values in zip(*notes, strict=True)]
        names = ("cross_entropy", "batch_norm", "disagreement")
        with torch.no_grad():
            return generator(noise), dict(zip(names, means, strict=True))

    def _distil(self, context: StepContext, student: nn.Module, pool: State) -> float:
        """One pass over the pool; the mean loss of its batches."""
        config = self.config
        optimiser = torch.optim.SGD(student.parameters(), lr=config.student_rate, momentum=config.momentum)
        student.train()
        order = torch.randperm(len(pool["images"]), generator=context.generator("order"))
        losses = []
        for chosen in torch.split(order, config.synthesis_batch):
            images, answers = (pool[name][chosen].to(context.device) for name in ("images", "logits"))
            optimiser.zero_grad(set_to_none=True)
            with mixed_precision(config.precision, context.device):
                logits = student(images)
            loss = divergence(to_float32(logits), answers, config.temperature)
            torch.autograd.backward(loss)
            optimiser.step()
            losses.append(loss.item())
        return fmean(losses)

    @override
    def publication(self, server: Memory) -> Publication:
        counts = server.facts.get("counts")
        metrics = counts_from(counts).metrics("val_") if counts else {}
        metrics |= scored_metrics(server.facts, self.task)
        weights = part(server.tensors, _STUDENT)
        draft = ModelDraft("global", self.network, weights, metrics=metrics)
        return Publication("model", (draft,), statistics=described(server.facts))
