"""Windows of volumes: MONAI's and nnU-Net's places and weights, and the average over them in a slab."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from monai.data.utils import compute_importance_map
from monai.inferers.inferer import SlidingWindowInferer
from numpy.typing import NDArray
from scipy import ndimage

from model_store.preprocessing import windows as w


def naive(
    volume: NDArray[np.float32], patch: tuple[int, ...], overlap: float, rule: w.WindowRule
) -> NDArray[np.float64]:
    """The same average, of the whole volume in float64."""
    margins = w.padding(volume.shape[1:], patch)
    padded = np.pad(volume, ((0, 0), *margins)).astype(np.float64)
    sums, total = np.zeros((3, *padded.shape[1:])), np.zeros(padded.shape[1:])
    for corner in w.windows(padded.shape[1:], patch, overlap, rule):
        here = tuple(slice(start, start + side) for start, side in zip(corner, patch, strict=True))
        sums[(slice(None), *here)] += w.weights(patch, rule) * predict(
            padded[(slice(None), *here)].astype(np.float32)
        )
        total[here] += w.weights(patch, rule)
    inside = tuple(slice(low, low + side) for (low, _), side in zip(margins, volume.shape[1:], strict=True))
    return np.asarray((sums / total)[(slice(None), *inside)])


def predict(patch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Three outputs that depend on the place in the patch, so a window misplaced by a voxel shows."""
    ramp = np.arange(patch[0].size, dtype=np.float32).reshape(patch.shape[1:]) / patch[0].size
    return np.stack([patch[0], patch[-1] * ramp, ramp])


def slid(volume: NDArray[np.float32], *args: object, axis: int = 0) -> NDArray[np.float32]:
    planes = list(w.slide(volume, *args, predict, axis=axis))  # type: ignore[arg-type]
    assert [place for place, _ in planes] == list(range(volume.shape[1 + axis]))
    return np.stack([plane for _, plane in planes], axis=1 + axis)


@pytest.mark.parametrize("rule", ["gaussian", "constant"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(23, 17, 30), (8, 40, 5), (7, 6, 5), (8, 12, 10)])
def test_a_slab_gives_the_average_over_the_whole_volume(
    shape: tuple[int, int, int], axis: int, rule: w.WindowRule
) -> None:
    volume = np.random.default_rng(1).random((2, *shape), dtype=np.float32)
    for overlap in (0.0, 0.5, 0.7):
        found = slid(volume, (8, 12, 10), overlap, rule, axis=axis)
        np.testing.assert_allclose(found, naive(volume, (8, 12, 10), overlap, rule), atol=3e-5)


def test_nnunets_rule_rounds_sums_as_nnunet_does() -> None:
    volume, patch = np.random.default_rng(3).random((2, 23, 17, 30), dtype=np.float32), (8, 12, 10)
    sums, total = torch.zeros((3, 23, 17, 30), dtype=torch.half), torch.zeros((23, 17, 30), dtype=torch.half)
    weight = torch.from_numpy(w.weights(patch, "nnunet").astype(np.float16))
    for corner in w.windows(volume.shape[1:], patch, 0.5, "nnunet"):
        here = tuple(slice(start, start + side) for start, side in zip(corner, patch, strict=True))
        outputs = torch.from_numpy(predict(volume[(slice(None), *here)]))
        outputs *= weight
        sums[(slice(None), *here)] += outputs
        total[here] += weight
    found = slid(volume, patch, 0.5, "nnunet")
    np.testing.assert_array_equal(found, torch.div(sums, total).float().numpy())


@pytest.mark.parametrize("mode", ["gaussian", "constant"])
@pytest.mark.parametrize("shape", [(36, 50, 37), (20, 50, 16), (16, 24, 16)])
@pytest.mark.parametrize("overlap", [0.5, 0.25, 0.6])
def test_the_average_is_that_of_monais_inferer(
    mode: w.WindowRule, shape: tuple[int, int, int], overlap: float
) -> None:
    volume = np.random.default_rng(2).random((1, *shape), dtype=np.float32)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 3, 3, padding=1)
    ).eval()

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(network(torch.from_numpy(np.ascontiguousarray(patch))[None])[0].numpy())

    inferer = SlidingWindowInferer((16, 24, 16), overlap=overlap, mode=mode)
    with torch.no_grad():
        expected = inferer(torch.from_numpy(volume)[None], network)[0].numpy()
    planes = [plane for _, plane in w.slide(volume, (16, 24, 16), overlap, mode, run)]
    np.testing.assert_allclose(np.stack(planes, axis=1), expected, atol=1e-5)


