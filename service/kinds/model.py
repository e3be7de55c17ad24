"""A model: one network, of the federation, of one of its sites, or adapted to a hospital."""

from __future__ import annotations

from model_store.artefact import Artefact
from model_store.manifest import ModelManifest
from service.kinds.kind import ArtefactKind, Parts
from service.kinds.masks import BY_MASKS


def _parts(artefact: Artefact[ModelManifest]) -> Parts:
    site = artefact.manifest.site
    return Parts(artefact.digest) if site is None else Parts(None, {site: artefact.digest})


KIND = ArtefactKind(
    manifest=ModelManifest,
    noun="a model",
    description="one network",
    summary="one model for every hospital",
    parts=_parts,
    masks=BY_MASKS,
)
