"""The Dice of members' test patients is that of the service's masks, computed by SimpleITK.

The network sees slices of another size than the scans', and the task keeps the largest component alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from model_store.manifest import GRAPH
from model_store.scan import Limits
from model_store.store import Store
from service.inference.pipeline import Stopwatch, read, segment
from service.inference.sessions import GraphSession
from tests.helpers.service.independent_dice import mean_dice
from tests.helpers.training.backbones import publish, unet
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.registry import method
from training.run import Run, execute

SMALL = {"width": 4, "rounds": 3, "batch_size": 8, "least_steps": 15, "learning_rate": 0.02, "heads": 2}


@pytest.mark.parametrize("name", ["fedavg", "fedins"])
def test_members_test_dice_is_that_of_the_answers(
    name: str, phantom_federation: Path, tmp_path: Path
) -> None:
    loaded = load_federation(phantom_federation)
    task = loaded.task.model_copy(update={"size": (48, 48), "keep_largest": tuple(loaded.task.labels)})
    federation = replace(loaded, task=task)
    chosen = method(name)
    config = chosen.config.model_validate(
        {key: value for key, value in SMALL.items() if key in chosen.config.model_fields}
    )
    store = Store(tmp_path / "store")
    if name == "fedins":
        # Slices of a scan pick their entries together.
        publish(store.root, task, unet(task), "base")
        config = config.pinned(store, task, "phantom")
    settings = RunConfig(seed=2, leave_out=("cedar",), consent="all")
    result = execute(Run(federation, name, config, settings), tmp_path / "run", workers=0, store=store)
    stated: dict[str, Any] = {
        site: entry.metrics["test_dice"]
        for row in result.history
        if row.phase == "test"
        for site, entry in row.sites.items()
    }
    network: Any = store.open("phantom")
    session = GraphSession(network.manifest.files[GRAPH].sha256, network.read(GRAPH), threads=1, device="cpu")
    for site in result.run.sites():
        pairs = []
        for case in site.of_split("test"):
            scan, mask = case.images[0], nib.load(case.mask)
            reading = read(scan.read_bytes(), network.manifest, Limits(), Stopwatch())
            classes = segment(reading, network.manifest, session, Stopwatch()).classes
            assert len(np.unique(classes)) > 1
            found = nib.Nifti1Image(classes, mask.affine)
            truth = nib.Nifti1Image(np.asarray(mask.dataobj).astype(np.uint8), mask.affine)
            pairs.append((found.to_bytes(), truth.to_bytes()))
        assert pairs
        assert stated[site.name] == pytest.approx(mean_dice(tmp_path, pairs), abs=1e-6)
