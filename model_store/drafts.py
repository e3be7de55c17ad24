"""Is a draft fit to be published? Whether its files are all there, and its parts fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model_store.artefact import Artefact
from model_store.errors import ArtefactWithdrawn, PublishRefused, ReferenceNotFound
from model_store.manifest import GRAPH, WEIGHTS, AnyManifest, ModelManifest, SsfPoolManifest


def check_draft(
    manifest: AnyManifest, files: Mapping[str, bytes], by_digest: Callable[[str], Artefact]
) -> None:
    """Raise PublishRefused, saying what is missing or does not fit. `by_digest` finds a part."""
    if isinstance(manifest, ModelManifest | SsfPoolManifest):
        missing = {WEIGHTS, GRAPH} - set(files)
        if missing:
            raise PublishRefused(
                f"{manifest.name}: a {manifest.kind} needs {WEIGHTS} and {GRAPH}, missing {missing}"
            )
    if isinstance(manifest, ModelManifest):
        return
    parts: dict[str, ModelManifest] = {}
    for role, digest in manifest.references().items():
        try:
            part = by_digest(digest).manifest
        except (ReferenceNotFound, ArtefactWithdrawn) as error:
            raise PublishRefused(f"{manifest.name}: its part '{role}' cannot be used: {error}") from error
        if not isinstance(part, ModelManifest):
            raise PublishRefused(f"{manifest.name}: its part '{role}' is a {part.kind}, expected a model")
        parts[role] = part
    if isinstance(manifest, SsfPoolManifest):
        _check_backbone(manifest, parts["backbone"])
        return
    reference = next(iter(parts.values()))
    for role, part in parts.items():
        if part.network != reference.network or part.task != manifest.task:
            raise PublishRefused(
                f"{manifest.name}: its part '{role}' has another architecture or task "
                f"({part.network.name} {part.network.arguments}, task {part.task.name}) than "
                f"{reference.network.name} {reference.network.arguments}, task {manifest.task.name}"
            )


def _check_backbone(manifest: SsfPoolManifest, backbone: ModelManifest) -> None:
    """The pool may be of another task than its backbone, but not of another network."""
    if backbone.network != manifest.network:
        raise PublishRefused(
            f"{manifest.name}: its pool is for {manifest.network.name} {manifest.network.arguments}, its "
            f"backbone is {backbone.network.name} {backbone.network.arguments}: a pool fits no backbone but "
            "the one it was trained on"
        )
