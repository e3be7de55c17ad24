"""Plan with the installed nnU-Net: reads JSON lines of fingerprints from stdin, writes its plans to stdout.

Run with nnunetv2 importable. Each line has `spacings`, `shapes`, `classes`, `channels` and `gigabytes`, and
optionally `features` and `most_features`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

WORK = Path(tempfile.mkdtemp())
for part in ("raw", "preprocessed", "results"):
    (WORK / part).mkdir()
    os.environ[f"nnUNet_{part}"] = str(WORK / part)
os.environ["nnUNet_n_proc_DA"] = "1"  # noqa: SIM112 - nnU-Net's own name

import torch  # noqa: E402
from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner  # noqa: E402

NAME = "Dataset001_Made"


def plan(said: dict[str, Any]) -> dict[str, Any]:
    """nnU-Net's plan of its `3d_fullres` network, with the transposition that it computes in."""
    raw, preprocessed = WORK / "raw" / NAME, WORK / "preprocessed" / NAME
    for folder in (raw / "imagesTr", raw / "labelsTr", preprocessed):
        folder.mkdir(parents=True, exist_ok=True)
    for i in range(said["channels"]):
        (raw / f"imagesTr/case_{i:04}.nii.gz").touch()
    (raw / "labelsTr/case.nii.gz").touch()
    dataset = {
        "channel_names": {str(i): name for i, name in enumerate(said["names"])},
        "labels": {"background": 0, **{f"label{i}": i for i in range(1, said["classes"])}},
        "numTraining": len(said["spacings"]),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "SimpleITKIO",
    }
    (raw / "dataset.json").write_text(json.dumps(dataset))
    fingerprint = {
        "spacings": said["spacings"],
        "shapes_after_crop": said["shapes"],
        "median_relative_size_after_cropping": said["kept"],
        "foreground_intensity_properties_per_channel": {},
    }
    (preprocessed / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))
    (preprocessed / "nnUNetPlans.json").unlink(missing_ok=True)
    planner = default_experiment_planner.ExperimentPlanner(NAME, said["gigabytes"])
    planner.lowres_creation_threshold = 0.0  # no second network of lower resolution
    planner.UNet_base_num_features = said.get("features", 32)
    planner.UNet_max_features_3d = said.get("most_features", 320)
    # Only shapes are needed: no weights are drawn.
    with redirect_stdout(StringIO()), torch.device("meta"):
        plans = planner.plan_experiment()
    return {"transpose": plans["transpose_forward"], **plans["configurations"]["3d_fullres"]}


for line in sys.stdin:
    print(json.dumps(plan(json.loads(line))), flush=True)
