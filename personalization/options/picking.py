"""Options of a pick: choosing a cluster (FedBiCross) for a hospital by its unlabeled scans."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Criterion = Literal["information", "statistics", "combined", "entropy", "consistency", "consensus"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


class PickingOptions(BaseModel):
    """How a cluster is picked. The default is what came out best on phantoms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    criterion: Criterion = Field(
        "information",
        description="What the clusters' models are compared by, without labels: `information` how decided "
        "the answers are and how much they depend on the image, `statistics` how far what batch norm sees is "
        "from what it expects, `combined` both. The others did worse on phantoms, and are for research.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Everything random derives from it.")
