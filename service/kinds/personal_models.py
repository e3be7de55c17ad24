"""Personal models (FedBN, Ditto and others): one per consenting site, and a global one where there is one."""

from __future__ import annotations

from model_store.manifest import PersonalModelsManifest
from service.kinds.kind import ArtefactKind, Parts
from service.kinds.masks import BY_MASKS

KIND = ArtefactKind(
    manifest=PersonalModelsManifest,
    noun="personal models",
    description="one per site, with a global one where the method has one",
    summary="a model for each member hospital",
    parts=lambda artefact: Parts(artefact.manifest.global_model, artefact.manifest.inside),
    masks=BY_MASKS,
)
