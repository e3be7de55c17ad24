"""The kinds of artefact, and what the service can do with each: one module per kind, found by its name.

Nothing here imports torch. No other module of the service asks what class a manifest has or compares its
kind: it asks the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import Any

from model_store import manifest
from model_store.artefact import Artefact
from model_store.manifest import ModelManifest
from personalization.options.masks import MASKS
from personalization.options.presets import AUTO
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, Words
from service.kinds.lens import has_lens, through_lens
from service.kinds.masks import BY_MASKS, starts_from_weights

__all__ = [
    "ADAPTABLE",
    "ADAPTING_ITSELF",
    "BY_MASKS",
    "DESCRIPTION",
    "KINDS",
    "SCAN_BY_JOB",
    "ArtefactKind",
    "HospitalAdaptation",
    "Parts",
    "Words",
    "adaptation_by_masks",
    "adaptation_of",
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


def adaptation_by_masks(artefact: Artefact) -> HospitalAdaptation[Any] | None:
    """How an artefact of the federation is adapted by masks; None where it cannot be."""
    kind = kind_of(artefact)
    return kind.masks if starts_from_weights(artefact, kind.parts(artefact).global_model) else None


def adaptation_of(
    artefact: Artefact, options: Mapping[str, Any] | None = None
) -> HospitalAdaptation[Any] | None:
    """How an artefact of the federation is adapted to a hospital, with these options of a job or a request;
    None where it cannot be: a network of regions, among others.
    """
    if artefact.manifest.task.regions:
        return None
    kind = kind_of(artefact)
    by_masks, own = adaptation_by_masks(artefact), kind.adaptation
    preset = AUTO if options is None else options.get("preset", AUTO)
    if preset == MASKS and by_masks is not None:
        return by_masks
    if own is not None and not own.suits(artefact):
        own = None
    # A kind that is adapted without presets has its own way.
    if preset == AUTO and has_lens(artefact, kind.parts(artefact)) and (own is None or own.presets):
        of_model = ADAPTABLE[ModelManifest.model_fields["kind"].default]
        return through_lens(own or replace(of_model, presets=(), scan=None), artefact)
    return own or by_masks
