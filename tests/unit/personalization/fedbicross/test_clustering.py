"""Clustering of models by their outputs, with every edge case."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import silhouette_score
from torch import nn

from personalization.fedbicross import clustering
from personalization.fedbicross.clustering import Clustering, answers_to_noise, cluster, mixing_of


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_cluster_finds_two_groups_numbered_by_appearance() -> None:
    answers = points(10, 0, 10.1, 0.1, 0.2)
    found = cluster(answers, draw())
    assert found.assignment == (0, 1, 0, 1, 1)
    assert found.count == 2
    assert found.members(1) == (1, 3, 4)
    assert set(found.silhouettes) == {2, 3, 4}
    assert found.silhouettes[2] == pytest.approx(silhouette_score(answers.numpy(), [0, 1, 0, 1, 1]))
    assert max(found.silhouettes, key=found.silhouettes.__getitem__) == 2


@pytest.mark.parametrize("values", [(3.0,), (3.0, 90.0)])
def test_cluster_of_one_or_two_models_gives_one_cluster(values: tuple[float, ...]) -> None:
    found = cluster(points(*values), draw())
    assert found.assignment == (0,) * len(values)
    assert found.silhouettes == {}


def test_cluster_of_three_models_may_give_a_singleton() -> None:
    found = cluster(points(0, 0.1, 9), draw())
    assert found.assignment == (0, 0, 1)
    # A singleton counts 0 in the mean of three.
    a, b = 0.1, 9.0
    pair = ((b - a) / b + (b - 0.1 - a) / (b - 0.1)) / 3
    assert found.silhouettes == {2: pytest.approx(pair)}


def test_cluster_of_identical_models_gives_one_cluster() -> None:
    found = cluster(points(4, 4, 4, 4), draw())
    assert found.assignment == (0, 0, 0, 0)
    assert found.silhouettes == {}


def test_cluster_count_is_bounded_by_the_number_of_distinct_outputs() -> None:
    found = cluster(points(0, 0, 5, 5, 5), draw())
    assert found.assignment == (0, 0, 1, 1, 1)
    assert found.silhouettes == {2: 1.0}
    assert cluster(points(0, 0, 5, 5, 5), draw(), count=4).count == 2


def test_cluster_with_equal_silhouettes_chooses_fewer_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = points(0, 1, 5, 6, 20, 21)
    scores = {2: 0.4, 3: 0.7, 4: 0.7, 5: 0.7}
    monkeypatch.setattr(clustering, "_silhouette", lambda _, labels: scores[len({*labels})])
    found = cluster(answers, draw())
    assert found.silhouettes == scores
    assert found.assignment == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(("best", "count"), [(0.05, 3), (0.0499, 1)])
def test_cluster_accepts_a_silhouette_equal_to_the_least(
    best: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustering, "_silhouette", lambda _, labels: best - 0.01 * abs(len({*labels}) - 3))
    answers = points(0, 1, 5, 6, 20, 21)
    assert cluster(answers, draw(), least_silhouette=0.05).count == count
    # 0.05 is also the default.
    assert cluster(answers, draw()).count == count


def test_cluster_below_the_least_silhouette_gives_one_cluster() -> None:
    answers = torch.randn(6, 200, generator=draw(1), dtype=torch.float64)
    assert cluster(answers, draw(), least_silhouette=0.9).count == 1
    assert cluster(answers, draw(), least_silhouette=-1).count > 1


def test_cluster_with_given_count_returns_that_many_up_to_the_models() -> None:
    assert cluster(points(0, 1, 2, 3), draw(), count=4).assignment == (0, 1, 2, 3)
    assert cluster(points(0, 50), draw(), count=2).assignment == (0, 1)
    assert cluster(points(0, 50), draw(), count=1).assignment == (0, 0)
    assert cluster(points(0, 50), draw(), count=7).assignment == (0, 1)


def test_cluster_with_the_same_seed_is_reproducible() -> None:
    answers = torch.randn(8, 30, generator=draw(2), dtype=torch.float64)
    options = {"least_silhouette": -1.0}
    assert cluster(answers, draw(5), **options) == cluster(answers, draw(5), **options)


def test_answers_to_noise_use_evaluation_mode_and_softmax_by_default() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    probes = torch.randn(10, 1, 2, 2, generator=draw())
    found = answers_to_noise([network], probes, batch_size=3)
    assert found.shape == (1, 30)
    assert found.reshape(10, 3).sum(1).tolist() == pytest.approx([1] * 10)
    network.eval()
    expected = network(probes).softmax(1).flatten()[None].detach()
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)
    logits = answers_to_noise([network], probes, "logits")
    torch.testing.assert_close(logits, network(probes).detach().flatten()[None].double())


def test_mixing_starts_uniform_or_intra_or_by_cosine_of_the_clusters_mean_answers() -> None:
    answers = torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    found = Clustering((0, 0, 1, 2), {})
    assert mixing_of(answers, found, "uniform").tolist() == [[1 / 3] * 3] * 3
    assert mixing_of(answers, found, "intra").tolist() == torch.eye(3).tolist()
    # Means (2, 0), (1, 1), (-1, 0): cosines 1, 0.7071, -1; 1, -0.7071. Below 0 counts as 0.
    half = 0.5**0.5
    expected = [[1 / (1 + half), half / (1 + half), 0], [half / (1 + half), 1 / (1 + half), 0], [0, 0, 1]]
    torch.testing.assert_close(
        mixing_of(answers, found, "similarity"), torch.tensor(expected, dtype=torch.float64)
    )
