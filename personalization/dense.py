"""DENSE's two stages: a generator of images that an ensemble knows, and what it is trained on.

Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022. D(x) is the mean of the members'
logits, S the student. For noise z, labels y and x = G(z), the generator minimises (Section 3.1)

    CE(D(x), y) + lambda_1 BN(x) + lambda_2 DIV(x)
    BN(x) = 1/m sum_k sum_l ||mean_l(x) - mean_kl|| + ||var_l(x) - var_kl||      over members k and layers l
    DIV(x) = - KL(D(x) || S(x)) where D(x) and S(x) predict different classes, else 0

The first two terms are those of DeepInversion, which FedBiCross has too (`personalization.fedbicross`); the
third asks for images between the decision boundaries of ensemble and student.

Legend: B batch, C channels, H and W height and width, K classes, Z noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.fedbicross.inversion import InversionWeights, inversion_loss
from personalization.precision import to_float32


class Generator(nn.Module):
    """Noise [B, Z] to images [B, C, H, W]: a linear layer and three convolutions, as in the authors' code.

    The code's images are in 0..1. A network here sees standardised images, so the last layer is a batch norm
    without parameters in place of a sigmoid.
    """

    def __init__(self, noise: int, width: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.first = (2 * width, math.ceil(self.height / 4), math.ceil(self.width / 4))
        self.linear = nn.Linear(noise, math.prod(self.first))
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, noise_BZ: Tensor) -> Tensor:
        """[B, C, H, W]."""
        images: Tensor = self.blocks(self.linear(noise_BZ).unflatten(1, self.first))
        return images[:, :, : self.height, : self.width]


def disagreement(teacher_BK: Tensor, student_BK: Tensor) -> Tensor:
    """Compute DIV of logits: minus KL(teacher || student) of the images of which the predictions differ, the
    mean over the batch."""
    log_teacher = functional.log_softmax(teacher_BK, dim=1)
    log_student = functional.log_softmax(student_BK, dim=1)
    divergences_B = (log_teacher.exp() * (log_teacher - log_student)).sum(dim=1)
    differ_B = teacher_BK.argmax(dim=1) != student_BK.argmax(dim=1)
    return -(divergences_B * differ_B).mean()


@dataclass(frozen=True)
class GeneratorLoss:
    """The weighted sum, and its unweighted terms."""

    total: Tensor
    cross_entropy: Tensor
    batch_norm: Tensor
    disagreement: Tensor


def generator_loss(
    members: Sequence[nn.Module],
    student: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    bn_weight: float,
    boundary_weight: float,
) -> GeneratorLoss:
    """Compute the generator's loss. Members and student are in evaluation mode after it."""
    weights = InversionWeights(total_variation=0.0, batch_norm=bn_weight, per_member=True)
    known = inversion_loss(members, images_BCHW, labels_B, weights)
    boundary = disagreement(known.logits, to_float32(student.eval()(images_BCHW)))
    total = known.total + boundary_weight * boundary
    return GeneratorLoss(total, known.cross_entropy, known.batch_norm, boundary.detach())


@torch.no_grad()
def ensemble_logits(members: Sequence[nn.Module], images_BCHW: Tensor) -> Tensor:
    """Compute D(x), [B, K], with running statistics."""
    return torch.stack([to_float32(member.eval()(images_BCHW)) for member in members]).mean(dim=0)
