"""Clusters (FedBiCross): a hospital from outside is given the model of the cluster that its scans pick."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from service.kinds.kind import AdaptableKind, Words

# As `personalization.fedbicross.picking` has them, which the API does not import.
Criterion = Literal["information", "statistics", "combined", "entropy", "consistency", "consensus"]


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


CLUSTERS = AdaptableKind(
    name="clusters",
    what="a model per cluster of the federation's hospitals, as `python -m training.federate --method "
    "fedbicross` publishes it",
    options=PickingOptions,
    by_scan=False,
    words=Words(
        truth="no score on it was taken against a ground truth: this hospital sent none.",
        gate="The gate has seen no ground truth: look at the answers too.",
        epochs="",
        before="The mean answer of all clusters' models first",
        parts={},
    ),
)
