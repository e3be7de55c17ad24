"""DAFL's loss of a generator: Chen et al., Data-Free Learning of Student Networks, ICCV 2019.

For images x = G(z) of a batch, with y a teacher's logits for them, p their softmax and f its features, the
input of its output layer, the generator minimises (Section 3.2, Eq. 4 to 8)

    L_oh + a L_a + b L_ie
    L_oh = CE(y, argmax y)                    the images have a class that the teacher is sure of
    L_a  = -1/n sum_i ||f_i||_1               they move its features
    L_ie = 1/K sum_k q_k log q_k              all classes come alike; q is the mean of p over the batch

Here the teacher is an ensemble: y is the mean of the members' logits, and L_a the mean over the members.

The authors' code (huawei-noah/Data-Efficient-Model-Compression) takes the mean of |f| over the features too,
and sum_k q_k log10 q_k: `reading="code"`.

Legend: B batch, C channels, H and W height and width, K classes, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.networks.capabilities import head_paths
from personalization.precision import to_float32

Reading = Literal["paper", "code"]


@dataclass(frozen=True)
class GeneratorLoss:
    """The weighted sum, its unweighted terms, and the ensemble's logits [B, K] for the images."""

    total: Tensor
    one_hot: Tensor
    activation: Tensor
    entropy: Tensor
    logits: Tensor


def one_hot(logits_BK: Tensor) -> Tensor:
    """Compute L_oh."""
    return functional.cross_entropy(logits_BK, logits_BK.detach().argmax(dim=1))


def activation(features_BF: Tensor, reading: Reading = "paper") -> Tensor:
    """Compute L_a."""
    sizes = features_BF.flatten(1).abs()
    return -(sizes.sum(dim=1).mean() if reading == "paper" else sizes.mean())


def information_entropy(logits_BK: Tensor, reading: Reading = "paper") -> Tensor:
    """Compute L_ie: at least -log(K) / K where all classes come alike, 0 of one class alone."""
    share_K = functional.softmax(logits_BK, dim=1).mean(dim=0)
    # A class of which the share has become 0 adds 0.
    logarithm = share_K.clamp(min=torch.finfo(share_K.dtype).tiny).log()
    if reading == "code":
        return (share_K * logarithm).sum() / torch.log(logarithm.new_tensor(10.0))
    return (share_K * logarithm).mean()


def generator_loss(
    members: Sequence[nn.Module],
    images_BCHW: Tensor,
    activation_weight: float,
    entropy_weight: float,
    reading: Reading = "paper",
) -> GeneratorLoss:
    """Compute the generator's loss; the members are in evaluation mode after it."""
    answers, sizes = [], []
    for member in members:
        found: list[Tensor] = []
        output = member.eval().get_submodule(head_paths(member)[-1])
        handle = output.register_forward_pre_hook(lambda _, inputs, kept=found: kept.append(inputs[0]))
        try:
            answers.append(to_float32(member(images_BCHW)))
        finally:
            handle.remove()
        sizes.append(activation(to_float32(found[0]), reading))
    logits = torch.stack(answers).mean(dim=0)
    sure, active = one_hot(logits), torch.stack(sizes).mean()
    entropy = information_entropy(logits, reading)
    total = sure + activation_weight * active + entropy_weight * entropy
    return GeneratorLoss(total, sure.detach(), active.detach(), entropy.detach(), logits.detach())
