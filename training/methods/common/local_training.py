"""Training and validating one network on one site's data: what methods and benchmarks have in common.

The data are slices with masks, images with classes, or whole volumes with masks; each has its loss and its
score. Volumes are trained on by patches, and answered by windows of the same sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import TaskKind
from personalization.domain_randomisation import randomise_half
from personalization.losses import DEFAULTS, LOSSES, Loss
from personalization.metrics import METRICS, foreground_dice, further_metrics
from personalization.networks import build, initialise, outline
from personalization.networks.capabilities import batch_norms, moving_norms, running
from personalization.precision import Precision, mixed_precision, to_float32
from personalization.scanner import augment_intensities
from personalization.transfer import CPU, sent
from training.algorithm import SiteSize, State
from training.data.classification import LabelledData, labelled_batches
from training.data.examples import Data, Examples, Volumes
from training.data.segmentation.dataset import SiteData, batches
from training.data.segmentation.patches import Motion, patch_batches
from training.methods.common.sliding_window import answer_volume

AnySiteData = SiteData | LabelledData
OptimiserName = Literal["adam", "adamw", "sgd"]
Aggregation = Literal["sample", "uniform"]
# Class indices of every example: [N, H, W] or [N] uint8, or [X, Y, Z] uint8 of each volume.
Answers: TypeAlias = Tensor | list[Tensor]
# Of SGD.
MOMENTUM = 0.9
MOTION = Motion()
# Of AdamW, where no other is given.
DECAY = 1e-5


def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The default loss of the task that has these targets: masks [B, H, W], or classes [B]."""
    kind: TaskKind = "classification" if targets.ndim == 1 else "segmentation"
    return LOSSES[DEFAULTS[kind]].function(logits, targets)


# () -> scalar: what a method adds to the loss of a batch, of the weights as they are then.
Penalty = Callable[[], Tensor]


@dataclass(frozen=True)
class Schedule:
    """How a network is trained on one site: `steps` batches, or `epochs` passes when `steps` is None.

    With passes there are at least `least_steps` batches. `falls` lets the rate fall by a cosine to nothing
    over these batches; otherwise it stays. `intensity` is the severity of the drawn scanners
    (`personalization.scanner`) that half of a batch's slices go through; 0 for none. With `randomise` there
    is domain randomisation of half of the batches instead. `momentum` is of SGD. `weight_decay` is added to
    the gradient, times the weights (AdamW: taken from the weights). A gradient is clipped to the norm `clip`,
    if there is one. `loss` is of the logits and targets of a batch.

    Of volumes, a batch is of patches, a pass has as many patches as there are volumes, `foreground` is the
    share of patches that are centred on a target, and `motion` says how patches are turned where `augment`
    is on.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 16
    learning_rate: float = 1e-3
    amsgrad: bool = False
    augment: bool = True
    precision: Precision = "float32"
    optimiser: OptimiserName = "adam"
    least_steps: int = 0
    falls: bool = False
    intensity: float = 0.0
    momentum: float = MOMENTUM
    weight_decay: float = 0.0
    clip: float | None = None
    loss: Loss = task_loss
    randomise: bool = False
    foreground: float = 1 / 3
    motion: Motion = MOTION

    def planned(self, count: int) -> int:
        """The number of batches, of so many examples."""
        return self.steps or max(self.epochs * math.ceil(count / self.batch_size), self.least_steps)


class Batch(NamedTuple):
    """Images [B, C, ...], targets [B, ...], and whether domain randomisation changed all of the images."""

    images: Tensor
    targets: Tensor
    randomised: bool = False


def weight_of(data: AnySiteData, aggregation: Aggregation) -> float:
    """A site's weight in a mean: its number of training images n_k, or 1."""
    return float(len(data.train)) if aggregation == "sample" else 1.0


def new_network(spec: NetworkSpec, generator: torch.Generator) -> nn.Module:
    """A network with fresh weights from `generator` alone."""
    return initialise(build(spec.name, **spec.arguments), generator)


def shapes_of(spec: NetworkSpec) -> State:
    """Names, shapes and types of a network's parameters and buffers, without values."""
    return dict(outline(spec.name, **spec.arguments).state_dict())


def parameter_names(spec: NetworkSpec) -> tuple[str, ...]:
    """Names of a network's parameters, without its buffers (batch-norm statistics and counters)."""
    return tuple(name for name, _ in outline(spec.name, **spec.arguments).named_parameters())


