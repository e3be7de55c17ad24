"""The text fields of `POST /classify`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from service.scan_options import ScanOptions
from service.selection import Personalization


class ClassifyOptions(ScanOptions):
    """How a scan is to be classified."""

    personalization: Personalization | Literal["scan"] = Field(
        "auto",
        description="Whose model. `auto`: the version adapted to the hospital and assigned to it, else the "
        "member model of its site, else that of its cluster, else the global model; where there are several "
        "clusters and the hospital is in none, a refusal. `hospital`: the first of these, or a refusal. "
        "`scan`: of an ssf-pool, and its `auto`: adapted to this scan by itself.",
    )
    cluster: str | None = Field(
        None, max_length=64, description="With `cluster`: which one; that of the hospital by default."
    )
