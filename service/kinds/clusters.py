"""Clusters (FedBiCross): a hospital from outside is given the model of the cluster that its scans pick."""

from __future__ import annotations

from personalization.options.picking import PickingOptions
from service.kinds.kind import AdaptableKind, Words

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