def network_of(spec: NetworkSpec, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A network with a copy of these weights, on a device."""
    # Without initial weights, which would be drawn only to be dropped.
    network = outline(spec.name, **spec.arguments)
    network.load_state_dict({name: _channels_last(tensor) for name, tensor in state.items()}, assign=True)
    return network.to(device)


def _channels_last(tensor: Tensor) -> Tensor:
    """A copy with channels innermost, where convolutions take a sixth less time on a CPU."""
    innermost = torch.channels_last if tensor.ndim == 4 else torch.preserve_format
    return tensor.detach().clone(memory_format=innermost)


def state_of(network: nn.Module) -> State:
    """A copy of a network's parameters and buffers on the CPU."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in network.state_dict().items()
    }


def train_locally(
    network: nn.Module,
    data: Data,
    schedule: Schedule,
    generator: torch.Generator,
    penalty: Penalty | None = None,
) -> float:
    """Train in place with a fresh optimiser; returns the mean loss of its batches, with the penalty.

    Parameters that require no gradient stay as they are. `generator` alone decides order and augmentation.
    Raises ValueError when there is nothing to train on.
    """
    optimiser = new_optimiser(network, schedule)
    planned = schedule.planned(len(data))
    least = least_batch(network, data, schedule.batch_size)
    network.train()
    device, losses = next(network.parameters()).device, list[Tensor]()
    for batch in scheduled_batches(data, schedule, generator, least, device):
        if schedule.falls:
            for group in optimiser.param_groups:
                group["lr"] = schedule.learning_rate * (1 + math.cos(math.pi * len(losses) / planned)) / 2
        losses.append(take_step(network, optimiser, batch, schedule, penalty))
    return mean_loss(losses)


def take_step(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    schedule: Schedule,
    penalty: Penalty | None = None,
) -> Tensor:
    """One step of the optimiser on a batch; returns the loss before it, with the penalty, on the device: who
    reads it waits until the step is done."""
    images, targets, randomised = batch
    device = next(network.parameters()).device
    optimiser.zero_grad(set_to_none=True)
    with mixed_precision(schedule.precision, device), held_statistics(network, randomised):
        logits = network(sent(images, device))
    loss = schedule.loss(to_float32(logits), sent(targets, device))
    if penalty is not None:
        loss = loss + penalty()
    torch.autograd.backward(loss)
    if schedule.clip is not None:
        nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
    optimiser.step()
    return loss.detach()


def mean_loss(losses: Sequence[Tensor]) -> float:
    """The mean of the losses of steps, which are read together when all are done; 0 of none."""
    return sum(torch.stack(list(losses)).tolist()) / len(losses) if losses else 0.0


@contextmanager
def held_statistics(network: nn.Module, randomised: bool) -> Iterator[None]:
    """Leave the running batch-norm statistics as they are while `randomised` images pass.

    They are those of images as they are, which a network meets when it serves.
    """
    norms = moving_norms(network).values() if randomised else ()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def new_optimiser(network: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """The schedule's optimiser of all parameters, at the rate of its beginning."""
    parameters, rate, decay = network.parameters(), schedule.learning_rate, schedule.weight_decay
    if schedule.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=schedule.momentum, weight_decay=decay)
    if schedule.optimiser == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, amsgrad=schedule.amsgrad, weight_decay=decay or DECAY)
    return torch.optim.Adam(parameters, lr=rate, amsgrad=schedule.amsgrad, weight_decay=decay)


