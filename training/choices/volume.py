"""How a method trains on volumes: what is drawn, and the values that suit volumes where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from typing_extensions import override

from model_store.store import Store
from model_store.task import Task
from training.config import MethodConfig


class VolumeConfig(MethodConfig):
    """Configuration of a method that trains on slices or volumes."""

    foreground: float = Field(
        1 / 3, ge=0, le=1, description="volumes: share of a batch's patches that are centred on a target"
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {"foreground": 1 / 3}
    # What volumes take where nothing is given.
    VOLUMES: ClassVar[Mapping[str, Any]] = {}

    @override
    def prepared(self, store: Store, task: Task, name: str) -> Self:
        """This configuration, for volumes with what suits them in the fields that were not given."""
        ready = super().prepared(store, task, name)
        if not task.is_volume:
            return ready
        unsaid = {field: v for field, v in self.VOLUMES.items() if field not in self.model_fields_set}
        return ready.model_copy(update=unsaid)
