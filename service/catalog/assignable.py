"""Check that a version of the store may serve a hospital for a model."""

from __future__ import annotations

from contextlib import suppress

from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound
from model_store.store import Store
from service.catalog.adapted import adapted_for, adapted_name, parent_behind
from service.catalog.version import require_name
from service.errors import AdaptedToAnother, AnotherModel, PartNotAssignable


def resolve_assignable(store: Store, hospital: str, model: str, version: int | str) -> Artefact:
    """The version, if it may serve: it opens whole, is no part of a composite, and is either one of the model
    or one that was adapted from the model to this very hospital.

    Args:
        store: where it is.
        hospital: id.
        model: name that the assignment is for.
        version: a number or digest of the model's, or `name@number` or `name@digest`.

    Raises:
        ReferenceNotFound: no such version.
        ArtefactWithdrawn: it was withdrawn, or what it was adapted from was.
        ArtefactDamaged: it is not what was published.
        PartNotAssignable, AdaptedToAnother, AnotherModel: it may not serve here.
    """
    require_name(store, model)
    # Opening verifies every byte: a version that would fail at the first scan is refused now instead.
    artefact = _open(store, hospital, model, version)
    part_of = artefact.manifest.part_of
    if part_of is not None:
        raise PartNotAssignable(
            f"'{artefact}' is a part of '{part_of}': assign a version of '{part_of}' instead.",
        )
    owner = adapted_for(artefact)
    if owner is None:
        if artefact.name != model:
            raise _another_model(artefact, model, artefact.name)
        return artefact
    if owner != hospital:
        raise AdaptedToAnother(
            f"'{artefact}' was adapted to hospital '{owner}', found hospital '{hospital}': adapt the model "
            "to its own scans.",
        )
    parent = parent_behind(store, artefact)
    if parent.name != model:
        raise _another_model(artefact, model, parent.name)
    return artefact


def _open(store: Store, hospital: str, model: str, version: int | str) -> Artefact:
    if isinstance(version, int):
        return _numbered(store, adapted_name(model, hospital), model, version)
    if "@" in version:
        return store.open(version)
    # A digest alone says everything but the name.
    with suppress(ReferenceNotFound):
        return store.open(f"{adapted_name(model, hospital)}@{version}")
    return store.open(f"{model}@{version}")


def _numbered(store: Store, adapted: str, model: str, number: int) -> Artefact:
    try:
        return store.open(f"{model}@{number}")
    except ReferenceNotFound as error:
        if number not in store.versions.numbers(adapted):
            raise
        raise ReferenceNotFound(
            f"{error}; what was adapted to this hospital is named in full: '{adapted}@{number}'"
        ) from error


def _another_model(artefact: Artefact, model: str, own: str) -> AnotherModel:
    return AnotherModel(
        f"'{artefact}' belongs to model '{own}', found model '{model}': assign it there.",
    )
