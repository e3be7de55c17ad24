"""Accuracies of clients and of all, and differences, from the rows of `one_shot`.

A row has strings of one character per test image (benchmarks.accuracy.one_shot.arms).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.cells import Row
from benchmarks.harness.tables import Interval

Vector = NDArray[np.float64]
_DRAWS = 10_000


def digits(text: str) -> NDArray[np.int64]:
    """A number per character; -1 for "-"."""
    return np.array([-1 if character == "-" else int(character) for character in text])


def clients(row: Row) -> range:
    """The numbers of the clients, as in `owners`."""
    return range(1, len(row["result"]["clients"]) + 1)


def own_answers(row: Row, arm: str, client: int) -> tuple[NDArray[np.int64], Vector]:
    """The indices of the client's test images, and 1 or 0 for its own model being right about each."""
    result = row["result"]
    found = np.flatnonzero(digits(result["owners"]) == client)
    right = digits(result["own"][arm])[found] == digits(result["labels"])[found]
    return found, right.astype(float)


def own_accuracies(row: Row, arm: str) -> list[float]:
    """The accuracy of every client's model on the client's own test images."""
    return [float(own_answers(row, arm, client)[1].mean()) for client in clients(row)]


def own_balanced(row: Row, arm: str) -> list[float]:
    """Balanced accuracies: means over the classes of the client's test images."""
    labels = digits(row["result"]["labels"])
    found = (own_answers(row, arm, client) for client in clients(row))
    return [_balanced(right, labels[images]) for images, right in found]


def right_of_all(row: Row, arm: str) -> Vector:
    """For every test image, the share of the clients' models that are right about it."""
    return digits(row["result"]["right"][arm]) / len(clients(row))


def balanced_of_all(row: Row, arm: str) -> float:
    """The balanced accuracy over all test images and clients' models."""
    return _balanced(right_of_all(row, arm), digits(row["result"]["labels"]))


def _balanced(right: Vector, labels: NDArray[np.int64]) -> float:
    return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


def own_difference(rows: Sequence[Row], first: str, second: str) -> tuple[Interval, list[float]]:
    """First - second: the mean over clients of the difference of accuracies, and that of each row."""
    parts = []
    for row in rows:
        for client in clients(row):
            images, right = own_answers(row, first, client)
            parts.append((images, right - own_answers(row, second, client)[1]))
    each = [
        np.subtract(own_accuracies(row, first), own_accuracies(row, second)).mean().item() for row in rows
    ]
    return bootstrap(parts), each


def difference_of_all(rows: Sequence[Row], first: str, second: str) -> tuple[Interval, list[float]]:
    """First - second in the mean accuracy of all models on all test images, and that of each row."""
    found = [right_of_all(row, first) - right_of_all(row, second) for row in rows]
    return bootstrap([(np.arange(len(d)), d) for d in found]), [float(d.mean()) for d in found]


def bootstrap(parts: Sequence[tuple[NDArray[np.int64], Vector]], seed: int = 0) -> Interval:
    """Mean over the parts of the mean difference of each, and its 95 % percentile interval.

    A part is (images, difference of each). Images are drawn with replacement, all parts seeing the same
    draw: an image that several trainings were tested on is one image. A part that a draw leaves without any
    image is left out of that draw.
    """
    images = np.unique(np.concatenate([own for own, _ in parts]))
    drawn = _draws(len(images), seed)
    means = []
    for own, difference in parts:
        often = drawn[:, np.searchsorted(images, own)]
        total = often.sum(axis=1)
        means.append(np.where(total > 0, often @ difference / np.maximum(total, 1), np.nan))
    low, high = np.quantile(np.nanmean(means, axis=0), [0.025, 0.975])
    mean = np.mean([difference.mean() for _, difference in parts])
    return Interval(float(mean), float(low), float(high), len(images))


# A page compares many arms on the same images, and drawing takes ten times as long as the rest.
@lru_cache(maxsize=16)
def _draws(images: int, seed: int) -> NDArray[np.int32]:
    """How often each draw has each image, draws x images."""
    drawn = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), _DRAWS)
    return drawn.astype(np.int32)
