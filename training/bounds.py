"""What a hospital, or a federation, asks of features before they leave a site: features are of patients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator
from torch import Tensor


class FeatureBounds(BaseModel):
    """Bounds on a mean over a site's images; by default there are none.

    The mean of fewer images, or of images of fewer patients, does not leave. `clip` bounds the norm of each
    image's part, so that none weighs more than clip/images in the mean. `noise` is the standard deviation of
    the Gaussian noise added to the mean, in that unit. Both are per image: a patient of many slices weighs
    more than one of few.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum_images: int = Field(1, ge=1, description="training images below which no features leave")
    minimum_patients: int = Field(1, ge=1, description="training patients below which no features leave")
    clip: FiniteFloat | None = Field(None, gt=0, description="bound on the norm of an image's features")
    noise: FiniteFloat = Field(0.0, ge=0, description="standard deviation, in clip / images")

    @field_validator("noise")
    @classmethod
    def _in_units_of_the_clip(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("clip") is None:
            raise ValueError("noise is measured in clip / images: set clip too")
        return value

    def allow(self, patients: Sequence[str]) -> bool:
        """Whether features may leave that are of one image of each of these, who may be there repeatedly."""
        return len(patients) >= self.minimum_images and len({*patients}) >= self.minimum_patients

    def stricter(self, other: FeatureBounds) -> FeatureBounds:
        """Of each bound the stricter one: the larger minimum, the smaller clip, the larger noise."""
        clips = [clip for clip in (self.clip, other.clip) if clip is not None]
        return FeatureBounds(
            minimum_images=max(self.minimum_images, other.minimum_images),
            minimum_patients=max(self.minimum_patients, other.minimum_patients),
            clip=min(clips, default=None),
            noise=max(self.noise, other.noise),
        )


NO_BOUNDS = FeatureBounds()


def clipped(tokens_BND: Tensor, clip: float | None) -> Tensor:
    """Each image's tokens, scaled down to norm `clip` where their norm over N and D is larger."""
    if clip is None:
        return tokens_BND
    norms: Tensor = tokens_BND.flatten(1).norm(dim=1).clamp(min=torch.finfo(tokens_BND.dtype).tiny)
    scaled: Tensor = tokens_BND * (clip / norms).clamp(max=1)[:, None, None]
    return scaled
