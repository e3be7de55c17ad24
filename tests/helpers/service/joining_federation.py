"""A small cross-attention that was really trained: `tumour`, of two sites, and scans with masks from outside.

Its task is the phantom's at 32x32, with patients known by their number. The network has width 8.
"""

from __future__ import annotations

from functools import reduce
from itertools import count
from pathlib import Path

from model_store.guard import ReferenceStatistics, summarise
from model_store.manifest import Lineage, NetworkSpec
from model_store.preprocessing import prepare, prepare_mask
from model_store.store import Store
from tests.helpers.service.routing_federation import ORGAN, SITES, volume
from training.phantom.federation import nifti_bytes

TUMOUR = ORGAN.model_copy(update={"name": "tumour", "patient": r"^patient-(?P<patient>\d+)"})
ARGUMENTS: dict[str, int] = {"in_channels": 1, "width": 8, "heads": 2, "groups": 4}
_STEPS = 40


def drawn_scans(number: int, scanner: str = "dune", first: int = 500) -> dict[str, tuple[bytes, bytes]]:
    """Name -> scan and mask, as files, of patients that no site of the federation has seen."""
    files = {}
    for patient in range(first, first + number):
        scan, mask = volume(scanner, patient)
        assert scan.affine is not None
        files[f"patient-{patient}.nii.gz"] = (
            nifti_bytes(scan.voxels[..., 0], scan.affine),
            nifti_bytes(mask.voxels[..., 0], scan.affine),
        )
    return files


def publish_cross_attention(root: Path) -> None:
    """Train and publish `tumour`, `tumour.global`, `tumour.aster`, `tumour.birch`."""
    import torch

    from personalization.adamw import Optimiser, train_adamw
    from personalization.fedoap.losses import binary_loss
    from personalization.fedoap.parts import bank_state, split, start_personal
    from personalization.labelled_slices import LabelledSlices
    from personalization.networks import FedOapUNet, build, initialise
    from personalization.state import State, clone
    from training.algorithm import ModelDraft, Publication
    from training.publish import Origin, publish

    torch.set_num_threads(1)
    data, summaries = {}, []
    for offset, site in enumerate(SITES):
        images, targets, patients = [], [], []
        for patient in range(2):
            scan, mask = volume(site, 100 * offset + patient)
            prepared = prepare(scan, TUMOUR)
            images.append(torch.from_numpy(prepared.slices.copy()))
            targets.append(torch.from_numpy(prepare_mask(mask, TUMOUR, prepared.geometry)))
            patients += [f"{site}-{patient}"] * len(prepared.slices)
            summaries.append(ReferenceStatistics.of(summarise(scan, prepared)))
        data[site] = LabelledSlices(torch.cat(images), torch.cat(targets), tuple(patients))

    def network(state: State, bank: State, **more: int) -> FedOapUNet:
        made = build("fedoap", **ARGUMENTS, **more)
        assert isinstance(made, FedOapUNet)
        made.load_state_dict({**state, **bank})
        return made

    drawn = initialise(build("fedoap", **ARGUMENTS), torch.Generator().manual_seed(0))
    assert isinstance(drawn, FedOapUNet)
    both = LabelledSlices(
        torch.cat([site.images for site in data.values()]),
        torch.cat([site.targets for site in data.values()]),
        tuple(patient for site in data.values() for patient in site.patients),
    )
    train_adamw(
        drawn,
        (batch for epoch in count() for batch in both.batches(12, epoch, augment=False)),
        lambda images, targets: binary_loss(drawn.segment(images)[0], targets),
        [1e-2] * _STEPS,
        Optimiser(),
    )
    shared, personal = split(clone(drawn.state_dict()))
    entries: dict[str, State] = {}
    with torch.no_grad():
        for site, examples in data.items():
            key, value = drawn.keys_and_values(examples.images)
            entries[site] = {"key": key.mean(dim=0), "value": value.mean(dim=0)}
    size = {"sites": len(SITES), "tokens": entries[SITES[0]]["key"].shape[0]}
    spec, features = NetworkSpec(name="fedoap", arguments={**ARGUMENTS, **size}), 16 * ARGUMENTS["width"]
    sources = ("own", *SITES)
    state = {**shared, **start_personal(shared, personal), **bank_state(entries, features)}
    models = [ModelDraft("global", spec, state, sources=sources)]
    for site in SITES:
        own = {**shared, **personal, **bank_state(entries, features, absent=(site,))}
        models.append(ModelDraft("inside", spec, own, site, sources=sources))
    publish(
        Store(root),
        Origin("tumour", TUMOUR, Lineage(method="fedoap", run="test", sites=SITES, rounds=1, seed=0)),
        Publication(
            "cross-attention", tuple(models), statistics=reduce(ReferenceStatistics.merge, summaries)
        ),
    )