@pytest.mark.parametrize("patch", [(32, 48, 32), (5, 7, 4), (96, 96, 64)])
def test_weights_are_monais_and_nnunets(patch: tuple[int, int, int]) -> None:
    np.testing.assert_allclose(
        w.weights(patch, "gaussian"), compute_importance_map(patch, mode="gaussian").numpy(), rtol=1e-5
    )
    assert (w.weights(patch, "constant") == 1).all()
    # `compute_gaussian` of nnunetv2 2.8.1, written out.
    delta = np.zeros(patch)
    delta[tuple(side // 2 for side in patch)] = 1
    bell = ndimage.gaussian_filter(delta, [side / 8 for side in patch], 0, mode="constant", cval=0)
    bell = (bell / (bell.max() / 10)).astype(np.float16)
    bell[bell == 0] = bell[bell != 0].min()
    np.testing.assert_allclose(w.weights(patch, "nnunet"), bell.astype(np.float32), rtol=2e-3)


def test_nnunets_windows_are_spread_evenly() -> None:
    # `compute_steps_for_sliding_window((30, 224, 224), (28, 128, 128), 0.5)` and others of its docstring.
    assert w.starts(30, 28, 0.5, "nnunet") == (0, 2)
    assert w.starts(224, 128, 0.5, "nnunet") == (0, 48, 96)
    assert w.starts(110, 64, 0.5, "nnunet") == (0, 23, 46)
    assert w.starts(64, 64, 0.5, "nnunet") == (0,)


def test_windows_cover_every_voxel_and_stay_inside() -> None:
    for side, patch, overlap in itertools.product(range(8, 40), (4, 7, 8), (0, 0.3, 0.5, 0.9)):
        for rule in ("gaussian", "nnunet"):
            found = w.starts(side, patch, overlap, rule)  # type: ignore[arg-type]
            covered = {voxel for start in found for voxel in range(start, start + patch)}
            assert covered == set(range(side))
            assert sorted(found) == list(found)
            assert rule == "nnunet" or len({*found}) == len(found)


def test_a_side_below_the_patch_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"at least 8 voxels.*found 5; pad first"):
        w.starts(5, 8, 0.5, "gaussian")


def test_outputs_of_another_shape_and_nan_are_refused() -> None:
    volume = np.zeros((1, 8, 8, 8), np.float32)
    with pytest.raises(ValueError, match=r"expected outputs \[K, \*\[4, 4, 4\]\]"):
        list(w.slide(volume, (4, 4, 4), 0.5, "gaussian", lambda patch: patch[:, :2]))
    with pytest.raises(ValueError, match="finite"):
        list(w.slide(volume, (4, 4, 4), 0.5, "gaussian", lambda patch: patch * np.float32(np.nan)))


def test_the_slab_moves_along_the_axis_where_a_patch_is_the_smallest_share() -> None:
    assert w.slab_axis((300, 200, 600), (96, 96, 96)) == 2
    assert w.slab_axis((36, 50, 37), (32, 48, 32)) == 2
    assert w.slab_axis((10, 10, 10), (32, 32, 32)) == 0
    assert w.slab_bytes((600, 273, 273), (96, 96, 96), 3, 0) == 4 * 4 * 96 * 273 * 273


@pytest.mark.parametrize(
    ("shape", "patch"), [((9, 8, 3), (4, 4, 4)), ((4, 4, 4), (4, 4, 4)), ((5, 11, 6), (3, 4, 6))]
)
def test_tiles_cover_every_voxel_with_the_fewest_patches(shape: w.Shape, patch: w.Shape) -> None:
    volume = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(1, *shape)
    corners = w.tiles(shape, patch)
    seen = np.stack([w.cut(volume, corner, patch) for corner in corners])
    assert seen.shape[1:] == (1, *patch)
    assert set(np.unique(seen)) - {0.0} == set(np.unique(volume))
    assert len(corners) == np.prod([-(-side // own) for side, own in zip(shape, patch, strict=True)])


def test_cut_pads_as_windows_do() -> None:
    volume = np.random.default_rng(0).random((2, 5, 3, 6)).astype(np.float32)
    seen = []
    for _ in w.slide(volume, (5, 6, 6), 0.5, "gaussian", lambda patch: (seen.append(patch), patch)[1]):
        pass
    (corner,) = w.tiles((5, 3, 6), (5, 6, 6))
    assert np.array_equal(w.cut(volume, corner, (5, 6, 6)), seen[0])


def test_evenly_drawn_places_are_spread_and_all_where_they_fit() -> None:
    assert w.evenly_drawn(3, 5) == [0, 1, 2]
    assert w.evenly_drawn(10, 2) == [2, 7]
