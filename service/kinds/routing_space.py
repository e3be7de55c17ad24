"""A routing space (IOP-FL): adapted to unlabeled scans by weighing its models, layer by layer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from service.kinds.kind import AdaptableKind, Words

Preset = Literal["paper", "official", "statistics"]


class RoutingOptions(BaseModel):
    """How a routing space is adapted. Every field has the default that is right for most hospitals."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: Preset = Field(
        "paper",
        description="The loss: `paper` consistency + 0.01 (shape + entropy), noise only; `official` as the "
        "published code of IOP-FL. `statistics` learns nothing: the global model alone, with batch norm's "
        "statistics of these scans.",
    )
    router: Literal["direct", "pooled"] = Field(
        "direct",
        description="Where coefficients come from: `direct` one per layer and model, for few scans; `pooled` "
        "a small network on each layer's features.",
    )
    epochs: int = Field(10, ge=1, le=200, description="Passes over the cohort; the best safe one is kept.")
    batch_size: int = Field(16, ge=1, le=128, description="Slices per step.")
    routing_rate: FiniteFloat | None = Field(
        None, gt=0, le=10, description="Learning rate of the routing; null: 0.1 for direct, 0.001 for pooled."
    )
    bn_rate: FiniteFloat = Field(
        1e-3, gt=0, le=10, description="Learning rate of batch norm's scale and shift."
    )
    train_bn_affine: bool = Field(True, description="Whether batch norm's scale and shift are learnt too.")
    noise: FiniteFloat = Field(
        0.5, ge=0, le=10, description="Of the consistency loss, in standard deviations of each slice."
    )
    shape_weight: FiniteFloat | None = Field(
        None,
        ge=0,
        le=10,
        description="Weight of the shape loss, which expects one compact target; null: the preset's.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Everything random derives from it.")


ROUTING_SPACE = AdaptableKind(
    name="routing-space",
    what="a global model with those of the federation's sites, as `python -m training.federate --method "
    "iop-fl` publishes it with consent",
    options=RoutingOptions,
    by_scan=True,
    words=Words(
        truth="no score on it was taken against a ground truth: this hospital sent none.",
        gate="The gate has seen no ground truth: look at the pictures too.",
        epochs="No labels are involved. Epoch 0 is step 0, before anything was learned: all models in "
        "equal parts (with preset “statistics” the global model alone).",
        before="The global model it came from first",
        parts={
            "consistency": "Mean squared difference between the answers to an image and to the image with "
            "noise.",
            "entropy": "How undecided the answers are. A low value is not a good mask.",
            "shape": "How far the answers are from compact shapes.",
        },
    ),
)
