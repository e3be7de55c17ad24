"""A routing space (IOP-FL): adapted to unlabeled scans by weighing its models, layer by layer."""

from __future__ import annotations

from personalization.options.adaptation import RoutingOptions
from service.kinds.kind import AdaptableKind, Words

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
        "equal parts (with presets “statistics” and “tent” the global model alone).",
        before="The global model it came from first",
        parts={
            "consistency": "Mean squared difference between the answers to an image and to the image with "
            "noise.",
            "entropy": "How undecided the answers are. A low value is not a good mask.",
            "shape": "How far the answers are from compact shapes.",
        },
    ),
)
