"""Stage 2c: the loss by which a student learns from a teacher and its noise-adapted copy (FedBiCross, L_KD).

Legend: B batch, K classes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

TEMPERATURE = 20.0


def divergence(student_BK: Tensor, teacher_BK: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over the batch.

    The factor T^2 keeps the gradient's scale when the temperature changes (Hinton, 2015).
    """
    log_student = functional.log_softmax(student_BK / temperature, dim=1)
    log_teacher = functional.log_softmax(teacher_BK / temperature, dim=1)
    mean = functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return mean * temperature**2


def distillation_loss(
    student_BK: Tensor,
    teacher_BK: Tensor,
    adapted_BK: Tensor,
    share: float,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Compute L_KD = share KL(F~ || G) + (1 - share) KL(F || G); the share of F~ falls as 1 - t/T."""
    adapted = share * divergence(student_BK, adapted_BK, temperature)
    return adapted + (1 - share) * divergence(student_BK, teacher_BK, temperature)
