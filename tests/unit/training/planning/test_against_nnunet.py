"""The planner against nnU-Net's own, where nnunetv2 is installed: LOCUM_NNUNET names a folder that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.planning.planner import Budget, Intensities, Summary, plan_volumes

FOLDER = os.environ.get("LOCUM_NNUNET", "")
HELPER = Path(__file__).parents[3] / "helpers" / "nnunet_planner.py"
pytestmark = pytest.mark.skipif(
    not (FOLDER and (Path(FOLDER) / "nnunetv2").is_dir()) and find_spec("nnunetv2") is None,
    reason="nnunetv2 is not installed; LOCUM_NNUNET names a folder that has it",
)


def made_up(seed: int) -> dict[str, Any]:
    """A random federation's cases: isotropic, thick slices, cubes, slabs; an odd number of them.

    The median of an odd number of rounded values is the rounded median, so that nothing is lost by medians.
    """
    draw = np.random.default_rng(seed)
    cases = int(draw.integers(1, 60)) * 2 + 1
    spacing = np.exp(draw.uniform(np.log(0.3), np.log(3), 3))
    shape = np.exp(draw.uniform(np.log(20), np.log(600), 3))
    if seed % 2:
        axis = draw.integers(3)
        spacing[axis], shape[axis] = spacing.max() * draw.uniform(1, 9), draw.uniform(6, 60)
    if seed % 5 == 0:
        spacing = np.full(3, spacing[0])
    spacings = np.round(spacing * np.exp(draw.normal(0, draw.choice([0, 0.05, 0.3]), (cases, 3))), 4)
    shapes = np.maximum(np.round(shape * np.exp(draw.normal(0, 0.2, (cases, 3)))), 5)
    channels = int(draw.integers(1, 5))
    return {
        "spacings": spacings.tolist(),
        "shapes": shapes.astype(int).tolist(),
        "classes": int(draw.integers(2, 20)),
        "channels": channels,
        "names": [str(draw.choice(["CT", "t1", "flair"])) for _ in range(channels)],
        "kept": float(draw.uniform(0.3, 1)),
        "gigabytes": float(draw.choice([2, 4, 8, 11, 24, 40])),
        "features": int(draw.choice([8, 16, 32])),
        "most_features": int(draw.choice([64, 256, 320])),
    }


def summarised(said: dict[str, Any]) -> Summary:
    """The exact percentiles of those cases."""
    spacings, shapes = np.array(said["spacings"]), np.array(said["shapes"], dtype=float)
    ct = Intensities(-40, 93, 201, 90, 45)
    return Summary(
        cases=len(spacings),
        spacing=tuple(np.percentile(spacings, 50, 0)),
        finest=tuple(np.percentile(spacings, 10, 0)),
        shape=tuple(np.percentile(shapes, 50, 0)),
        extent=tuple(np.median(spacings * shapes, 0)),
        kept=said["kept"],
        intensities=tuple(ct if name == "CT" else None for name in said["names"]),
    )


@pytest.mark.process
@pytest.mark.timeout(1800)  # nnU-Net builds thousands of networks: two minutes of a free core
def test_plans_are_those_of_nnunet_on_random_fingerprints() -> None:
    asked = [made_up(seed) for seed in range(200)]
    environment = os.environ | {"PYTHONPATH": FOLDER, "OMP_NUM_THREADS": "1"}
    answered = subprocess.run(
        [sys.executable, "-W", "ignore", str(HELPER)],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert answered.returncode == 0, answered.stderr[-3000:]
    theirs = [json.loads(line) for line in answered.stdout.splitlines()]
    assert len(theirs) == len(asked)
    batches, stages = set(), set()
    for seed, (said, expected) in enumerate(zip(asked, theirs, strict=True)):
        budget = Budget("any", said["gigabytes"], said["features"], said["most_features"])
        plan = plan_volumes(summarised(said), said["classes"], budget)
        order = expected["transpose"]

        def moved(values: Any, order: list[int] = order) -> list[Any]:
            return [values[axis] for axis in order]

        found = {
            "spacing": pytest.approx(moved(plan.spacing), rel=1e-12),
            "median_image_size_in_voxels": moved(plan.shape),
            "patch_size": moved(plan.patch),
            "batch_size": plan.batch,
            "normalization_schemes": [
                "CTNormalization" if channel.ct else "ZScoreNormalization" for channel in plan.channels
            ],
            "use_mask_for_norm": [channel.nonzero for channel in plan.channels],
        }
        assert {name: expected[name] for name in found} == found, seed
        network = expected["architecture"]["arch_kwargs"]
        assert network["kernel_sizes"] == [moved(kernel) for kernel in plan.network.kernels], seed
        assert network["strides"] == [moved(stride) for stride in plan.network.strides], seed
        assert network["features_per_stage"] == list(plan.filters), seed
        batches.add(plan.batch)
        stages.add(plan.network.stages)
    # The made-up cases reach more than one answer.
    assert len(batches) > 5
    assert len(stages) >= 4
