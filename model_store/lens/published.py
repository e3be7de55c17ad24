"""The lens of a version, and scans as it shows them to the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from model_store.artefact import Artefact
from model_store.errors import ArtefactDamaged
from model_store.lens.fingerprint import FILE as FINGERPRINT
from model_store.lens.fingerprint import Fingerprint
from model_store.lens.lens import FILE, Lens
from model_store.preprocessing import Prepared, PreparedVolume
from model_store.preprocessing.forward import no_look

# 256 channels of volumes take a few.
_MOST_BYTES: Final = 2**24


def lens_of(artefact: Artefact) -> Lens | None:
    """The lens of a version; None of one that has none.

    Raises ArtefactDamaged for a file that is no lens of the version's task, and as `Artefact.read`.
    """
    entry, task = artefact.manifest.files.get(FILE), artefact.manifest.task
    if entry is None:
        return None
    try:
        if entry.size > _MOST_BYTES:
            raise ValueError(f"expected {_MOST_BYTES} bytes at most, found {entry.size}")
        lens = Lens.model_validate_json(artefact.read(FILE))
        if (lens.axes, lens.channels) != (task.spatial_dims, task.in_channels):
            raise ValueError(
                f"expected {task.in_channels} channels and {task.spatial_dims} axes, as the task has, found "
                f"{lens.channels} and {lens.axes}"
            )
    except ValueError as error:
        raise ArtefactDamaged(
            f"{artefact}: {FILE} is no lens: {error}; withdraw the version or publish it again"
        ) from error
    return lens


def fingerprint_of(artefact: Artefact) -> Fingerprint:
    """The fingerprint of an artefact that has one.

    Raises ArtefactDamaged for a file that is none of its task, and as `Artefact.read`.
    """
    task = artefact.manifest.task
    try:
        found = Fingerprint.model_validate_json(artefact.read(FINGERPRINT))
        if (found.axes, len(found.field.mean)) != (task.spatial_dims, task.in_channels):
            raise ValueError(
                f"expected {task.in_channels} channels and {task.spatial_dims} axes, as the task has, found "
                f"{len(found.field.mean)} and {found.axes}"
            )
    except ValueError as error:
        raise ArtefactDamaged(
            f"{artefact}: {FINGERPRINT} is no fingerprint: {error}; withdraw the version or publish it again"
        ) from error
    return found


def seen_through(
    lens: Lens | None, prepared: Prepared | PreparedVolume, look: Callable[[], None] = no_look
) -> Prepared | PreparedVolume:
    """A scan as the lens shows it to the network. `look` as of `Lens.apply`.

    The array of what was prepared is changed in place where it is not shared between neighbouring slices:
    what was prepared must not be used again.
    """
    if lens is None:
        return prepared
    if isinstance(prepared, PreparedVolume):
        volume = prepared.volume[np.newaxis]
        lens.apply(volume, volume, look)
        return prepared
    slices = prepared.slices
    if slices.base is not None:
        return Prepared(lens.apply(slices, look=look), prepared.geometry)
    slices.flags.writeable = True
    lens.apply(slices, slices, look)
    slices.flags.writeable = False
    return prepared
