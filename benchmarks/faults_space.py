"""The least that a job can be about: a routing space of tiny networks, and scans of phantom patients."""

from __future__ import annotations

import torch

from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from personalization.export import to_onnx
from personalization.networks import build
from personalization.state import to_safetensors
from training.phantom import SCANNERS, TASK, make_volume
from training.phantom.federation import nifti_bytes

NAME = "faults"
SIZE = 32


def publish_space(store: Store) -> None:
    """A routing space of two random U-Nets of width 4: what they learned makes no difference here."""
    task = TASK.model_copy(update={"size": (SIZE, SIZE)})
    arguments = {"in_channels": 1, "classes": 2, "width": 4}
    lineage = Lineage(method="none", run=NAME, sites=("a",), rounds=0, seed=0)
    digests = {}
    for seed, site in enumerate((None, "a")):
        torch.manual_seed(seed)
        network = build("unet", **arguments)
        manifest = ModelManifest(
            name=f"{NAME}.{site or 'global'}",
            part_of=NAME,
            role="inside" if site else "global",
            site=site,
            task=task,
            network=NetworkSpec(name="unet", arguments=dict(arguments)),
            lineage=lineage,
        )
        files = {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: to_onnx(network, 1, task.size)}
        digests[site] = store.publish(manifest, files).digest
    space = RoutingSpaceManifest(
        name=NAME, task=task, lineage=lineage, global_model=digests[None], inside={"a": digests["a"]}
    )
    store.publish(space, {})


def scan_bytes(patient: int) -> bytes:
    """A .nii.gz of a phantom patient, some kilobytes."""
    scanner = SCANNERS["dune"]
    affine, shape = scanner.grid(SIZE)
    voxels, _ = make_volume(scanner, patient, affine, shape)
    return nifti_bytes(voxels, affine)
