"""Divide images among clients by one Dirichlet draw per class, as FedISCA and similar papers do."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.errors import FederationError

LEAST_IMAGES = 10
_DRAWS = 1000

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """How to divide images: the number of clients, the unevenness (a small `alpha` is uneven), the seed."""

    clients: int = 5
    alpha: float = 0.5
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, zero-padded so that they sort by number."""
        digits = len(str(self.clients))
        return tuple(f"client-{number:0{digits}d}" for number in range(1, self.clients + 1))


def share_out(labels: Mapping[str, NDArray[np.int64]], partition: Partition) -> dict[str, list[Indices]]:
    """Return the indices that each client gets, for each part ("train", "val", "test").

    For each class the clients' shares are drawn from Dir(alpha). A client that already has an equal part of
    the training images gets no more. The draw is repeated until every client has 10 training images. The
    other parts are divided by the same shares, so a client validates and tests on its own mix of classes.
    A client may have no image of some class.

    Raises FederationError when there are too few training images, or no draw succeeds.
    """
    train = labels["train"]
    too_few = (
        f"{len(train)} training images cannot be divided among {partition.clients} clients with at least "
        f"{LEAST_IMAGES} each"
    )
    if partition.clients < 1 or not 0 < partition.alpha < math.inf:
        raise _refused(
            "expected clients >= 1 and alpha (--dirichlet) > 0 and finite, "
            f"found {partition.clients}, {partition.alpha}"
        )
    if len(train) < LEAST_IMAGES * partition.clients:
        raise _refused(f"{too_few}; use fewer clients")
    material = hashlib.sha256(
        f"dirichlet\0{partition.seed}\0{partition.clients}\0{partition.alpha!r}".encode()
    )
    draw = np.random.default_rng(list(material.digest()))
    shuffled = {part: _by_class(found, draw) for part, found in labels.items()}
    for _ in range(_DRAWS):
        shares = _shares(shuffled["train"], partition, draw)
        train_parts = _cut(shuffled["train"], shares)
        if min(map(len, train_parts)) >= LEAST_IMAGES:
            return {part: _cut(found, shares) for part, found in shuffled.items()}
    raise _refused(f"{too_few} at alpha {partition.alpha} in {_DRAWS} draws; use fewer, or a larger alpha")


def _refused(problem: str) -> FederationError:
    return FederationError("the images cannot be divided among clients:", [problem])


def _by_class(labels: NDArray[np.int64], draw: np.random.Generator) -> dict[int, Indices]:
    return {int(label): draw.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)}


def _shares(
    by_class: Mapping[int, Indices], partition: Partition, draw: np.random.Generator
) -> dict[int, NDArray[np.float64]]:
    """Draw the clients' shares of each class, which sum to 1."""
    even = sum(map(len, by_class.values())) / partition.clients
    held = np.zeros(partition.clients)
    shares: dict[int, NDArray[np.float64]] = {}
    for label, indices in by_class.items():
        drawn = draw.dirichlet(np.full(partition.clients, partition.alpha)) * (held < even)
        total = float(drawn.sum())
        # A tiny alpha gives a class to one client, which may be full: then all with room get equal shares.
        shares[label] = drawn / total if total > 0 else (held < even) / np.count_nonzero(held < even)
        held += np.diff(_bounds(shares[label], len(indices)), prepend=0)
    return shares


def _bounds(shares: NDArray[np.float64], count: int) -> Indices:
    """Return the end index of each client's part of `count` images; the last is `count`."""
    bounds = np.rint(np.cumsum(shares) * count).astype(np.int64)
    bounds[-1] = count
    return bounds


def _cut(by_class: Mapping[int, Indices], shares: Mapping[int, NDArray[np.float64]]) -> list[Indices]:
    """Return each client's indices, in order. A class absent from training is divided evenly."""
    clients = len(next(iter(shares.values())))
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label, indices in by_class.items():
        even = np.full(clients, 1 / clients)
        for client, part in enumerate(np.split(indices, _bounds(shares.get(label, even), len(indices))[:-1])):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]
