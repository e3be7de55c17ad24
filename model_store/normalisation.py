"""How raw intensities are normalised before a network sees them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

# Which voxels count: every one, those of this channel that are not zero (they alone are changed), or those of
# the region in which any channel is not zero, with its holes filled (nnU-Net's; outside is zero afterwards).
Within = Literal["all", "nonzero", "region"]
Pair = tuple[float, float]


def _ordered(value: Pair | None) -> Pair | None:
    if value is not None and not value[0] < value[1]:
        raise ValueError(f"expected [low, high] with low < high, found {list(value)}")
    return value


def _percent(value: Pair | None) -> Pair | None:
    if value is not None and not (value[0] >= 0 and value[1] <= 100):
        raise ValueError(f"expected percentiles from 0 to 100, found {list(value)}")
    return value


class _Ranged(BaseModel):
    """What a step may take its range from: fixed intensities, or percentiles of the channel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Pair | None = None
    percentiles: Pair | None = None
    within: Within = "all"

    _in_order = field_validator("window", "percentiles")(_ordered)
    _in_percent = field_validator("percentiles")(_percent)

    @model_validator(mode="after")
    def _one_range(self) -> _Ranged:
        if self.window is not None and self.percentiles is not None:
            raise ValueError("expected a window or percentiles, found both; write two steps")
        return self


class Clip(_Ranged):
    """Clip to a window, or to percentiles."""

    step: Literal["clip"] = "clip"

    @model_validator(mode="after")
    def _has_a_range(self) -> Clip:
        if self.window is None and self.percentiles is None:
            raise ValueError("clip: expected a window or percentiles, found neither")
        return self


class Rescale(_Ranged):
    """Map a range to `to`, linearly: the window, the percentiles, or from least to most without either.

    MONAI's ScaleIntensityRange, ScaleIntensityRangePercentiles and ScaleIntensity.
    """

    step: Literal["rescale"] = "rescale"
    to: Pair = (0.0, 1.0)
    clip: bool = False

    _to_in_order = field_validator("to")(_ordered)


class ZScore(BaseModel):
    """Subtract the mean and divide by the standard deviation, the channel's own or given ones.

    MONAI's NormalizeIntensity.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: Literal["zscore"] = "zscore"
    mean: float | None = None
    std: float | None = Field(None, gt=0)
    within: Within = "all"


Step = Annotated[Clip | Rescale | ZScore, Field(discriminator="step")]


class Normalisation(BaseModel):
    """Normalisation of raw intensities: clip to `window`, clip to `percentiles`, then apply `method`.

    `scope` selects the pixels for the percentiles and the moments: each image (slice), or its whole volume.
    A 2-D scan is its own volume. `middle` is the share of each side of a slice in which these pixels are,
    about its centre: of scans that show more around what the network knows. A task of volumes has the scope
    `volume` and may also say:

    - `method: fixed` with `mean` and `std`, such as those of a federation's foreground (nnU-Net's rule for
      CT, with its window),
    - `within`, the voxels that percentiles and moments are of,
    - `steps` in place of all the others, in their order, as a MONAI bundle lists them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: Literal["image", "volume"] = "image"
    method: Literal["zscore", "minmax", "fixed", "none"] = "zscore"
    window: Pair | None = None
    percentiles: Pair | None = None
    middle: float = Field(1.0, ge=0.1, le=1)
    mean: float | None = None
    std: float | None = Field(None, gt=0)
    within: Within = "all"
    steps: tuple[Step, ...] = Field((), max_length=16)

    _in_order = field_validator("window", "percentiles")(_ordered)
    _in_percent = field_validator("percentiles")(_percent)

    @model_validator(mode="after")
    def _whole(self) -> Normalisation:
        given = {name for name in ("mean", "std") if getattr(self, name) is not None}
        if self.method == "fixed" and given != {"mean", "std"}:
            raise ValueError(
                "method fixed needs mean and std, the intensities that are subtracted and divided"
            )
        if self.method != "fixed" and given:
            raise ValueError(f"{', '.join(sorted(given))}: only with method: fixed, found {self.method}")
        if self.steps and (others := sorted(self.model_fields_set - {"steps", "scope"})):
            raise ValueError(f"steps take the place of {', '.join(others)}; write all of it as steps")
        return self

    @property
    def said(self) -> set[str]:
        """The fields of volumes that are used."""
        said = {name for name in ("mean", "std") if getattr(self, name) is not None}
        if self.within != "all":
            said.add("within")
        if self.steps:
            said.add("steps")
        return said | ({"method"} if self.method == "fixed" else set())

    @property
    def ordered_steps(self) -> tuple[Clip | Rescale | ZScore, ...]:
        """All of it as steps, in their order."""
        if self.steps:
            return self.steps
        steps: list[Clip | Rescale | ZScore] = []
        if self.window is not None:
            steps.append(Clip(window=self.window, within=self.within))
        if self.percentiles is not None:
            steps.append(Clip(percentiles=self.percentiles, within=self.within))
        if self.method == "minmax":
            steps.append(Rescale(within=self.within))
        if self.method in {"zscore", "fixed"}:
            steps.append(ZScore(mean=self.mean, std=self.std, within=self.within))
        return tuple(steps)

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the later fields that are not used, so that older artefacts keep their digests."""
        content: dict[str, Any] = handler(self)
        if self.steps:
            return {name: content[name] for name in ("scope", "steps")}
        unsaid = {"mean", "std", "within", "steps"} - self.said
        if self.middle == 1:
            unsaid.add("middle")
        return {name: value for name, value in content.items() if name not in unsaid}
