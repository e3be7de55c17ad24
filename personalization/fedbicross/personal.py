"""Stage 3: the loss of a hospital's own model, from its cluster's model, its first model and private data.

Legend: B batch, K classes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from personalization.fedbicross.distillation import divergence


def personal_loss(
    logits_BK: Tensor,
    labels_B: Tensor,
    cluster_BK: Tensor,
    own_BK: Tensor,
    *,
    cluster_weight: float = 0.5,
    own_weight: float = 0.3,
    temperature: float = 1.0,
) -> Tensor:
    """Compute L = CE(f, y) + 0.5 KL(G_k || f) + 0.3 KL(f_i || f).

    The paper gives no temperature. At 1 the three terms have similar magnitude. At Stage 2's temperature, the
    factor T^2 would make the distillation terms dominate the labels.
    """
    loss = functional.cross_entropy(logits_BK, labels_B)
    loss = loss + cluster_weight * divergence(logits_BK, cluster_BK, temperature)
    return loss + own_weight * divergence(logits_BK, own_BK, temperature)
