"""Tell structures that are smaller than the members': a wider field of view, or other pixels.

No step of the lens changes the scale. But where only the central 1/z of each image looks like the members'
whole images, the scans have structures about z times smaller, and no other step cures that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from model_store.lens.features import Images, Kind
from model_store.lens.fingerprint import Fingerprint, Sums, mean_shift
from model_store.lens.fit import Cohort
from model_store.preprocessing.lines import across

ZOOMS: Final = (1.5, 2.0, 2.5, 3.0)
# Whole images that are nearer are not looked at: two natural deviations.
_FAR: Final = 4.0
# The central part looks like the members' images up to this R.
_NEAR: Final = 3.0


@dataclass(frozen=True)
class Scale:
    """How many times smaller structures are; R of whole images and of their central part, geometric means
    over the kinds."""

    zoom: float
    before: float
    after: float


def scale_of(cohort: Cohort, fingerprint: Fingerprint) -> Scale | None:
    """The scale of a cohort of slices; None where its images are as large as the members', or far from them
    at every scale.

    Costs a pass over the images, and four more where they are far. The central part has to be nearer in
    every kind of feature: noise and blur go as an image is enlarged, shading does not. Volumes are on a grid
    in millimetres, so that they have None.
    """
    if fingerprint.axes != 2:
        return None
    whole = _shifts(cohort, fingerprint, 1.0)
    before = mean_shift(whole)
    if not whole or before <= _FAR:
        return None
    parts = {zoom: _shifts(cohort, fingerprint, zoom) for zoom in ZOOMS}
    zoom = min(ZOOMS, key=lambda each: mean_shift(parts[each]))
    after = mean_shift(parts[zoom])
    nearer = after <= _NEAR and all(parts[zoom][kind] < whole[kind] for kind in whole)
    return Scale(zoom, before, after) if nearer else None


def _shifts(cohort: Cohort, fingerprint: Fingerprint, zoom: float) -> Mapping[Kind, float]:
    sums = Sums()
    for patient, images in cohort():
        sums.add(patient, images if zoom == 1 else _centre(images, zoom))
    return fingerprint.shifts(sums.seen())


def _centre(images_NCHW: Images, zoom: float) -> Images:
    """The central 1/zoom of each side, interpolated to the size of the whole."""
    places = [(side - 1) / 2 + (np.arange(side) - (side - 1) / 2) / zoom for side in images_NCHW.shape[2:]]
    return across(images_NCHW, places, first=2)
