"""Two small federations that FedBiCross really trained: `shapes` in grey, `stains` in colour.

`shapes` has two clusters. `stains` has one, and its model is a global one. The networks see 20x16: no picture
has this size, and it is not square, so a turned or squeezed picture gets another answer.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from model_store.store import Store
from training.phantom.shapes import TASK, write_shapes

SHAPES = TASK.model_copy(update={"size": (20, 16), "colour": "luminance"})
STAINS = SHAPES.model_copy(update={"name": "stains", "channels": 3, "colour": "refuse"})
SITES = {"shapes": ("elm", "hazel", "fir"), "stains": ("elm", "maple")}
# Who agreed to the export of a personal model: fir is served its cluster's.
EXPORTED = {"shapes": ("elm", "hazel"), "stains": ("maple",)}
_SIDE = 24
_CONFIG: dict[str, Any] = {
    "width": 2,
    "local_epochs": 8,
    "batch_size": 8,
    "learning_rate": 0.02,
    "probes": 8,
    "epochs": 1,
    "steps": 2,
    "synthesis_batch": 6,
    "outer_steps": 1,
    "personal_epochs": 2,
}


def publish_clusters(root: Path) -> None:
    """Train and publish both, with a model per cluster and a personal one per hospital that agreed."""
    import torch

    from training.config import RunConfig
    from training.data.federation import load_federation
    from training.methods.fedbicross.config import FedBiCrossConfig
    from training.run import Run, execute

    torch.set_num_threads(1)
    for task, clusters in ((SHAPES, 2), (STAINS, None)):
        with TemporaryDirectory() as aside:
            data = write_shapes(Path(aside, "data"), SITES[task.name], images_per_site=16, size=_SIDE)
            task.dump(data / "task.yaml")
            if task is STAINS:
                for path in data.glob("*/*/*.png"):
                    _stain(path)
            run = Run(
                load_federation(data),
                "fedbicross",
                FedBiCrossConfig(**_CONFIG, clusters=clusters),
                RunConfig(seed=1, consent=EXPORTED[task.name]),
            )
            execute(run, Path(aside, "run"), workers=0, store=Store(root))


def _stain(path: Path) -> None:
    """Each class in a colour of its own, so that the order of the channels matters."""
    pixels = np.asarray(Image.open(path))
    colours = np.stack([pixels, pixels // 3, 255 - pixels], axis=-1)
    turn = TASK.class_names.index(path.parent.name)
    Image.fromarray(np.roll(colours, turn, axis=-1)).save(path)
