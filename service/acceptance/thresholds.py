"""What is asked of each label before anything is measured: the content of `acceptance.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.errors import RequestInvalid


class LabelThresholds(BaseModel):
    """What is asked of one label, at least one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    least_dice: float | None = Field(
        None, ge=0, le=1, description="The lower bound of the mean Dice must reach it (one-sided 95 %)."
    )
    least_surface_dice: float | None = Field(
        None, ge=0, le=1, description="The same of normalised surface Dice at the task's tolerance."
    )
    largest_bias_ml: float | None = Field(
        None, gt=0, description="The mean of volumes found less those drawn may be so far from 0, in mL."
    )
    largest_bias_share: float | None = Field(
        None, gt=0, description="All that is found less all that is drawn, as a share of what is drawn."
    )
    most_missed: float | None = Field(
        None, ge=0, le=1, description="The share of patients in whom no voxel of the label was hit."
    )

    @model_validator(mode="after")
    def _asks(self) -> LabelThresholds:
        if not self.model_dump(exclude_none=True):
            raise ValueError(f"expected at least one of {', '.join(type(self).model_fields)}, found none")
        return self


Label = Annotated[str, Field(min_length=1, max_length=200)]


class Thresholds(BaseModel):
    """Thresholds by label."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: dict[Label, LabelThresholds] = Field(min_length=1, max_length=256)
    tolerance: float = Field(
        1.0, gt=0, le=100, description="Of surface Dice, in mm; in pixels of an image without spacing."
    )

    def require_labels(self, known: Sequence[str], model: str) -> None:
        """Raise RequestInvalid for a label that the model does not have."""
        wrong = [label for label in self.labels if label not in known]
        if wrong:
            raise RequestInvalid(
                [
                    {
                        "field": f"body.thresholds.labels.{label}",
                        "reason": f"'{model}' has no such label; it has {', '.join(known)}",
                    }
                    for label in wrong
                ]
            )


# By threshold: the figure of a label's report that it is compared with, and its words.
_AT_LEAST: Mapping[str, tuple[str, str]] = {
    "least_dice": ("lower_bound", "lower bound of the mean Dice"),
    "least_surface_dice": ("surface_dice_lower_bound", "lower bound of the mean surface Dice"),
}
_AT_MOST: Mapping[str, tuple[str, str]] = {
    "largest_bias_ml": ("bias_ml", "bias of the volume, mL"),
    "largest_bias_share": ("bias_share", "bias of the size, as a share"),
    "most_missed": ("missed", "share of patients without any hit"),
}


def compared(
    label: str, asked: LabelThresholds, found: Mapping[str, float | None]
) -> list[dict[str, object]]:
    """Compare a label's figures with what is asked of it: JSON, in the order of the thresholds.

    `outcome` is `passed`, `failed`, or `too few` where there is no figure.
    """
    checks: list[dict[str, object]] = []
    for name, limit in asked.model_dump(exclude_none=True).items():
        least = name in _AT_LEAST
        figure, words = (_AT_LEAST if least else _AT_MOST)[name]
        value = found[figure]
        outcome = "too few"
        if value is not None:
            outcome = "passed" if (value >= limit if least else abs(value) <= limit) else "failed"
        checks.append(
            {
                "label": label,
                "threshold": name,
                "words": words,
                "bound": "at least" if least else "at most",
                "limit": limit,
                "found": value,
                "outcome": outcome,
            }
        )
    return checks
