"""Options of every adaptation to a cohort of scans."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

INCLUDE = "include"


class CohortOptions(BaseModel):
    """What is done with scans of the cohort that are unlike the others or the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unlike: Literal["leave-out", "include"] = Field(
        "leave-out",
        description="Scans that are unlike the others or the task: `leave-out`, nothing is fitted to them; "
        "or `include` them, and let the guard learn that their kind is the hospital's. Masks that seem to "
        "belong to other scans are refused, or with `include` used.",
        exclude_if=lambda unlike: unlike == "leave-out",
    )
