"""Options of a pick: choosing a cluster (FedBiCross) for a hospital by its unlabeled scans."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from personalization.options.cohort import CohortOptions

Criterion = Literal["information", "statistics", "combined", "entropy", "consistency", "consensus"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


class PickingOptions(CohortOptions):
    """Options of picking a cluster. The default was the best on phantoms."""

    criterion: Criterion = Field(
        "information",
        description="The label-free criterion that compares the clusters' models: "
        "`information`, how decided the answers are and how much they depend "
        "on the image; `statistics`, the distance of batch norm's statistics "
        "on the images from its running ones; `combined`, both. The others "
        "were worse on phantoms and are for research.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="The seed of everything random.")
