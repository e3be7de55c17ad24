"""The text fields of `POST /classify`."""

from __future__ import annotations

from pydantic import Field

from service.scan_options import ScanOptions
from service.selection import Personalization


class ClassifyOptions(ScanOptions):
    """How a scan is to be classified."""

    personalization: Personalization = Field(
        "auto",
        description="Whose model. `auto`: the version adapted to the hospital and assigned to it, else the "
        "member model of its site, else the global model. `hospital`: the first of these, or a refusal.",
    )
