"""A cell of `picking`: train without one hospital, then pick a cluster for every outside hospital."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.cells import Cell
from model_store.preprocessing import prepare
from model_store.scan import Scan
from personalization.fedbicross.picking import costs, observe, stability
from personalization.options.picking import CRITERIA
from training.config import RunConfig
from training.data.federation import load_federation
from training.local.networks import network_of
from training.methods.fedbicross.config import FedBiCrossConfig
from training.phantom.shapes import (
    HOSPITALS,
    TASK,
    TRAINING,
    Camera,
    PhantomHospital,
    image_seed,
    make_shape,
    write_shapes,
)
from training.run import Run, execute

# Hospitals that are in no federation, with cameras and shares of the classes of their own.
STRANGERS: Mapping[str, PhantomHospital] = {
    "oak": PhantomHospital(Camera(contrast=70, level=90, noise=22), (0.2, 0.6, 0.2)),
    "pine": PhantomHospital(Camera(contrast=120, level=60, noise=14, slope=30), (0.1, 0.1, 0.8)),
    "rowan": PhantomHospital(Camera(contrast=80, level=170, noise=20, inverted=True), (0.5, 0.4, 0.1)),
    "sorrel": PhantomHospital(
        Camera(contrast=120, level=200, noise=12, slope=-40, inverted=True), (1.0, 0.0, 0.0)
    ),
}


def images_of(name: str, hospital: PhantomHospital, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The network's input [N, C, H, W] and the true classes [N] of a hospital's images."""
    bounds = np.rint(np.cumsum(hospital.shares) * count).astype(int)
    labels = np.searchsorted(bounds, np.arange(count), side="right")
    side, slices = TASK.size[0], []
    for index, label in enumerate(labels):
        picture = make_shape(hospital.camera, int(label), side, image_seed(seed, name, index))
        slices.append(prepare(Scan(picture[..., None], None, "png"), TASK).slices)
    return torch.from_numpy(np.concatenate(slices)), torch.from_numpy(labels)


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Train without a hospital; for each outside one, all costs and the clusters' accuracies."""
    seed = cell["seed"]
    root = work / "federation"
    if not root.exists():
        write_shapes(root, images_per_site=cell["images"], seed=seed)
    config = FedBiCrossConfig(**{**TRAINING, **cell["training"]})
    settings = RunConfig(seed=seed, leave_out=(cell["outside"],))
    job = Run(load_federation(root), "fedbicross", config, settings)
    result = execute(job, work / "run", workers=0, resume=(work / "run").exists())
    networks = {
        str(draft.cluster): network_of(draft.network, dict(draft.weights), torch.device("cpu"))
        for draft in result.publication.models
        if draft.cluster is not None
    }
    outside = {cell["outside"]: HOSPITALS[cell["outside"]], **STRANGERS}
    found = {}
    for name, hospital in outside.items():
        images, labels = images_of(name, hospital, cell["cohort"], seed + 1000)
        observed = {cluster: observe(network, images) for cluster, network in networks.items()}
        found[name] = {
            "accuracies": {
                cluster: float((own.answers.argmax(dim=1) == labels).double().mean())
                for cluster, own in observed.items()
            },
            "costs": {criterion: costs(criterion, observed) for criterion in CRITERIA},
            "stability": {
                criterion: stability(criterion, observed, torch.arange(len(images)), _draw(), draws=50)
                for criterion in CRITERIA
            },
        }
    return {"assignment": result.publication.composite["assignment"], "hospitals": found}


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)
