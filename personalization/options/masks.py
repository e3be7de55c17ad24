"""Options of an adaptation by masks: fine-tuning a model on the masks of a few of a hospital's scans."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, FiniteFloat

from personalization.options.cohort import CohortOptions

MASKS = "masks"
Trained = Literal["all", "head", "norms", "ssf", "scratch"]
TRAINED: tuple[Trained, ...] = get_args(Trained)


class MasksOptions(CohortOptions):
    """Options of adapting by masks. The defaults suit most hospitals."""

    preset: Literal["masks"] = Field(
        "masks",
        description="The global model, fine-tuned on masks as far as held-out ones gain.",
    )
    trains: Trained = Field(
        "all",
        description="What is fine-tuned: `all` weights. The others are baselines: the `head`, scale and "
        "shift of batch norm (`norms`), of every convolution too (`ssf`), or a network from `scratch`.",
    )
    steps: int | None = Field(
        None, ge=1, le=1000, description="Gradient steps of a fit; null: 12 per patient, within 60 and 240."
    )
    batch_size: int = Field(8, ge=2, le=64, description="Slices per step.")
    learning_rate: FiniteFloat = Field(
        1e-3, gt=0, le=1, description="AdamW's learning rate at the start; a cosine takes it to 0."
    )
    folds: int = Field(
        5, ge=2, le=10, description="Fits for the cross-validation, at most one per patient with a target."
    )
    augment: bool = Field(True, description="Whether slices are rotated and flipped at random.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="The seed of everything random.")
