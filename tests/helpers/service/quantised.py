"""A U-Net that was trained on bright discs, as an artefact, and scans of patients for it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image

from model_store.manifest import Lineage, ModelManifest, NetworkSpec
from model_store.task import Normalisation, Task
from personalization.export import to_onnx
from personalization.losses import soft_dice_loss
from personalization.networks import build, initialise
from tests.helpers.personalization.discs import discs

TASK = Task(
    name="discs",
    labels={"disc": (1,)},
    normalisation=Normalisation(scope="image", method="zscore"),
    size=(32, 32),
    colour="luminance",
    patient="^(?P<patient>[a-z]+)",
)
ARGUMENTS = {"in_channels": 1, "classes": 2, "width": 4}


@dataclass
class Scan:
    name: str
    content: bytes

    def read(self) -> bytes:
        return self.content


def scans(patients: int, each: int = 2) -> list[Scan]:
    images, _ = discs(patients * each, seed=7, contrast=3.0)
    found = []
    for index, image in enumerate(images[:, 0].numpy()):
        stream = io.BytesIO()
        grey = np.clip(64 + 32 * image, 0, 255).astype(np.uint8)
        Image.fromarray(grey).save(stream, "PNG")
        found.append(Scan(f"{chr(97 + index // each)}_{index}.png", stream.getvalue()))
    return found


@cache
def graph_of(steps: int) -> bytes:
    """A U-Net that was trained on discs for so many steps."""
    network = initialise(build("unet", **ARGUMENTS), torch.Generator().manual_seed(0)).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    for step in range(steps):
        images, truth = discs(8, 100 + step, contrast=3.0)
        flat = images.flatten(1)
        images = (images - flat.mean(1)[:, None, None, None]) / flat.std(1)[:, None, None, None]
        optimiser.zero_grad()
        soft_dice_loss(network(images), truth).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return to_onnx(network.eval(), 1, (32, 32))


def manifest(name: str = "discs", task: Task = TASK) -> ModelManifest:
    return ModelManifest(
        name=name,
        task=task,
        network=NetworkSpec(name="unet", arguments=dict(ARGUMENTS)),
        lineage=Lineage(method="by-hand", run="test", sites=("A",), rounds=1, seed=0),
    )
