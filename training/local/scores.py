"""What a network answers to one site's data, and what the answers score.

The data are slices with masks, images with classes, or whole volumes with masks; each has its answers and its
score. Volumes are answered by windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from personalization.metrics import METRICS, foreground_dice, further_metrics
from training.algorithm import SiteSize, State
from training.data.classification import LabelledData
from training.data.examples import Data, Examples, Volumes
from training.data.segmentation.dataset import SiteData
from training.local.windows import answer_volume

AnySiteData = SiteData | LabelledData


Aggregation = Literal["sample", "uniform"]


# Class indices of every example: [N, H, W] or [N] uint8, or [X, Y, Z] uint8 of each volume.
Answers: TypeAlias = Tensor | list[Tensor]


def weight_of(data: AnySiteData, aggregation: Aggregation) -> float:
    """A site's weight in a mean: its number of training images n_k, or 1."""
    return float(len(data.train)) if aggregation == "sample" else 1.0


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
