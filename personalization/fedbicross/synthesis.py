"""Stage 2, online: synthesise images, distil the teachers' answers into the students, and discard the images.

Only the images' current state is kept between steps, so memory is O(K B) for a trajectory of any length.

Legend: K clusters, B batch, C channels, H and W height and width. Steps t count from 1 to T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from personalization.fedbicross.bilevel import (
    OuterScaling,
    gradient_of,
    inner_step,
    outer_gradient,
    outer_step,
    stratified_steps,
)
from personalization.fedbicross.distillation import TEMPERATURE, distillation_loss
from personalization.fedbicross.inversion import InversionWeights, balanced_labels, inversion_loss, jitter
from personalization.fedbicross.teachers import Teacher
from personalization.networks.capabilities import moving_norms, running
from personalization.precision import Precision, mixed_precision, to_float32
from personalization.state import State

Labels = Literal["balanced", "uniform"]


@dataclass(frozen=True)
class SynthesisConfig:
    """Settings of a trajectory. Choices that the paper leaves open are options.

    `every_step` False distils only at outer steps, as the paper reads.
    """

    steps: int = 50
    batch_size: int = 64
    image_rate: float = 0.05
    weights: InversionWeights = field(default_factory=InversionWeights)
    jitter: bool = True
    labels: Labels = "balanced"
    temperature: float = TEMPERATURE
    every_step: bool = True
    inner_steps: int = 1
    inner_rate: float = 0.01
    bilevel: bool = True
    outer_steps: int = 6
    outer_rate: float = 0.1
    outer_scaling: OuterScaling = "normalised"
    train_share: float = 0.8
    precision: Precision = "float32"


@dataclass(frozen=True)
class Lesson:
    """Images [B, C, H, W] of a cluster and its teacher's logits for them, plain and adapted, [B, classes]."""

    images: Tensor
    teacher: Tensor
    adapted: Tensor

    def part(self, index: Tensor) -> Lesson:
        """Select some of the images with their logits."""
        return Lesson(self.images[index], self.teacher[index], self.adapted[index])


