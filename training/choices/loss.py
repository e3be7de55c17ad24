"""Which loss a method trains with: the task's default, or the one that is named."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from model_store.task import Task
from personalization.losses import DEFAULTS, LOSSES, Loss
from training.config import MethodConfig
from training.errors import ConfigurationError


def _known(name: str) -> str:
    if name not in LOSSES:
        raise ValueError(f"expected one of {', '.join(LOSSES)}, found '{name}'")
    return name


class LossConfig(MethodConfig):
    """Configuration of a method that trains with any registered loss."""

    # Left out of a dump where nothing was chosen: the identity of a run has what was chosen.
    loss: Annotated[str, AfterValidator(_known)] | None = Field(
        None,
        exclude_if=lambda name: name is None,
        description="a registered loss; without it, the task's default",
    )

    def loss_for(self, task: Task) -> Loss:
        """The loss that is trained with. Raises ConfigurationError for one of another kind of task."""
        chosen = LOSSES[self.loss or DEFAULTS[task.kind]]
        if task.kind not in chosen.kinds:
            fitting = ", ".join(name for name, other in LOSSES.items() if task.kind in other.kinds)
            raise ConfigurationError(
                f"the loss does not fit the task '{task.name}'",
                [f"loss: expected one for a {task.kind} ({fitting}), found '{self.loss}'"],
            )
        if task.regions:
            return partial(_of_regions, chosen.function, torch.from_numpy(task.region_members))
        return chosen.function


def _of_regions(loss: Loss, members_KL: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of the logits [B, L, ...] of regions, and of class indices [B, ...]."""
    members = members_KL.to(targets.device, logits.dtype)
    return loss(logits, members[targets.long()].movedim(-1, 1))
