"""The planner on cases that were computed by hand, or that nnU-Net's authors and users measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.planning.planner import BUDGETS, Budget, Summary, advise, plan_volumes, target_spacing
from training.planning.topology import dynunet_arguments, feature_map_values, features, topology

HIPPOCAMPUS = Summary(8, (1, 1, 1), (1, 1, 1), (36, 50, 35), (36, 50, 35), 1.0)


def test_hippocampus_has_the_plan_that_nnunet_makes() -> None:
    # Measured with nnunetv2 2.8.1 on 8 volumes: patch 40x56x40, batch 2 by the 5 % rule, 4 stages.
    plan = plan_volumes(HIPPOCAMPUS, 3, BUDGETS["gpu-8gb"])
    assert plan.patch == (40, 56, 40)
    assert plan.batch == 2
    assert plan.network.stages == 4
    assert {*plan.network.kernels} == {(3, 3, 3)}
    assert plan.filters == (32, 64, 128, 256)


def test_a_laptop_has_the_same_patch_and_a_narrower_network() -> None:
    laptop, gpu = (plan_volumes(HIPPOCAMPUS, 3, BUDGETS[name]) for name in ("laptop", "gpu-8gb"))
    assert laptop.network == gpu.network
    assert laptop.filters == (16, 32, 64, 128)


def test_thick_axis_joins_when_its_voxels_are_no_longer_coarse() -> None:
    # 0.6 x 0.6 x 3.6 mm: twice pooled in plane gives 2.4 mm, less than a factor 2 from 3.6.
    found = topology((0.6, 0.6, 3.6), (320, 320, 20))
    assert found.strides[:4] == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2))
    assert found.kernels[:3] == ((3, 3, 1), (3, 3, 1), (3, 3, 3))
    assert found.patch == (320, 320, 20)


def test_an_axis_that_would_be_pooled_alone_needs_twelve_voxels() -> None:
    assert topology((1, 1, 1), (7, 7, 11)).stages == 1
    assert topology((1, 1, 1), (7, 7, 12)).strides == ((1, 1, 1), (1, 1, 2))


def test_feature_maps_are_counted_as_by_hand() -> None:
    found = topology((1, 1), (8, 8))
    assert found.strides == ((1, 1), (2, 2))
    # Encoder: 2 x 4 x 64 and 2 x 8 x 16; decoder: transposed and 2 convolutions, 3 x 4 x 64; output 3 x 64.
    assert feature_map_values(found, features(2, 4, 8), 3) == 512 + 256 + 768 + 192


def test_thick_axis_takes_the_tenth_percentile_but_never_below_the_others() -> None:
    thick = Summary(10, (1.5, 1.5, 10), (1.5, 1.5, 5), (200, 200, 10), (300, 300, 100), 1.0)
    assert target_spacing(thick) == (1.5, 1.5, 5)
    assert target_spacing(replace(thick, finest=(1.5, 1.5, 1))) == (1.5, 1.5, 1.5 + 1e-5)
    assert target_spacing(replace(thick, shape=(200, 200, 70))) == (1.5, 1.5, 10)


def test_smaller_budgets_have_smaller_patches_and_never_fail() -> None:
    body = Summary(50, (0.8, 0.8, 1), (0.8, 0.8, 1), (512, 512, 400), (409.6, 409.6, 400), 1.0)
    voxels = []
    for gigabytes in (80, 8, 1, 0.3, 1e-6):
        plan = plan_volumes(body, 3, Budget("any", gigabytes))
        assert all(side % by == 0 for side, by in zip(plan.patch, plan.network.divisor, strict=True))
        voxels.append(plan.patch[0] * plan.patch[1] * plan.patch[2])
    assert voxels == sorted(voxels, reverse=True)
    assert len({*voxels}) == len(voxels)


def test_axes_may_come_in_any_order() -> None:
    thick = Summary(40, (0.6, 0.6, 3.6), (0.6, 0.6, 3.0), (320, 320, 20), (192, 192, 72), 1.0)
    turned = Summary(40, (3.6, 0.6, 0.6), (3.0, 0.6, 0.6), (20, 320, 320), (72, 192, 192), 1.0)
    there, back = (plan_volumes(each, 2, BUDGETS["gpu-8gb"]) for each in (thick, turned))
    assert there.patch == (*back.patch[1:], back.patch[0])
    assert there.network.strides == tuple((y, z, x) for x, y, z in back.network.strides)


@pytest.mark.parametrize(
    ("summary", "dimensions", "word"),
    [
        (HIPPOCAMPUS, 3, "all directions"),
        (Summary(9, (1, 1, 5), (1, 1, 5), (256, 256, 1), (256, 256, 5), 1.0), 2, "single slices"),
        (Summary(9, (1, 1, 8), (1, 1, 8), (256, 256, 6), (256, 256, 48), 1.0), 2, "6 slices 8.0 times"),
        (Summary(9, (0.6, 0.6, 3.6), (0.6, 0.6, 3.6), (320, 320, 20), (192, 192, 72), 1.0), 3, "6.0 times"),
    ],
)
def test_advice_says_slices_or_volumes_and_why(summary: Summary, dimensions: int, word: str) -> None:
    found, why = advise(summary)
    assert found == dimensions
    assert word in why


def test_dynunet_gets_lists_by_stage() -> None:
    assert dynunet_arguments((1, 1, 1), (8, 8, 8), 8) == {
        "kernel_size": [[3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [2, 2, 2]],
        "filters": [8, 16],
        "trans_bias": True,
    }


def test_medians_that_do_not_belong_together_still_give_a_plan() -> None:
    for extent in (0.05, 1.0, 4096 * 50.0):
        found = replace(HIPPOCAMPUS, spacing=(50, 50, 50), finest=(0.05, 0.05, 0.05), extent=(extent,) * 3)
        assert min(plan_volumes(found, 3, BUDGETS["laptop"]).shape) >= 1
