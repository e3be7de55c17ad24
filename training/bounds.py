"""Privacy bounds on features before they leave a site: minimum counts, clipping and noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator
from torch import Tensor


class FeatureBounds(BaseModel):
    """Bounds on the mean of features over a site's images. The defaults impose no bound.

    The mean does not leave the site if it has fewer images or fewer patients than the minimum. `clip` bounds
    the norm of each image's features, so that each contributes at most clip/images to the mean. `noise` is
    the standard deviation of the Gaussian noise added to the mean, in that unit. Both are per image: a
    patient with many slices contributes more than one with few.
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
            raise ValueError("noise is in units of clip / images: set clip too")
        return value

    def allow(self, patients: Sequence[str]) -> bool:
        """Whether features may leave the site. `patients` has the patient of each image, with repetitions."""
        return len(patients) >= self.minimum_images and len({*patients}) >= self.minimum_patients

    def stricter(self, other: FeatureBounds) -> FeatureBounds:
        """Combine the stricter of each bound: the larger minimum, the smaller clip, the larger noise."""
        clips = [clip for clip in (self.clip, other.clip) if clip is not None]
        return FeatureBounds(
            minimum_images=max(self.minimum_images, other.minimum_images),
            minimum_patients=max(self.minimum_patients, other.minimum_patients),
            clip=min(clips, default=None),
            noise=max(self.noise, other.noise),
        )


NO_BOUNDS = FeatureBounds()


def clipped(tokens_BND: Tensor, clip: float | None) -> Tensor:
    """Scale each image's tokens down to norm `clip` if their norm over N and D is larger."""
    if clip is None:
        return tokens_BND
    norms: Tensor = tokens_BND.flatten(1).norm(dim=1).clamp(min=torch.finfo(tokens_BND.dtype).tiny)
    scaled: Tensor = tokens_BND * (clip / norms).clamp(max=1)[:, None, None]
    return scaled
