"""Images shared out among clients with a Dirichlet draw per class, as FedISCA and its kin do."""

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
    """How images are shared out: among how many clients, how unevenly (a small `alpha`), by what seed."""

    clients: int = 5
    alpha: float = 0.5
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, which sort in their order."""
        digits = len(str(self.clients))
        return tuple(f"client-{number:0{digits}d}" for number in range(1, self.clients + 1))


def share_out(labels: Mapping[str, NDArray[np.int64]], partition: Partition) -> dict[str, list[Indices]]:
    """Of each part ("train", "val", "test"), the indices that every client gets.

    For each class the clients' shares are drawn from Dir(alpha); a client that already has its even part of
    the training images gets no more of them. Drawn again until every client has 10 training images. The other
    parts are cut by the shares that came out, so a client validates and tests on its own mix of classes. A
    client may be without some class.

    Raises FederationError when there are too few training images, or no draw fits.
    """
    train = labels["train"]
    too_few = (
        f"{len(train)} training images cannot be shared out among {partition.clients} clients with at least "
        f"{LEAST_IMAGES} each"
    )
    if partition.clients < 1 or not 0 < partition.alpha < math.inf:
        raise _refused(
            "expected clients >= 1 and alpha (--dirichlet) > 0 and finite, "
            f"found {partition.clients}, {partition.alpha}"
        )
    if len(train) < LEAST_IMAGES * partition.clients:
        raise _refused(f"{too_few}; take fewer clients")
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
    raise _refused(f"{too_few} at alpha {partition.alpha} in {_DRAWS} draws; take fewer, or a larger alpha")


def _refused(problem: str) -> FederationError:
    return FederationError("the images cannot be shared out:", [problem])


def _by_class(labels: NDArray[np.int64], draw: np.random.Generator) -> dict[int, Indices]:
    return {int(label): draw.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)}


def _shares(
    by_class: Mapping[int, Indices], partition: Partition, draw: np.random.Generator
) -> dict[int, NDArray[np.float64]]:
    """For each class the clients' shares, summing to 1."""
    even = sum(map(len, by_class.values())) / partition.clients
    held = np.zeros(partition.clients)
    shares: dict[int, NDArray[np.float64]] = {}
    for label, indices in by_class.items():
        drawn = draw.dirichlet(np.full(partition.clients, partition.alpha)) * (held < even)
        total = float(drawn.sum())
        # A tiny alpha puts everything on one client, who may be full: then all with room share alike.
        shares[label] = drawn / total if total > 0 else (held < even) / np.count_nonzero(held < even)
        held += np.diff(_bounds(shares[label], len(indices)), prepend=0)
    return shares


def _bounds(shares: NDArray[np.float64], count: int) -> Indices:
    """Where each client's part of `count` images ends; the last part ends at `count`."""
    bounds = np.rint(np.cumsum(shares) * count).astype(np.int64)
    bounds[-1] = count
    return bounds


def _cut(by_class: Mapping[int, Indices], shares: Mapping[int, NDArray[np.float64]]) -> list[Indices]:
    """Each client's indices, in order. A class that training does not have is shared out evenly."""
    clients = len(next(iter(shares.values())))
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label, indices in by_class.items():
        even = np.full(clients, 1 / clients)
        for client, part in enumerate(np.split(indices, _bounds(shares.get(label, even), len(indices))[:-1])):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]
