"""Small federations of volumes that were really trained: bright balls on noise, in two channels or one.

`balls` is a routing space of two sites' models and a global one, with batch norm, and knows how far its
members are apart. `steady` is one with instance norm that tracks; `still` one with instance norm that does
not, and is not trained. `ball` is a plain model, and `pair` one of two channels, which may come stacked in
one file. Patches have 16x16x8 voxels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from model_store.guard import ReferenceStatistics, summarise
from model_store.manifest import Lineage, NetworkSpec
from model_store.preprocessing import prepare_volume
from model_store.preprocessing.windows import cut, tiles
from model_store.scan import Scan
from model_store.store import Store
from model_store.task import Task

PATCH = (16, 16, 8)
SITES = ("aster", "birch")
AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])
BALLS = Task.model_validate(
    {
        "name": "balls",
        "labels": {"ball": [1]},
        "normalisation": {"scope": "volume", "method": "zscore"},
        "geometry": {"spacing": [1, 1, 2], "patch": PATCH},
    }
)
PAIR = Task.model_validate(
    {
        **BALLS.model_dump(mode="json", exclude={"normalisation", "channels"}),
        "name": "pair",
        "channels": [{"name": each, "normalisation": {"method": "zscore"}} for each in ("T1", "FLAIR")],
        "stacked": True,
    }
)


def volume(
    patient: int, channels: int = 1, *, gain: float = 1.0, blur: float = 0.0
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Voxels [I, J, K] (of several channels [I, J, K, C]) and mask of a patient.

    `gain` and `blur` are the scanner's: how bright a ball is, and the deviation of its point spread.
    """
    draw = np.random.default_rng(patient)
    sides = draw.integers((18, 17, 8), (26, 22, 12))
    places = np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), axis=-1)
    centre = sides / 2 + draw.uniform(-2, 2, 3)
    mask = ((((places - centre) * (1, 1, 2)) ** 2).sum(axis=-1) < 36).astype(np.uint8)
    seen = [
        ndimage.gaussian_filter(100 + 20 * draw.normal(size=sides) + gain * 60 * mask, blur)
        for _ in range(channels)
    ]
    voxels = np.stack(seen, axis=-1).astype(np.int16)
    return (voxels[..., 0] if channels == 1 else voxels), mask


def nifti(values: NDArray[Any]) -> bytes:
    image = nib.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())


def scans(
    count: int, first: int = 500, channels: int = 1, *, blur: float = 0.0
) -> dict[str, tuple[bytes, bytes]]:
    """Name -> files of scan and mask of patients that no site has seen."""
    made = {}
    for patient in range(first, first + count):
        voxels, mask = volume(patient, channels, blur=blur)
        made[f"patient-{patient}.nii"] = nifti(voxels), nifti(mask)
    return made


def publish_volumes(root: Path) -> None:
    """Train and publish all of them, in some seconds."""
    import torch

    torch.set_num_threads(1)
    _publish(root, "balls", BALLS, "batch", "routing-space")
    _publish(root, "steady", BALLS, ["instance", {"track": True}], "routing-space")
    _publish(root, "still", BALLS, "instance", "routing-space", steps=0)
    _publish(root, "ball", BALLS, "instance", "model")
    _publish(root, "pair", PAIR, "batch", "model", steps=20)


def _publish(root: Path, name: str, task: Task, norm: Any, kind: str, *, steps: int = 40) -> None:
    import torch

    from personalization.iop_fl.batch_norm import profile
    from personalization.iop_fl.spread import FILE, Spread, sent_by
    from personalization.networks import build, initialise
    from personalization.networks.capabilities import moving_norms
    from personalization.state import clone
    from training.algorithm import ModelDraft, Publication
    from training.publish import Origin, publish

    data, summaries, sent = {}, [], []
    for offset, site in enumerate(SITES):
        parts: list[tuple[NDArray[np.float32], NDArray[np.uint8]]] = []
        patients: list[int] = []
        for patient in range(100 * offset, 100 * offset + 4):
            voxels, mask = volume(patient, task.channel_count, gain=1.0 + 0.2 * offset)
            scan = Scan(voxels.reshape(*mask.shape, -1), AFFINE, "nifti", mm_per_unit=1.0)
            prepared = prepare_volume(scan, task)
            for corner in tiles(prepared.grid.shape, PATCH):
                parts.append((cut(prepared.volume, corner, PATCH), cut(mask, corner, PATCH)))
                patients.append(patient)
            summaries.append(ReferenceStatistics.of(summarise(scan, prepared)))
        images, targets = (torch.from_numpy(np.stack(each)) for each in zip(*parts, strict=True))
        data[site] = images, targets, patients
    arguments: Mapping[str, Any] = {
        "in_channels": task.in_channels,
        "classes": 2,
        "spatial_dims": 3,
        "width": 4,
        "strides": [1, 2, 2],
        "norm_name": norm,
    }
    spec = NetworkSpec(name="monai.dynunet", arguments=dict(arguments))
    network = initialise(build(spec.name, **arguments), torch.Generator().manual_seed(0))
    everyone = [torch.cat(each) for each in zip(*(own[:2] for own in data.values()), strict=True)]
    _train(network, *everyone, steps=steps)
    shared = clone(network.state_dict())
    models = [ModelDraft("global", spec, shared)]
    files = {}
    if kind == "routing-space":
        for site, (images, targets, patients) in data.items():
            network.load_state_dict(shared)
            if moving_norms(network):
                sent.append(sent_by(profile(network, images, patients), None))
            _train(network, images, targets, steps=steps // 5)
            models.append(ModelDraft("inside", spec, clone(network.state_dict()), site))
        if sent:
            mean = {each: torch.stack([one[each] for one in sent]).mean(dim=0) for each in sent[0]}
            files[FILE] = Spread.of(tuple(moving_norms(network)), mean, len(sent)).to_bytes()
    lineage = Lineage(method="iop-fl", run="test", sites=SITES, rounds=1, seed=0)
    statistics = reduce(ReferenceStatistics.merge, summaries)
    publication = Publication(kind, tuple(models), statistics=statistics, files=files)
    publish(Store(root), Origin(name, task, lineage), publication)


def _train(network: Any, images: Any, targets: Any, steps: int) -> None:
    import torch

    from personalization.losses import cross_entropy, soft_dice_loss

    network.train()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        chosen = torch.randint(len(images), (8,), generator=generator)
        logits = network(images[chosen])
        loss = soft_dice_loss(logits, targets[chosen]) + cross_entropy(logits, targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
