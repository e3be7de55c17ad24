"""Training a classifier on one site's images by SGD, and counting what it gets right, class by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from personalization.domain_randomisation import randomise_half
from personalization.precision import Precision, mixed_precision, to_float32
from personalization.transfer import sent
from training.algorithm import SiteSize
from training.local.images import Images, labelled_batches
from training.local.loop import mean_loss
from training.local.norms import held_statistics, least_batch
from training.local.schedule import DomainRandomisation, randomises
from training.local.scores import predict

# (logits [B, K], images [B, C, H, W], labels [B], indices of the images [B]) -> scalar
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SgdSchedule:
    """SGD for some epochs; the rate falls to a tenth at each of the `milestones`, shares of the epochs."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    milestones: tuple[float, ...] = (0.5, 0.75)
    augment: bool = False
    precision: Precision = "float32"
    domain_randomisation: DomainRandomisation = "none"


def plain_loss(logits_BK: Tensor, images: Tensor, labels_B: Tensor, indices: Tensor) -> Tensor:  # noqa: ARG001
    """Cross-entropy with the labels, and nothing else."""
    return cross_entropy(logits_BK, labels_B)


def train_classifier(
    network: nn.Module,
    images: Images,
    schedule: SgdSchedule,
    generator: torch.Generator,
    loss: Loss = plain_loss,
) -> float:
    """Train in place; returns the mean loss of the last epoch's batches (0 of no epoch).

    `generator` alone decides order and augmentation. Raises ValueError when there is nothing to train on.
    """
    if not len(images):
        raise ValueError("there is no image to train on")
    device = next(network.parameters()).device
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=schedule.learning_rate,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
    )
    least = least_batch(network, images, schedule.batch_size)
    network.train()
    mean = 0.0
    for epoch in range(schedule.epochs):
        passed = sum(epoch >= round(share * schedule.epochs) for share in schedule.milestones)
        for group in optimiser.param_groups:
            group["lr"] = schedule.learning_rate * 0.1**passed
        losses: list[Tensor] = []
        randomise = randomises(schedule.domain_randomisation, epoch, schedule.epochs)
        for batch, labels, indices in labelled_batches(
            images, schedule.batch_size, generator, schedule.augment, least, device
        ):
            batch, randomised = randomise_half(batch, generator) if randomise else (batch, False)
            optimiser.zero_grad(set_to_none=True)
            with mixed_precision(schedule.precision, device), held_statistics(network, randomised):
                logits = network(batch)
            value = loss(to_float32(logits), batch, labels, sent(indices, device))
            torch.autograd.backward(value)
            optimiser.step()
            losses.append(value.detach())
        mean = mean_loss(losses)
    return mean


@torch.no_grad()
def logits_of(network: nn.Module, images: Tensor, batch_size: int = 64) -> Tensor:
    """[N, K] with running statistics, on the network's device; the network is left in evaluation mode."""
    network.eval()
    device = next(network.parameters()).device
    return torch.cat([network(part.clone().to(device)) for part in torch.split(images, batch_size)])


@dataclass(frozen=True)
class ClassCounts:
    """Right answers and images of every class, [K] float64 each: counts of several sites add up."""

    right: Tensor
    images: Tensor

    @classmethod
    def of(cls, network: nn.Module, images: Images, classes: int, batch_size: int = 64) -> ClassCounts:
        """Count on some images; of none, zeros."""
        labels = torch.from_numpy(images.targets)
        right = torch.zeros(0, dtype=torch.float64)
        if len(images):
            right = (predict(network, images, batch_size) == labels).double()
        return cls(
            torch.bincount(labels, weights=right, minlength=classes).double(),
            torch.bincount(labels, minlength=classes).double(),
        )

    def state(self) -> dict[str, Tensor]:
        """As it travels."""
        return {"right": self.right, "images": self.images}

    @classmethod
    def check(cls, state: Mapping[str, Tensor], size: SiteSize) -> None:
        """Raise ValueError for what no site of this size can send: see `state`."""
        if sorted(state) != ["images", "right"]:
            raise ValueError(f"expected the tensors 'images' and 'right', found {sorted(state)}")
        right, images = state["right"], state["images"]
        whole = all(torch.equal(counts, counts.round()) for counts in (right, images))
        if right.shape != images.shape or not (whole and bool(((right >= 0) & (right <= images)).all())):
            raise ValueError("expected right answers and images of every class, whole and 0 or more")
        if size.scored is not None and images.sum() > size.scored:
            raise ValueError(f"expected counts of {size.scored} images at most, found {images.sum():g}")

    def __add__(self, other: ClassCounts) -> ClassCounts:
        return ClassCounts(self.right + other.right, self.images + other.images)

    def metrics(self, prefix: str) -> dict[str, float]:
        """`PREFIXaccuracy` and `PREFIXbalanced_accuracy`, the mean over the classes that are there; nothing
        of no images."""
        if not self.images.sum():
            return {}
        there = self.images > 0
        return {
            f"{prefix}accuracy": float(self.right.sum() / self.images.sum()),
            f"{prefix}balanced_accuracy": float((self.right[there] / self.images[there]).mean()),
        }
