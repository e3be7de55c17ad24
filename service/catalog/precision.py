"""Find the graph of a network in another precision, and take it where a hospital's assignment says so."""

from __future__ import annotations

from model_store.artefact import Artefact
from model_store.errors import ArtefactWithdrawn, ReferenceNotFound
from model_store.manifest import ModelManifest, Reduced
from model_store.store import Store
from service.catalog.version import ResolvedVersion
from service.database import Assignment
from service.errors import PrecisionUnavailable
from service.quantisation.work import reduced_name


def newest_reduced(store: Store, network: Artefact, precision: Reduced) -> Artefact[ModelManifest]:
    """The newest version with a graph of this network in a precision that is not withdrawn.

    Raises PrecisionUnavailable if there is none.
    """
    name = reduced_name(network.name, precision)
    withdrawn = []
    for number in reversed(store.versions.numbers(name)):
        version = store.versions.get(name, number)
        if network.digest not in version.artefact.manifest.lineage.parents:
            continue
        if version.withdrawn is None:
            return version.artefact.expect(ModelManifest)
        withdrawn.append(str(version.artefact))
    found = f"only {', '.join(withdrawn)}, withdrawn" if withdrawn else "none"
    raise PrecisionUnavailable(
        f"'{network}' is to answer in {precision}: expected a graph of it in the store, found {found}. Make "
        f"one (POST /hospitals/HOSPITAL/quantisations, or python -m model_store quantise {network}), or "
        "keep float32."
    )


def decided_precision(found: ResolvedVersion) -> Assignment | None:
    """The entry of the serving log by which a version answers in another precision; None for float32.

    It holds for its version alone, however that was found.
    """
    entry = found.entry
    if entry is None or entry.reduced is None or entry.digest != found.artefact.digest:
        return None
    return entry


def require_float32(found: ResolvedVersion) -> None:
    """Raise PrecisionUnavailable for a version that is to answer in another precision: scans adapt none."""
    if (entry := decided_precision(found)) is not None:
        raise PrecisionUnavailable(
            f"'{found.artefact}' is assigned to hospital '{entry.hospital}' in {entry.precision}, and "
            "adapting to a scan is in float32: ask with personalization=auto, or assign the version "
            "again with precision=float32."
        )


def in_precision(store: Store, network: Artefact, entry: Assignment) -> Artefact[ModelManifest]:
    """The version with the graph of `network` that the entry pins.

    Raises:
        PrecisionUnavailable: the entry's graph is of another network.
        ArtefactWithdrawn, ReferenceNotFound: it was withdrawn, or is gone.
    """
    assert entry.reduced is not None
    decide = (
        f"hospital '{entry.hospital}' is served '{entry.artefact or entry.model}@{entry.version}' in "
        f"{entry.precision}, and no other graph answers for it: assign the version again with "
        "precision=float32, or with another graph"
    )
    try:
        pinned = store.by_digest(entry.reduced, ModelManifest)
    except (ArtefactWithdrawn, ReferenceNotFound) as error:
        raise type(error)(f"{error}; {decide}") from error
    if network.digest not in pinned.manifest.lineage.parents:
        raise PrecisionUnavailable(
            f"'{network}' has no graph in the assignment's precision, which is of another network, "
            f"'{pinned}': {decide}, or ask with personalization=auto."
        )
    return pinned
