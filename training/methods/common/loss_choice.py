"""Which loss a method trains with: the task's default, or the one that is named."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

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
        return chosen.function
