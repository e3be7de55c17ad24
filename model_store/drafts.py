"""Check a draft before publication: its files are complete, its graphs too, and its parts fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from model_store.artefact import Artefact
from model_store.errors import ArtefactWithdrawn, PublishRefused, ReferenceNotFound
from model_store.graphs import SUFFIX, check_graph
from model_store.manifest import AnyManifest, ModelManifest


def check_draft(
    manifest: AnyManifest,
    files: Mapping[str, bytes],
    by_digest: Callable[[str], Artefact],
    operators: Iterable[str],
) -> None:
    """Check the draft. `by_digest` looks up a part; `operators` may be in graphs beyond the built-in list.

    Raises:
        PublishRefused: files are missing, or parts do not fit.
        GraphRefused: a graph needs other files, or has an operator that is not allowed.
    """
    required = manifest.required_files
    missing = set(required) - set(files)
    if missing:
        raise PublishRefused(
            f"{manifest.name}: a {manifest.kind} needs {' and '.join(required)}, missing {missing}"
        )
    for name, content in files.items():
        if name.endswith(SUFFIX):
            check_graph(content, f"{manifest.name}: {name}", operators)
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
