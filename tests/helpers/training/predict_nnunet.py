"""Answer scans with nnU-Net's own predictor: `python predict_nnunet.py SCANS MODEL … [--draw]`.

Runs in a process of its own, with the folder that has nnunetv2 on PYTHONPATH: Locum does not depend on it.
MODEL is a trainer's folder, beside which the folder `masks` is made. `--draw` puts random weights of
nnU-Net's own network into its checkpoints first. SCANS has nnU-Net's file names (case_0000.nii.gz).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def main() -> None:
    """Draw weights where that is asked, and predict every case."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("scans", type=Path)
    arguments.add_argument("models", type=Path, nargs="+")
    arguments.add_argument("--draw", action="store_true")
    arguments.add_argument("--no-mirror", dest="mirror", action="store_false")
    asked = arguments.parse_args()
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(asked.scans)
    os.environ |= {"nnUNet_compile": "f", "MPLBACKEND": "Agg"}

    import torch

    torch.set_num_threads(1)
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    cases = sorted({scan.name.rpartition("_")[0] for scan in asked.scans.glob("*.nii.gz")})
    for model in asked.models:
        if asked.draw:
            draw(model)
        predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False, use_mirroring=asked.mirror)
        predictor.initialize_from_trained_model_folder(str(model), None)
        masks = model.parent / "masks"
        masks.mkdir()
        predictor.predict_from_files_sequential(
            [[str(scan) for scan in sorted(asked.scans.glob(f"{case}_????.nii.gz"))] for case in cases],
            [str(masks / case) for case in cases],
            overwrite=True,
        )


def draw(model: Path) -> None:
    """Put random weights of the network of plans.json into every checkpoint, under all of their names."""
    import torch
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    described = json.loads((model / "dataset.json").read_text())
    plans = PlansManager(json.loads((model / "plans.json").read_text()))
    for seed, file in enumerate(sorted(model.glob("fold_*/checkpoint_final.pth"))):
        checkpoint = torch.load(file, weights_only=False)
        configuration = plans.get_configuration(checkpoint["init_args"]["configuration"])
        torch.manual_seed(seed)
        network = get_network_from_plans(
            configuration.network_arch_class_name,
            configuration.network_arch_init_kwargs,
            configuration.network_arch_init_kwargs_req_import,
            len(described["channel_names"]),
            plans.get_label_manager(described).num_segmentation_heads,
            allow_init=False,
            deep_supervision=True,
        )
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        torch.save({**checkpoint, "network_weights": network.state_dict()}, file)


if __name__ == "__main__":
    main()
