"""Stage 1: cluster models by their outputs on noise (FedBiCross, Alg. 1, lines 1-5; Eq. 1).

Legend: N models, M probes, C input channels, K classes (clusters where it says so), H and W height and width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

ProbeOutput = Literal["softmax", "logits"]
Mixing = Literal["uniform", "similarity", "intra"]
_SEEDS = 2**32


@dataclass(frozen=True)
class Clustering:
    """The cluster of each model, numbered from 0 by first appearance, and the silhouettes.

    `silhouettes` has the mean silhouette of every number of clusters that could be formed.
    """

    assignment: tuple[int, ...]
    silhouettes: dict[int, float]

    @property
    def count(self) -> int:
        """Number of clusters."""
        return max(self.assignment) + 1

    def members(self, cluster: int) -> tuple[int, ...]:
        """Return the models of a cluster, in order."""
        return tuple(index for index, found in enumerate(self.assignment) if found == cluster)


@torch.no_grad()
def answers_to_noise(
    networks: Sequence[nn.Module], probes_MCHW: Tensor, output: ProbeOutput = "softmax", batch_size: int = 64
) -> Tensor:
    """Compute every network's outputs on the same noise, flattened: [N, M·K] float64 on the CPU.

    Softmax is the default, because logits of models trained for different times differ in scale.
    """
    answers = []
    for network in networks:
        network.eval()
        device = next(network.parameters()).device
        logits = torch.cat([network(part.to(device)) for part in torch.split(probes_MCHW, batch_size)])
        chosen = logits.softmax(dim=1) if output == "softmax" else logits
        answers.append(chosen.double().flatten().cpu())
    return torch.stack(answers)


def cluster(
    answers: Tensor, generator: torch.Generator, *, least_silhouette: float = 0.05, count: int | None = None
) -> Clustering:
    """Cluster the answers [N, D] by k-means, with the number of clusters of the highest mean silhouette.

    2..N-1 clusters are tried; among equal silhouettes, the fewest clusters win. The result is one cluster if
    the best silhouette is below `least_silhouette`, or no number can be tried: one model, two models (a
    silhouette needs a pair and a neighbour), or models with equal answers. A model alone in its cluster has
    silhouette 0, and so has one at distance 0 from all others. With `count`, that many clusters are made, or
    as many as there are different answers.
    """
    models = len(answers)
    seed = int(torch.randint(_SEEDS, (1,), generator=generator))
    labels = {tried: _kmeans(answers, tried, seed) for tried in range(2, models)}
    silhouettes = {
        tried: _silhouette(answers, found)
        for tried, found in labels.items()
        # Skip numbers of clusters above the number of different answers.
        if len({*found}) == tried
    }
    if count is not None:
        chosen = _kmeans(answers, min(count, models), seed)
    elif silhouettes and max(silhouettes.values()) >= least_silhouette:
        chosen = labels[max(silhouettes, key=lambda tried: (silhouettes[tried], -tried))]
    else:
        chosen = [0] * models
    return Clustering(_in_order(chosen), silhouettes)


def mixing_of(answers_ND: Tensor, found: Clustering, kind: Mixing) -> Tensor:
    """The weights of the clusters in each other's distillation before any is learned, [K, K] float64.

        uniform       w_kj = 1/K
        similarity    w_kj = s_kj / sum_j s_kj,   s_kj = max(0, cos(c_k, c_j)),   c the clusters' mean answers
        intra         w_kj = 1 where k = j, else 0

    The paper compares with a similarity-weighted scheme and does not define it: this one is ours, from what
    Stage 1 has. A row sums to 1.
    """
    count = found.count
    if kind == "uniform":
        return torch.full((count, count), 1 / count, dtype=torch.float64)
    if kind == "intra":
        return torch.eye(count, dtype=torch.float64)
    centroids = torch.stack([answers_ND[list(found.members(k))].mean(dim=0) for k in range(count)])
    directions = torch.nn.functional.normalize(centroids.double(), dim=1)
    similarity = (directions @ directions.T).clamp(min=0)
    return similarity / similarity.sum(dim=1, keepdim=True)


def _kmeans(answers: Tensor, count: int, seed: int) -> list[int]:
    # The import takes more than a second, and only this function needs it.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Equal answers are not an error here; the caller counts the clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = KMeans(count, n_init=10, random_state=seed).fit_predict(answers.numpy())
    return [int(label) for label in found]


def _silhouette(answers: Tensor, labels: Sequence[int]) -> float:
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(answers.numpy(), labels))


def _in_order(labels: Sequence[int]) -> tuple[int, ...]:
    """Renumber clusters by first appearance, because k-means numbers them arbitrarily."""
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(order[label] for label in labels)
