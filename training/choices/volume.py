"""How a method trains on volumes: what is drawn, and the values that suit volumes where none is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from typing_extensions import override

from model_store.store import Store
from model_store.task import Task
from training.config import MethodConfig
from training.local.registry import kind_of


class VolumeConfig(MethodConfig):
    """Configuration of a method that trains on slices or volumes."""

    foreground: float = Field(
        1 / 3, ge=0, le=1, description="volumes: share of a batch's patches that are centred on a target"
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {"foreground": 1 / 3}
    # What a kind of task takes where nothing is given, by the name of its `Data`.
    SUITED: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @override
    def prepared(self, store: Store, task: Task, name: str) -> Self:
        """This configuration, with what suits the kind of task in the fields that were not given."""
        suited = self.SUITED.get(kind_of(task).name, {})
        unsaid = {field: value for field, value in suited.items() if field not in self.model_fields_set}
        return super().prepared(store, task, name).model_copy(update=unsaid)
