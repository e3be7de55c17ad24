"""Surface metrics on planes and islands with known distances, and against a loop over all pairs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from monai import metrics
from scipy.ndimage import binary_erosion, gaussian_filter
from torch import Tensor

from personalization.errors import LabelError
from personalization.surfaces import surface_distances


def slab(low: int, high: int, sides: tuple[int, int, int] = (16, 8, 8)) -> Tensor:
    found = torch.zeros(sides, dtype=torch.uint8)
    found[low:high] = 1
    return found


def test_a_shift_along_an_axis_is_that_many_millimetres() -> None:
    # Faces move by 2 voxels of 1.5 mm, and the whole slab reaches the volume's other borders.
    found = surface_distances(slab(4, 8), slab(6, 10), [(1,)], (1.5, 1.0, 1.0))
    assert float(found["hd95"]) == pytest.approx(3.0)
    assert 0 < float(found["assd"]) <= 3.0
    assert float(surface_distances(slab(4, 8), slab(4, 8), [(1,)])["hd95"]) == 0.0
    assert float(surface_distances(slab(4, 8), slab(4, 8), [(1,)])["nsd"]) == 1.0


@pytest.mark.parametrize("spacing", [None, (1.0, 2.0, 0.5)])
def test_distances_are_those_of_a_loop_over_all_pairs(spacing: tuple[float, ...] | None) -> None:
    draw = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*map(np.arange, (14, 12, 10)), indexing="ij"), axis=-1)
    first, second = (
        (np.linalg.norm(places - draw.uniform(4, 7, 3), axis=-1) < draw.uniform(2.5, 3.8)).astype(np.uint8)
        for _ in range(2)
    )
    sizes = np.array(spacing or (1.0,) * 3)
    edges = [np.argwhere(each & ~binary_erosion(each)) * sizes for each in (first > 0, second > 0)]
    pairs = np.linalg.norm(edges[0][:, None] - edges[1][None], axis=-1)
    there, back = pairs.min(axis=1), pairs.min(axis=0)
    found = surface_distances(torch.from_numpy(first), torch.from_numpy(second), [(1,)], spacing)
    assert float(found["hd95"]) == pytest.approx(max(np.percentile(there, 95), np.percentile(back, 95)), 1e-5)
    assert float(found["assd"]) == pytest.approx(np.concatenate([there, back]).mean(), 1e-5)
    if spacing is None:
        close = np.concatenate([there, back]) <= 1
        assert float(found["nsd"]) == pytest.approx(close.mean(), abs=0.1)


def by_monai(
    predicted: Tensor, truth: Tensor, spacing: tuple[float, ...] | None, tolerance: float
) -> dict[str, float]:
    masks = [(each == 1)[None, None] for each in (predicted, truth)]
    how = {"include_background": True, "spacing": spacing}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        return {
            "hd95": float(metrics.compute_hausdorff_distance(*masks, percentile=95, **how)),
            "assd": float(metrics.compute_average_surface_distance(*masks, symmetric=True, **how)),
            "nsd": float(metrics.compute_surface_dice(*masks, [tolerance], **how)),
        }


@pytest.mark.parametrize(
    ("sides", "spacing", "tolerance"),
    [
        ((40, 33), None, 1.0),
        ((31, 40), (0.4, 0.7), 1.2),
        ((18, 21, 12), (0.4, 0.4, 3.0), 1.2),
        ((17, 16, 15), (1.5, 1.5, 1.5), 1.5),
    ],
    ids=str,
)
def test_distances_are_monais(
    sides: tuple[int, ...], spacing: tuple[float, ...] | None, tolerance: float
) -> None:
    """Blobs of several parts with holes, some at the border of the picture."""
    draw = np.random.default_rng(3)
    for _ in range(6):
        smooth = [gaussian_filter(draw.normal(size=sides), 1.5) for _ in range(2)]
        near = [(each > np.quantile(each, draw.uniform(0.3, 0.97))).astype(np.uint8) for each in smooth]
        first, second = (torch.from_numpy(each) for each in near)
        found = surface_distances(first, second, [(1,)], spacing, tolerance)
        for name, expected in by_monai(first, second, spacing, tolerance).items():
            assert float(found[name]) == pytest.approx(expected, rel=5e-7, abs=5e-7)


def test_an_island_far_away_is_seen_by_hd95_and_hardly_by_dice() -> None:
    truth = torch.zeros(40, 40, dtype=torch.uint8)
    truth[4:12, 4:12] = 1
    island = truth.clone()
    island[34:37, 34:37] = 1
    found = surface_distances(island, truth, [(1,)])
    assert float(found["hd95"]) > 20
    assert 2 * 64 / (64 + 73) > 0.9


def test_a_label_that_either_lacks_has_no_distance_and_unions_are_labels() -> None:
    truth, predicted = slab(4, 8), slab(4, 8)
    truth[6:8], predicted[6:8] = 2, 2
    predicted[4:6] = 0
    found = surface_distances(predicted, truth, [(1,), (2,), (1, 2), (3,)])
    for values in found.values():
        assert values.isnan().tolist() == [True, False, False, True]
    assert float(found["hd95"][1]) == 0.0
    assert float(found["hd95"][2]) == pytest.approx(2.0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LabelError, match=r"expected shape \[16, 8, 8\], found \[8, 8\]"):
        surface_distances(torch.zeros(8, 8, dtype=torch.uint8), slab(0, 4), [(1,)])
    with pytest.raises(LabelError, match="expected 3 numbers"):
        surface_distances(slab(0, 4), slab(0, 4), [(1,)], (1.0, 1.0))
