"""Options of a joining: a hospital joins a cross-attention (FedOAP) with the masks of some scans."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat, ValidationInfo, field_validator

from personalization.options.cohort import CohortOptions


class JoiningOptions(CohortOptions):
    """Options of joining. The defaults suit most hospitals."""

    loss: Literal["perturbed", "plain"] = Field(
        "perturbed",
        description="`perturbed` boundary loss, as the method's second stage; `plain`, the loss of its "
        "first, as the control.",
    )
    trains: Literal["all", "personal"] = Field(
        "all",
        description="What is fine-tuned: `all` weights, as the method does, or the `personal` ones alone, "
        "which are the query stage, its projection and the adapter.",
    )
    epochs: int = Field(30, ge=1, le=200, description="Passes over the scans with masks.")
    batch_size: int = Field(8, ge=1, le=128, description="Slices per step.")
    learning_rate: FiniteFloat = Field(1e-3, gt=0, le=1, description="AdamW's learning rate at the start.")
    least_rate: FiniteFloat = Field(
        1e-6,
        ge=0,
        le=1,
        validate_default=True,
        description="AdamW's learning rate at the end of its cosine; at most `learning_rate`.",
    )
    weight_decay: FiniteFloat = Field(1e-5, ge=0, le=1)
    augment: bool = Field(True, description="Whether slices are rotated and flipped at random.")
    threshold: FiniteFloat = Field(
        0.75, ge=0, le=1, description="The error above which the perturbed loss perturbs a pixel."
    )
    variance: FiniteFloat = Field(
        0.1, ge=0, le=10, description="Variance of the noise on such a pixel's logit."
    )
    trade_off: FiniteFloat = Field(0.1, ge=0, le=1, description="The perturbed term's share of the loss.")
    validation: FiniteFloat = Field(
        0.2,
        gt=0,
        le=0.5,
        description="Share of the patients with masks that choose the epoch; at least one patient.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="The seed of everything random.")

    @field_validator("least_rate")
    @classmethod
    def _falls(cls, value: float, info: ValidationInfo) -> float:
        first = info.data.get("learning_rate", value)
        if value > first:
            raise ValueError(f"expected at most learning_rate, {first}: a rate falls to it")
        return value