class Trajectory:
    """One pass from noise to images, for all clusters in parallel.

    `step` changes `students` and `mixing` [K, K] float64 (row k: w of cluster k); a new trajectory continues
    with them. All random numbers depend on `seed`.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Module]],
        students: Sequence[nn.Module],
        mixing: Tensor,
        shape: tuple[int, int, int],
        classes: int,
        config: SynthesisConfig,
        seed: int,
    ) -> None:
        self.config = config
        self.students = tuple(students)
        self.mixing = mixing.clone()
        self._teachers = [Teacher(networks) for networks in members]
        self._device = next(self.students[0].parameters()).device
        self._seed = seed
        draw = self._generator(0)
        count = config.batch_size
        # Each part has at least two images for any share, because batch norm cannot normalise one.
        split = min(max(2, math.floor(config.train_share * count + 0.5)), count - 2)
        self._images: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._parts: list[tuple[Tensor, Tensor]] = []
        for _ in members:
            noise = torch.randn(count, *shape, generator=draw)
            self._images.append(noise.to(self._device).requires_grad_())
            drawn = torch.randint(classes, (count,), generator=draw)
            labels = balanced_labels(count, classes) if config.labels == "balanced" else drawn
            self._labels.append(labels.to(self._device))
            order = torch.randperm(count, generator=draw).to(self._device)
            self._parts.append((order[:split], order[split:]))
        self._optimisers = [torch.optim.Adam([image], lr=config.image_rate) for image in self._images]
        self.outer = stratified_steps(config.steps, config.outer_steps, draw)

    def _generator(self, step: int) -> torch.Generator:
        """Create the generator of one step, independent of earlier steps: a resumed run draws the same."""
        base = torch.Generator().manual_seed(self._seed)
        seeds = torch.randint(2**62, (self.config.steps + 1,), generator=base)
        return torch.Generator().manual_seed(int(seeds[step]))

    def images(self) -> list[Tensor]:
        """Return every cluster's current images, [B, C, H, W]."""
        return [image.detach() for image in self._images]

    def step(self, step: int) -> dict[str, float]:
        """Run step t: improve the images, compute the teachers' answers, and train the students.

        Returns the losses, means over the clusters; `validation` only in outer steps, which update w.
        """
        notes = self._dream(self._generator(step))
        outer = self.config.bilevel and len(self.students) > 1 and step in self.outer
        if self.config.every_step or step in self.outer:
            share = 1 - step / self.config.steps
            # All answers are computed before any student learns, so the order of clusters does not matter.
            with self._products():
                lessons = [
                    Lesson(image, *teacher.logits(image))
                    for image, teacher in zip(self.images(), self._teachers, strict=True)
                ]
            notes |= self._learn(lessons, share, outer)
        return notes

    def _dream(self, draw: torch.Generator) -> dict[str, float]:
        """Take one Adam step on the images (Eq. 2), and update the adapted teachers."""
        sums = torch.zeros(3, dtype=torch.float64)
        for image, labels, optimiser, teacher in zip(
            self._images, self._labels, self._optimisers, self._teachers, strict=True
        ):
            optimiser.zero_grad(set_to_none=True)
            seen = jitter(image, draw) if self.config.jitter else image
            with self._products():
                loss = inversion_loss(teacher.members, seen, labels, self.config.weights)
            torch.autograd.backward(loss.total)
            optimiser.step()
            with self._products():
                teacher.adapt(image.detach())
            terms = (loss.cross_entropy, loss.total_variation, loss.batch_norm)
            sums += torch.stack(terms).double().cpu()
        means = (sums / len(self._images)).tolist()
        return dict(zip(("cross_entropy", "total_variation", "batch_norm"), means, strict=True))

    def _learn(self, lessons: Sequence[Lesson], share: float, outer: bool) -> dict[str, float]:
        """Take the inner step of every student and, with `outer`, the outer step of its w."""
        training = [lesson.part(part) for lesson, (part, _) in zip(lessons, self._parts, strict=True)]
        learned, checked = 0.0, 0.0
        for index, student in enumerate(self.students):
            student.train()
            row = self.mixing[index]
            for number in range(self.config.inner_steps):
                last = number == self.config.inner_steps - 1
                # A source with weight 0 does not change the student; only the outer step needs its gradient.
                asked = [j for j in range(len(training)) if row[j] > 0 or (outer and last)]
                losses = [self._loss(student, training[j], share) for j in asked]
                gradients = [gradient_of(loss, student) for loss in losses]
                inner_step(student, gradients, row[asked], self.config.inner_rate)
            learned += sum(
                float(row[j]) * float(loss.detach()) for j, loss in zip(asked, losses, strict=True)
            )
            if outer:
                own = lessons[index].part(self._parts[index][1])
                validation = self._loss(student, own, share)
                slope = outer_gradient(gradient_of(validation, student), gradients, self.config.inner_rate)
                self.mixing[index] = outer_step(row, slope, self.config.outer_rate, self.config.outer_scaling)
                checked += float(validation.detach())
        count = len(self.students)
        return {"distillation": learned / count} | ({"validation": checked / count} if outer else {})

    def _loss(self, student: nn.Module, lesson: Lesson, share: float) -> Tensor:
        """Compute L_KD on one source's images. A batch never mixes sources, which batch norm would see."""
        with self._products():
            logits = student(lesson.images)
        return distillation_loss(
            to_float32(logits), lesson.teacher, lesson.adapted, share, self.config.temperature
        )

    def _products(self) -> torch.autocast:
        return mixed_precision(self.config.precision, self._device)

    def tensors(self) -> State:
        """Return the state that a resumed trajectory needs beside its arguments, on the CPU.

        Students and w are arguments: a resumed trajectory is made with them as they are now.
        """
        state: State = {}
        for index, (image, optimiser) in enumerate(zip(self._images, self._optimisers, strict=True)):
            state[f"image/{index}"] = _copy(image)
            for name, tensor in optimiser.state[image].items():
                state[f"moment/{index}/{name}"] = _copy(tensor)
        for index, teacher in enumerate(self._teachers):
            for number, buffers in enumerate(teacher.buffers()):
                state |= {f"adapted/{index}/{number}/{name}": t for name, t in buffers.items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        for index, (image, optimiser) in enumerate(zip(self._images, self._optimisers, strict=True)):
            image.data.copy_(state[f"image/{index}"])
            moments = _under(state, f"moment/{index}/")
            optimiser.load_state_dict({**optimiser.state_dict(), "state": {0: moments}})
        for index, teacher in enumerate(self._teachers):
            members = range(len(teacher.members))
            teacher.restore([_under(state, f"adapted/{index}/{number}/") for number in members])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _under(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): t.clone() for name, t in state.items() if name.startswith(prefix)}


@torch.no_grad()
def recalibrate(network: nn.Module, sources: Sequence[Tensor], mixing_J: Tensor) -> None:
    """Replace the running batch-norm statistics by those of the sources' images, weighted by w.

    A student was trained on one source at a time, each normalised by its own statistics; it is used with
    their weighted mean. The variance does not include the distance between the sources' means, because no
    layer was trained on inputs normalised over several sources. Leaves the network in evaluation mode.
    """
    norms = moving_norms(network).values()
    means = [torch.zeros_like(running(norm)[0], dtype=torch.float64) for norm in norms]
    variances = [torch.zeros_like(mean) for mean in means]
    momenta = [norm.momentum for norm in norms]
    network.train()
    for images, weight in zip(sources, mixing_J.tolist(), strict=True):
        if weight == 0:
            continue
        for norm in norms:
            norm.momentum = 1.0  # makes the running statistics those of the batch
        network(images)
        for norm, mean, variance in zip(norms, means, variances, strict=True):
            found_mean, found_variance = running(norm)
            mean.add_(found_mean, alpha=weight)
            variance.add_(found_variance, alpha=weight)
    for norm, mean, variance, momentum in zip(norms, means, variances, momenta, strict=True):
        for statistic, value in zip(running(norm), (mean, variance), strict=True):
            statistic.copy_(value)
        norm.momentum = momentum
    network.eval()
