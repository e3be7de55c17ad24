"""Check a draft before publication: its files are complete, and its parts fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model_store.artefact import Artefact
from model_store.errors import ArtefactWithdrawn, PublishRefused, ReferenceNotFound
from model_store.manifest import AnyManifest, ModelManifest


def check_draft(
    manifest: AnyManifest, files: Mapping[str, bytes], by_digest: Callable[[str], Artefact]
) -> None:
    """Raise PublishRefused if files are missing or parts do not fit. `by_digest` looks up a part."""
    required = manifest.required_files
    missing = set(required) - set(files)
    if missing:
        raise PublishRefused(
            f"{manifest.name}: a {manifest.kind} needs {' and '.join(required)}, missing {missing}"
        )
    parts: dict[str, ModelManifest] = {}
    for role, digest in manifest.references().items():
        try:
            part = by_digest(digest).manifest
        except (ReferenceNotFound, ArtefactWithdrawn) as error:
            raise PublishRefused(f"{manifest.name}: its part '{role}' cannot be used: {error}") from error
        if not isinstance(part, ModelManifest):
            raise PublishRefused(f"{manifest.name}: its part '{role}' is a {part.kind}, expected a model")
        parts[role] = part
    manifest.check_parts(parts)
