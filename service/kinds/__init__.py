"""The kinds of artefact, and what the service can do with each: one module per kind, found by its name.

Nothing here imports torch. No other module of the service asks what class a manifest has or compares its
kind: it asks the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import groupby
from typing import Any

from model_store import manifest
from model_store.artefact import Artefact
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, Words

__all__ = [
    "ADAPTABLE",
    "ADAPTING_ITSELF",
    "DESCRIPTION",
    "KINDS",
    "SCAN_BY_JOB",
    "ArtefactKind",
    "HospitalAdaptation",
    "Parts",
    "Words",
    "kind_of",
]


def _declared(name: str) -> ArtefactKind[Any]:
    found: ArtefactKind[Any] = import_module(f"{__name__}.{name.replace('-', '_')}").KIND
    return found


def _described() -> Iterable[str]:
    for number, (description, alike) in enumerate(groupby(KINDS.values(), lambda kind: kind.description)):
        names = " and ".join(f"`{kind.name}`" for kind in alike)
        yield f"{names} {description}" if number else f"{names} is {description}"


# In the order of the union of all manifests.
KINDS: Mapping[str, ArtefactKind[Any]] = {name: _declared(name) for name in manifest.KINDS}
ADAPTABLE: Mapping[str, HospitalAdaptation[Any]] = {
    name: kind.adaptation for name, kind in KINDS.items() if kind.adaptation is not None
}

# For the API's description and for errors.
DESCRIPTION = f"{'; '.join(_described())}."
ADAPTING_ITSELF = " or ".join(kind.noun for kind in KINDS.values() if kind.adapts_itself_by is not None)
SCAN_BY_JOB = " or ".join(KINDS[name].noun for name, found in ADAPTABLE.items() if found.scan is not None)


def kind_of(artefact: Artefact) -> ArtefactKind[Any]:
    """What the service can do with an artefact of this kind."""
    return KINDS[artefact.manifest.kind]
