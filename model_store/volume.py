"""What a task says of volumes: their grid in millimetres, the network's window on it, and the channels."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from model_store.normalisation import Normalisation

# Far finer and far coarser than any scanner; a header in metres or micrometres is outside.
Millimetres = Annotated[float, Field(ge=0.01, le=100)]
Side = Annotated[int, Field(ge=1, le=512)]
# A channel's name is also the end of a file's name, and the name of a part of a request.
CHANNEL_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9-]{0,31}$"
ChannelName = Annotated[str, Field(pattern=CHANNEL_NAME)]

MOST_CHANNELS: Final = 16
_LEAST_SIDE: Final = 4
# Voxels of one patch: 384^3, of which a network's first feature maps alone would fill a large GPU.
_MOST_OF_A_PATCH: Final = 384**3

_OPPOSITES = ("RL", "AP", "SI")


class Channel(BaseModel):
    """One channel of a case, such as a sequence of an MR examination, with its own normalisation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ChannelName
    normalisation: Normalisation = Normalisation(scope="volume")

    @field_validator("normalisation", mode="before")
    @classmethod
    def _of_the_volume(cls, value: Any) -> Any:
        return of_a_volume(value)


def of_a_volume(normalisation: Any) -> Any:
    """Say `scope: volume` where the scope is left out: a volume has no slices to normalise by."""
    if isinstance(normalisation, dict) and "scope" not in normalisation:
        return {"scope": "volume", **normalisation}
    if isinstance(normalisation, Normalisation) and "scope" not in normalisation.model_fields_set:
        return normalisation.model_copy(update={"scope": "volume"})
    return normalisation


class VolumeGeometry(BaseModel):
    """The grid on which a network sees a volume, its window there, and the way back to the scan's own grid.

    The patch of training is the window of validation and of serving: normalisation by instances sees other
    statistics in another window, which costs a network much of its accuracy.

    Attributes:
        spacing: millimetres per voxel along each of `axes`; None for the scan's own, of all axes or of one.
        patch: voxels of one input of the network along each of `axes`: 4 or more, or 1 of a network that
            sees slices one by one.
        overlap: share of a patch by which neighbouring windows overlap.
        window: how windows are placed and weighted. `gaussian` and `constant` are MONAI's, in steps of
            patch · (1 - overlap) with the last moved inside; `nnunet` spreads them evenly.
        axes: the direction in which each axis of the network's input grows. `RAS`, `LPS` and so on name the
            patient's axes (MONAI's Orientation): the stored axes nearest to them are turned over, and never
            resampled for a tilt. Lower case names the stored axes themselves: `kji` is the order in which
            nnU-Net reads, and `jki` is it transposed.
        resampling: onto the spacing. `linear` maps the scan's area onto the new grid's; `monai` has the grid
            of MONAI's Spacing, from the first voxel's centre or, on most oblique affines, about the scan's;
            `nnunet` is cubic, with the nearest plane along an axis of thick slices.
        normalise: `before` resampling, or `after` it, as most MONAI bundles do.
        crop: `nonzero` cuts off the margin in which every channel is zero before anything else.
        average: what is averaged over windows.
        restore: what is interpolated back to the scan's own grid; `labels` are taken by the nearest voxel.
        mirror: axes (0, 1, 2) over which every patch is also mirrored: 2, 4 or 8 runs of the network.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spacing: tuple[Millimetres | None, Millimetres | None, Millimetres | None] | None = None
    patch: tuple[Side, Side, Side]
    overlap: float = Field(default=0.5, ge=0, le=0.9)
    window: Literal["gaussian", "constant", "nnunet"] = "gaussian"
    axes: str = "RAS"
    resampling: Literal["linear", "monai", "nnunet"] = "linear"
    normalise: Literal["before", "after"] = "before"
    crop: Literal["none", "nonzero"] = "none"
    average: Literal["probabilities", "logits"] = "probabilities"
    restore: Literal["probabilities", "logits", "labels"] = "probabilities"
    mirror: tuple[Annotated[int, Field(ge=0, le=2)], ...] = ()

    @model_validator(mode="after")
    def _own_across_slices(self) -> VolumeGeometry:
        # nnU-Net's planner has every spacing but the one across slices that a network sees one by one.
        axes = zip(self.spacing or (), self.patch, strict=bool(self.spacing))
        if self.resampling == "nnunet" and any(mm is None and side != 1 for mm, side in axes):
            raise ValueError(
                "expected spacings in millimetres with resampling nnunet, but across a patch of 1, found null"
            )
        return self

    @field_validator("patch")
    @classmethod
    def _bounded(cls, patch: tuple[int, int, int]) -> tuple[int, int, int]:
        if math.prod(patch) > _MOST_OF_A_PATCH:
            raise ValueError(f"expected at most {_MOST_OF_A_PATCH} voxels in a patch, found {list(patch)}")
        if any(1 < side < _LEAST_SIDE for side in patch) or patch.count(1) > 1:
            raise ValueError(
                f"expected at least {_LEAST_SIDE} voxels per side, or 1 along one axis, found {list(patch)}"
            )
        return patch

    @field_validator("axes")
    @classmethod
    def _three_axes(cls, axes: str) -> str:
        named = len(axes) == 3 and all(sum(axes.count(end) for end in pair) == 1 for pair in _OPPOSITES)
        if not named and sorted(axes) != ["i", "j", "k"]:
            raise ValueError(
                "expected the patient's axes, one of each of R or L, A or P and S or I (such as RAS), or the "
                f"stored axes i, j and k in some order (kji is nnU-Net's), found '{axes}'"
            )
        return axes

    @field_validator("mirror")
    @classmethod
    def _once(cls, mirror: tuple[int, ...]) -> tuple[int, ...]:
        if len({*mirror}) < len(mirror):
            raise ValueError(f"expected each axis once, found {list(mirror)}")
        return tuple(sorted(mirror))