@torch.no_grad()
def least_batch(network: nn.Module, data: Data, batch_size: int) -> int:
    """The images that a batch needs: two where a batch of one would come and the network cannot normalise it.

    Batch norm in training has no variance of a single value: where a small image has become one pixel, it
    needs another image. Leaves the network in evaluation mode if it had to be asked.
    """
    if isinstance(data, Volumes):
        if batch_size > 1:
            return 1  # batches of patches are full
        data = data.tiles(1)
    if not len(data) or (batch_size > 1 and len(data) % batch_size != 1):
        return 1
    lonely: list[bool] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        lonely.append(inputs[0].numel() == inputs[0].shape[1])

    hooks = [norm.register_forward_pre_hook(note) for norm in batch_norms(network).values()]
    try:
        network.eval()
        network(torch.tensor(data.images[:1]).to(next(network.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return 2 if any(lonely) else 1


def scheduled_batches(
    data: Data,
    schedule: Schedule,
    generator: torch.Generator,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """The batches of the schedule, in their order, on a device. None has fewer than `least` images.

    Patches are cut out of their volumes on the CPU; all else is augmented on the device.

    Raises ValueError when there is nothing to train on.
    """
    if not len(data):
        raise ValueError("there is no slice to train on")
    if isinstance(data, Volumes):
        motion = schedule.motion if schedule.augment else None
        steps, size = schedule.planned(len(data)), max(schedule.batch_size, least)
        drawn = patch_batches(data, steps, size, schedule.foreground, motion, generator)
        for images, targets in drawn:
            yield _changed(sent(images, device), sent(targets, device), schedule, generator)
        return
    done = 0
    for epoch in count():
        # An epoch may have fewer batches than images would fill, so epochs are counted as epochs.
        if schedule.steps is None and epoch >= schedule.epochs and done >= schedule.least_steps:
            return
        for batch in _epoch(data, schedule, generator, least, device):
            enough = (
                schedule.steps
                if schedule.steps is not None
                else (schedule.least_steps if epoch >= schedule.epochs else None)
            )
            if enough is not None and done >= enough:
                return
            yield batch
            done += 1


def _epoch(
    data: Examples, schedule: Schedule, generator: torch.Generator, least: int, device: torch.device
) -> Iterator[Batch]:
    """One pass over the data; targets are class indices [B, H, W], or [B]."""
    size, turned = schedule.batch_size, schedule.augment
    drawn: Iterator[tuple[Tensor, Tensor]] = (
        batches(data, size, generator, turned, least=least, device=device)
        if data.has_masks
        else (batch[:2] for batch in labelled_batches(data, size, generator, turned, least, device))
    )
    for images, targets in drawn:
        yield _changed(images, targets, schedule, generator)


def _changed(images: Tensor, targets: Tensor, schedule: Schedule, generator: torch.Generator) -> Batch:
    """The batch after domain randomisation, or after the drawn scanners that images with masks go through."""
    if schedule.randomise:
        changed, randomised = randomise_half(images, generator)
        return Batch(changed, targets, randomised)
    if schedule.intensity and targets.ndim > 1:
        return Batch(augment_intensities(images, schedule.intensity, generator), targets)
    return Batch(images, targets)


def check_score(score: Tensor, most: int | None, largest: float = 1.0) -> None:
    """Raise ValueError unless this is a sum of numbers in 0..`largest` and their count, at most `most`."""
    if score.shape != (2,) or score.dtype != torch.float64:
        raise ValueError(
            f"expected a score of shape [2] and float64, found {list(score.shape)} {score.dtype}"
        )
    total, count = score.tolist()
    bound = largest * count if count else 0.0
    if not (0 <= total <= bound and count == int(count) and (most is None or count <= most)):
        raise ValueError(
            f"expected the sum of numbers in 0..{largest:g} and their count, {most} at most, found {total:g} "
            f"of {count:g}"
        )


def as_met(data: Data) -> Examples:
    """The images as a network meets them when it serves: slices as they are, volumes by windows."""
    return data.tiles() if isinstance(data, Volumes) else data


@torch.no_grad()
def estimate_statistics(network: nn.Module, slices: Data, batch_size: int = 16) -> None:
    """Replace the running batch-norm statistics by the mean over batches of these slices, not augmented.

    After few steps a moving average still describes the weights of many steps ago. Every batch takes slices
    from the whole set, since neighbours belong to one patient. Volumes are met by windows. Leaves the network
    in training mode.
    """
    slices = as_met(slices)
    least = least_batch(network, slices, batch_size)
    norms = moving_norms(network).values()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
    network.train()
    device = next(network.parameters()).device
    count = min(math.ceil(len(slices) / batch_size), max(len(slices) // least, 1))
    for first in range(count):
        images = torch.tensor(slices.images[first::count]).to(device)
        network(images if len(images) >= least else torch.cat([images] * least))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def with_statistics(
    spec: NetworkSpec, state: State, slices: Data, batch_size: int, device: torch.device
) -> State:
    """A network's weights with the batch-norm statistics that `estimate_statistics` finds."""
    network = network_of(spec, state, device)
    estimate_statistics(network, slices, batch_size)
    return state_of(network)


def batch_moments(network: nn.Module, slices: Data, batch_size: int = 16) -> State:
    """Mean and mean square of every batch norm's input, by `estimate_statistics`: [C] float64 each.

    Nothing where there is no slice. They are means, so that those of several sites can be averaged.
    """
    if not len(slices):
        return {}
    estimate_statistics(network, slices, batch_size)
    found: State = {}
    for path, norm in moving_norms(network).items():
        mean, variance = (statistic.double().cpu() for statistic in running(norm))
        found |= {f"{path}.mean": mean, f"{path}.square": variance + mean.square()}
    return found


def moments_of(spec: NetworkSpec) -> State:
    """Names, shapes and types of a network's `batch_moments`, without values."""
    return {
        f"{path}.{kind}": torch.empty(norm.num_features, dtype=torch.float64, device="meta")
        for path, norm in moving_norms(outline(spec.name, **spec.arguments)).items()
        for kind in ("mean", "square")
    }


def with_moments(state: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> State:
    """A network's state with the running batch-norm statistics that `batch_moments` describe."""
    statistics: State = {}
    for name in moments:
        path, kind = name.rsplit(".", 1)
        if kind == "mean":
            mean = moments[name]
            variance = (moments[f"{path}.square"] - mean.square()).clamp(min=0)
            statistics |= {f"{path}.running_mean": mean, f"{path}.running_var": variance}
    return {name: statistics.get(name, tensor).to(tensor.dtype) for name, tensor in state.items()}


def positive_variances(noisy: State, received: State) -> State:
    """A state with noise, with running variances of at least half those that the site received.

    Below zero they would make the network's outputs NaN, and near zero huge.
    """
    return {
        name: torch.maximum(tensor, received[name] / 2) if name.endswith("running_var") else tensor
        for name, tensor in noisy.items()
    }


@overload
def predict(network: nn.Module, slices: Examples, batch_size: int = 16) -> Tensor: ...
@overload
def predict(network: nn.Module, slices: Data, batch_size: int = 16) -> Answers: ...
@torch.no_grad()
def predict(network: nn.Module, slices: Data, batch_size: int = 16) -> Answers:
    """Class indices [N, H, W] uint8 of every slice, by argmax, with running batch-norm statistics; [N] of
    images with classes; [X, Y, Z] of each volume, by windows as the service answers. Masks are what the
    task's `keep_largest` leaves."""
    network.eval()
    device = next(network.parameters()).device
    if isinstance(slices, Volumes):
        return [answer_volume(network, image, slices.task, device) for image in slices.images]
    parts = torch.split(torch.from_numpy(slices.images), batch_size)
    # A copy is aligned as torch aligns, whatever numpy did: some kernels add up in another order otherwise.
    classes = [network(part.clone().to(device)).argmax(dim=1).to(torch.uint8).cpu() for part in parts]
    found = torch.cat(classes)
    return torch.from_numpy(slices.answered(found.numpy())) if slices.has_masks else found


def dice_per_patient(
    network: nn.Module, slices: Data, classes: int, batch_size: int = 16
) -> dict[str, float]:
    """Foreground Dice of every patient, all its slices as one volume; NaN of a patient without a target."""
    if not len(slices):
        return {}
    predicted = predict(network, slices, batch_size)
    return {
        patient: value
        for rows in beside_truth(predicted, slices)
        for patient, value in foreground_dice(*rows, classes).items()
    }


def beside_truth(predicted: Answers, data: Data) -> Iterator[tuple[Tensor, Tensor, tuple[str, ...]]]:
    """Class indices of answers and truth [N, ...] and the N patients, as the metrics take them.

    Volumes have shapes of their own: of these, one patient after the other, all voxels in one row.
    """
    if isinstance(data, Volumes):
        for patient in dict.fromkeys(data.patients):
            own = [index for index, name in enumerate(data.patients) if name == patient]
            found = torch.cat([predicted[index].flatten() for index in own])
            truth = torch.cat([torch.from_numpy(data.targets[index]).flatten() for index in own])
            yield found[None], truth[None], (patient,)
    else:
        assert isinstance(predicted, Tensor)
        yield predicted, torch.from_numpy(data.targets), data.patients


@dataclass(frozen=True)
class ValidationScore:
    """A sum of Dice over the patients that have one, so that scores of several sites add up.

    Of images with classes: how many are right, and how many there are. `further` has the sum and the number
    of each metric beside this one that chooses (`personalization.metrics`).
    """

    total: float = 0.0
    patients: int = 0
    further: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, dice: Mapping[str, float], further: Mapping[str, Mapping[str, float]] | None = None
    ) -> ValidationScore:
        """The score of some patients; NaN is left out."""
        sums = {name: _sum(values.values()) for name, values in (further or {}).items()}
        return cls(*_sum(dice.values()), sums)

    @classmethod
    def received(cls, state: State) -> ValidationScore:
        """The score that a site sent as `state`."""
        total, patients = state["score"].tolist()
        further = {name: tensor.tolist() for name, tensor in state.items() if name != "score"}
        return cls(total, int(patients), {name: (value, int(n)) for name, (value, n) in further.items()})

    @classmethod
    def noted(cls, facts: Mapping[str, Any]) -> ValidationScore:
        """The score that was kept as `facts`."""
        further = {name: (value, number) for name, (value, number) in facts.get("further", {}).items()}
        return cls(facts["total"], facts["patients"], further)

    @classmethod
    def together(cls, scores: Sequence[ValidationScore]) -> ValidationScore:
        """The score of all sites' patients."""
        names = dict.fromkeys(name for score in scores for name in score.further)
        sums = {name: [s.further[name] for s in scores if name in s.further] for name in names}
        further = {
            name: (math.fsum(t for t, _ in found), sum(n for _, n in found)) for name, found in sums.items()
        }
        return cls(math.fsum(s.total for s in scores), sum(s.patients for s in scores), further)

    @property
    def mean(self) -> float:
        """Mean Dice per patient; NaN of none."""
        return self.total / self.patients if self.patients else math.nan

    def state(self) -> State:
        """As it travels: float64 [2] each, sum and count."""
        sums = {"score": (self.total, self.patients), **self.further}
        return {name: torch.tensor(pair, dtype=torch.float64) for name, pair in sums.items()}

    def facts(self) -> dict[str, Any]:
        """As JSON, for a memory."""
        further = {name: list(pair) for name, pair in self.further.items()}
        return {"total": self.total, "patients": self.patients, **({"further": further} if further else {})}

    @classmethod
    def check(cls, state: State, size: SiteSize) -> None:
        """Raise ValueError for what no site of this size can send: see `state`."""
        unknown = state.keys() - {"score", *METRICS}
        if "score" not in state or unknown:
            raise ValueError(f"expected the tensor 'score' and metrics beside it, found {sorted(state)}")
        for name, score in state.items():
            check_score(score, size.scored, 1.0 if name == "score" else METRICS[name].most)

    def metrics(self, name: str) -> dict[str, float]:
        """As a metric `name`, PREFIXval_METRIC, with the others beside it; without those of no patient."""
        prefix = "".join(name.partition("val_")[:2])
        others = {prefix + other: total / n for other, (total, n) in self.further.items() if n}
        return {name: self.mean, **others} if self.patients else others

    def beats(self, best: ValidationScore) -> bool:
        """Whether the mean is higher.

        Patients without a target have no Dice while nothing is found in them, and 0 otherwise: no Dice is no
        worse than 0.
        """
        if not self.patients:
            return not best.total
        return self.mean > (best.mean if best.patients else 0.0)


def _sum(values: Iterable[float]) -> tuple[float, int]:
    """Sum and number of the values that are defined."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined), len(defined)


def evaluate(network: nn.Module, data: Data, classes: int, batch_size: int = 16) -> ValidationScore:
    """The network's foreground Dice on some slices, or its accuracy on some images; other metrics too."""
    return scored(predict(network, data, batch_size), data, classes) if len(data) else ValidationScore()


def scored(predicted: Answers, data: Data, classes: int) -> ValidationScore:
    """What the answers to slices, images or volumes score; there is at least one."""
    if data.has_masks:
        dice: dict[str, float] = {}
        further: dict[str, dict[str, float]] = {}
        for rows in beside_truth(predicted, data):
            dice |= foreground_dice(*rows, classes)
            for name, values in further_metrics(*rows, classes, "segmentation").items():
                further.setdefault(name, {}).update(values)
        return ValidationScore.of(dice, further)
    assert isinstance(predicted, Tensor)
    assert isinstance(data, Examples)
    truth = torch.from_numpy(data.targets)
    images = tuple(map(str, range(len(truth))))
    others = further_metrics(predicted, truth, images, classes, "classification")
    right = dict(zip(images, (predicted == truth).double().tolist(), strict=True))
    return ValidationScore.of(right, others)
