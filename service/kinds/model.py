"""A model: one network, of the federation, of one of its sites, or adapted to a hospital.

The federation's is adapted to unlabeled scans as a routing space of no other models than its global one.
"""

from __future__ import annotations

from dataclasses import replace

from model_store.artefact import Artefact
from model_store.manifest import ModelManifest
from personalization.options.adaptation import ModelOptions
from personalization.options.presets import OF_ONE_MODEL, OF_ONE_MODEL_FOR_SCANS
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, ScanAdaptation
from service.kinds.masks import BY_MASKS, starts_from_weights
from service.kinds.routing_space import ADAPTATION as OF_A_SPACE
from service.kinds.routing_space import SCAN


def _parts(artefact: Artefact[ModelManifest]) -> Parts:
    site = artefact.manifest.site
    return Parts(artefact.digest) if site is None else Parts(None, {site: artefact.digest})


KIND = ArtefactKind(
    manifest=ModelManifest,
    noun="a model",
    description="one network",
    summary="adapts to a hospital without masks, or with a few",
    parts=_parts,
    masks=BY_MASKS,
    adaptation=HospitalAdaptation(
        source="one network that segments, with its weights, as `python -m training.federate` or "
        "`python -m model_store import` publishes it",
        options=ModelOptions,
        presets=OF_ONE_MODEL,
        work="service.worker.routing_space:ModelWork",
        fallback_reason=OF_A_SPACE.fallback_reason,
        sections=OF_A_SPACE.sections,
        scan=ScanAdaptation(
            network=lambda artefact: artefact.digest,
            run=SCAN.run,
            graphs=SCAN.graphs,
            presets=OF_ONE_MODEL_FOR_SCANS,
        ),
        suits=lambda artefact: starts_from_weights(artefact, _parts(artefact).global_model),
        words=replace(
            OF_A_SPACE.words,
            epochs="No labels are involved. Epoch 0 is the model itself, before anything was learned. "
            "“ladder” learns nothing.",
        ),
    ),
)
