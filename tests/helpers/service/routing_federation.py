"""A small federation that was really trained: `organ`, a routing space of two sites' models and a global one.

Its task is the phantom's at 32x32. The networks are U-Nets of width 4: the global one has seen both scanners
for some seconds, each inside model a little more of its own one.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_store.guard import ReferenceStatistics, summarise
from model_store.manifest import Lineage, NetworkSpec
from model_store.preprocessing import prepare, prepare_mask
from model_store.scan import Scan
from model_store.store import Store
from training.phantom import SCANNERS, TASK, make_volume
from training.phantom.federation import nifti_bytes

SIZE = 32
ORGAN = TASK.model_copy(update={"size": (SIZE, SIZE)})
SITES = ("aster", "birch")
ARGUMENTS: dict[str, int] = {"in_channels": 1, "classes": 2, "width": 4}


def volume(scanner: str, patient: int) -> tuple[Scan, Scan]:
    """What a scanner sees of a patient, and the truth."""
    affine, shape = SCANNERS[scanner].grid(SIZE)
    voxels, mask = make_volume(SCANNERS[scanner], patient, affine, shape)
    return Scan(voxels[..., None], affine, "nifti"), Scan(mask[..., None], affine, "nifti")


def outside_scans(count: int, scanner: str = "dune", first: int = 500) -> dict[str, bytes]:
    """Name -> file of patients that no site of the federation has seen."""
    scans = {}
    for patient in range(first, first + count):
        scan, _ = volume(scanner, patient)
        assert scan.affine is not None
        scans[f"patient-{patient}.nii.gz"] = nifti_bytes(scan.voxels[..., 0], scan.affine)
    return scans


def publish_routing_space(root: Path, *, rotation_head: bool = False) -> None:
    """Train and publish `organ`, `organ.global`, `organ.aster`, `organ.birch`.

    A rotation head is drawn and not trained; the other weights are the same with it.
    """
    import torch

    from personalization.networks import build, initialise
    from personalization.state import clone
    from training.algorithm import ModelDraft, Publication
    from training.publish import Origin, publish

    torch.set_num_threads(1)
    data, summaries = {}, []
    for offset, site in enumerate(SITES):
        images, targets = [], []
        for patient in range(6):
            scan, mask = volume(site, 100 * offset + patient)
            prepared = prepare(scan, ORGAN)
            images.append(prepared.slices)
            targets.append(prepare_mask(mask, ORGAN, prepared.geometry))
            summaries.append(ReferenceStatistics.of(summarise(scan, prepared)))
        data[site] = np.concatenate(images), np.concatenate(targets)
    arguments = {**ARGUMENTS, **({"rotation_head": True} if rotation_head else {})}
    network = initialise(build("unet", **arguments), torch.Generator().manual_seed(0))
    pooled = tuple(np.concatenate(parts) for parts in zip(*data.values(), strict=True))
    _train(network, pooled[0], pooled[1], steps=100, rate=2e-2)
    shared = clone(network.state_dict())
    spec = NetworkSpec(name="unet", arguments=arguments)
    models = [ModelDraft("global", spec, shared)]
    for site, (site_images, site_targets) in data.items():
        network.load_state_dict(shared)
        _train(network, site_images, site_targets, steps=25, rate=5e-3)
        models.append(ModelDraft("inside", spec, clone(network.state_dict()), site))
    statistics = reduce(ReferenceStatistics.merge, summaries)
    lineage = Lineage(method="iop-fl", run="test", sites=SITES, rounds=1, seed=0)
    publish(
        Store(root),
        Origin("organ", ORGAN, lineage),
        Publication("routing-space", tuple(models), statistics=statistics),
    )


def _train(
    network: object, images: NDArray[np.float32], targets: NDArray[np.uint8], steps: int, rate: float
) -> None:
    import torch
    from torch import nn

    from personalization.losses import soft_dice_loss

    assert isinstance(network, nn.Module)
    network.train()
    generator = torch.Generator().manual_seed(1)
    x, truth = torch.from_numpy(images), torch.from_numpy(targets)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(x), (12,), generator=generator)
        logits = network(x[chosen])
        loss = soft_dice_loss(logits, truth[chosen])
        loss = loss + nn.functional.cross_entropy(logits, truth[chosen].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
