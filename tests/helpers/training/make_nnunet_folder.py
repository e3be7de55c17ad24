"""Train a small nnU-Net and predict with it: `python make_nnunet_folder.py OUT [--folds N] [--regions]`.

Runs in a process of its own, with the folder that has nnunetv2 on PYTHONPATH: Locum does not depend on it.
Writes OUT/model (what nnU-Net's users share), OUT/scans and OUT/masks: what `nnUNetPredictor` answers for
each scan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import nibabel
import numpy as np

NAME = "Dataset047_Blobs"


def phantom(generator: np.random.Generator, sides: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """An image and its mask: an ellipsoid (label 1) with a smaller one inside (label 2), and noise."""
    grid = np.stack(np.meshgrid(*(np.arange(side) for side in sides), indexing="ij"))
    centre = np.array(sides) / 2 + generator.uniform(-3, 3, 3)
    radii = np.array(sides) * generator.uniform(0.22, 0.34, 3)
    distance = np.sqrt((((grid - centre[:, None, None, None]) / radii[:, None, None, None]) ** 2).sum(0))
    mask = (distance < 1).astype(np.uint8) + (distance < 0.5).astype(np.uint8)
    image = np.array([40.0, 110.0, 170.0])[mask] + generator.normal(0, 12, sides)
    return image.astype(np.float32), mask


def save(path: Path, array: np.ndarray, spacing: tuple[float, float, float]) -> None:
    """Save with oblique-free but flipped axes, as many scanners do."""
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    affine[:3, 3] = (40, 35, -20)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(array, affine).to_filename(path)


def link_case(data: Path, index: int, dataset: Path | None, scans: Path) -> None:
    """Link the case of this index of a folder of images and labels, to train on or, without, to predict."""
    name = sorted(path.name for path in (data / "images").iterdir())[index]
    images = scans if dataset is None else dataset / "imagesTr"
    for folder, source, target in (
        (images, data / "images" / name, f"blob_{index:03}_0000.nii.gz"),
        *(
            ()
            if dataset is None
            else ((dataset / "labelsTr", data / "labels" / name, f"blob_{index:03}.nii.gz"),)
        ),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / target).symlink_to(source)


def main() -> None:
    """Make the data set, plan, train each fold for a few steps, predict two other scans."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--folds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--rate", type=float, default=0.01)
    arguments.add_argument("--regions", action="store_true")
    arguments.add_argument("--data", type=Path, help="A folder with images and labels, in place of phantoms.")
    arguments.add_argument("--spacing", type=float, nargs=3, default=(1.0, 1.0, 1.0))
    asked = arguments.parse_args()
    out: Path = asked.out.resolve()
    spacing = tuple(asked.spacing)
    for name in ("raw", "preprocessed", "results"):
        (out / name).mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{name}"] = str(out / name)
    os.environ |= {"nnUNet_compile": "f", "MPLBACKEND": "Agg"}

    generator = np.random.default_rng(47)
    dataset = out / "raw" / NAME
    for index in range(8):
        trained = index < 6
        if asked.data is not None:
            link_case(asked.data.resolve(), index, dataset if trained else None, out / "scans")
            continue
        sides = tuple(int(side) for side in generator.integers(30, 42, 3))
        image, mask = phantom(generator, sides)
        folder = dataset / "imagesTr" if trained else out / "scans"
        save(folder / f"blob_{index:03}_0000.nii.gz", image, spacing)
        if trained:
            save(dataset / "labelsTr" / f"blob_{index:03}.nii.gz", mask, spacing)
    labels = (
        {"background": 0, "outer": [1, 2], "inner": 2}
        if asked.regions
        else {"background": 0, "shell": 1, "core": 2}
    )
    content = {
        "channel_names": {"0": "T1"},
        "labels": labels,
        "numTraining": 6,
        "file_ending": ".nii.gz",
        **({"regions_class_order": [1, 2]} if asked.regions else {}),
    }
    (dataset / "dataset.json").write_text(json.dumps(content))

    import torch

    torch.set_num_threads(1)
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    extract_fingerprints([47], num_processes=1, check_dataset_integrity=False)
    plan_experiments([47])
    plans_file = out / "preprocessed" / NAME / "nnUNetPlans.json"
    plans = json.loads(plans_file.read_text())
    configuration = plans["configurations"]["3d_fullres"]
    network = configuration["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [min(32, 4 * 2**stage) for stage in range(network["n_stages"])]
    # Windows that are smaller than the scans: several of them, which overlap.
    configuration["patch_size"] = [max(16, side // 2 // 8 * 8) for side in configuration["patch_size"]]
    if any(side % 8 for side in configuration["patch_size"]):
        sys.exit("the patch does not fit")
    plans_file.write_text(json.dumps(plans))
    preprocess([47], configurations=("3d_fullres",), num_processes=(1,))

    os.environ |= {"nnUNet_n_proc_DA": "0"}
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    trainers = []
    for fold in range(asked.folds):
        torch.manual_seed(fold)
        np.random.seed(fold)
        plans = json.loads(plans_file.read_text()) | {"continue_training": False}
        trainer = nnUNetTrainer(plans, "3d_fullres", fold, content, device=torch.device("cpu"))
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = (
            1,
            asked.steps,
            1,
        )
        trainer.initial_lr = asked.rate
        trainer.run_training()
        trainers.append(trainer)
    trained_to = Path(trainers[0].output_folder_base)
    for fold in range(asked.folds):
        for leftover in ("checkpoint_best.pth", "progress.png", "checkpoint_latest.pth"):
            (trained_to / f"fold_{fold}" / leftover).unlink(missing_ok=True)
    trained_to.rename(out / "model")

    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    weights = []
    for fold in range(asked.folds):
        checkpoint = torch.load(out / "model" / f"fold_{fold}" / "checkpoint_final.pth", weights_only=False)
        weights.append(checkpoint["network_weights"])
    first = trainers[0]
    first.set_deep_supervision_enabled(False)
    predictor.manual_initialization(
        first.network, first.plans_manager, first.configuration_manager, weights, content,
        "nnUNetTrainer", checkpoint["inference_allowed_mirroring_axes"],
    )  # fmt: skip
    (out / "masks").mkdir(exist_ok=True)
    scans = sorted((out / "scans").iterdir())
    predictor.predict_from_files_sequential(
        [[str(scan)] for scan in scans],
        [str(out / "masks" / scan.name.replace("_0000.nii.gz", "")) for scan in scans],
        overwrite=True,
    )


if __name__ == "__main__":
    main()
