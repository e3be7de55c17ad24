"""An SSF pool (FedIns): one network that adapts itself to every scan, by the entries that the scan picks."""

from __future__ import annotations

from model_store.manifest import SsfPoolManifest
from service.kinds.kind import ArtefactKind, Parts

KIND = ArtefactKind(
    manifest=SsfPoolManifest,
    noun="an ssf-pool",
    description="one that adapts itself to every scan",
    summary="adapts itself to every scan",
    parts=lambda artefact: Parts(artefact.digest),
    adapts_itself_by="entries of its pool",
)
