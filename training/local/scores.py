"""What a network answers to one site's data, and what the answers score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from torch import Tensor, nn

from personalization.metrics import METRICS, further_metrics
from training.algorithm import SiteSize, State
from training.local.data import Answers, Data, Examples
from training.local.site import SiteData

Aggregation = Literal["sample", "uniform"]


def weight_of(data: SiteData, aggregation: Aggregation) -> float:
    """A site's weight in a mean: its number of training images n_k, or 1."""
    return float(len(data.train)) if aggregation == "sample" else 1.0


@overload
def predict(network: nn.Module, data: Examples, batch_size: int = 16) -> Tensor: ...


@overload
def predict(network: nn.Module, data: Data, batch_size: int = 16) -> Answers: ...


@torch.no_grad()
def predict(network: nn.Module, data: Data, batch_size: int = 16) -> Answers:
    """Class indices [N, H, W] uint8 of every slice, by argmax, with running batch-norm statistics; [N] of
    images with classes; [X, Y, Z] of each volume, by windows as the service answers. Masks are what the
    task's `keep_largest` leaves."""
    network.eval()
    return data.answers(network, batch_size, next(network.parameters()).device)


def dice_per_patient(network: nn.Module, data: Data, classes: int, batch_size: int = 16) -> dict[str, float]:
    """Foreground Dice of every patient, all its slices as one volume; NaN of a patient without a target."""
    return data.scores(predict(network, data, batch_size), classes) if len(data) else {}


def recall_by_class(network: nn.Module, data: Data, batch_size: int = 16) -> dict[str, float]:
    """Share of the images of each class that are answered right; their mean is the balanced accuracy."""
    if not len(data):
        return {}
    ((found, truth, _),) = data.beside_truth(predict(network, data, batch_size))
    right = torch.eq(found, truth).double()
    return {str(each): float(right[truth == each].mean()) for each in torch.unique(truth).tolist()}


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


def scored(answers: Answers, data: Data, classes: int) -> ValidationScore:
    """What the answers to some data score; there is at least one."""
    further: dict[str, dict[str, float]] = {}
    for rows in data.beside_truth(answers):
        for name, values in further_metrics(*rows, classes, data.kind).items():
            further.setdefault(name, {}).update(values)
    return ValidationScore.of(data.scores(answers, classes), further)
