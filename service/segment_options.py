"""The text fields of `POST /segment`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from service.answers import Output
from service.kinds.routing_space import Preset
from service.scan_options import ScanOptions


class SegmentOptions(ScanOptions):
    """How a scan is to be segmented."""

    personalization: Literal["auto", "global", "member", "hospital", "scan"] = Field(
        "auto",
        description="Whose model. `auto`: the version adapted to the hospital and assigned to it, else the "
        "member model of its site, else the global model. `hospital`: the first of these, or a refusal. "
        "`scan`: one adapted to this scan alone: of an ssf-pool at once, and its `auto`; of a routing-space "
        "by a job.",
    )
    preset: Preset | None = Field(
        None,
        description="With `scan` of a routing-space: what is learned from the scan, as in the options of an "
        "adaptation; by default what is the default there.",
    )
    shape_weight: FiniteFloat | None = Field(
        None,
        ge=0,
        le=10,
        description="With `scan` of a routing-space: weight of the shape loss, which expects one compact "
        "target. 0 for vessels, and where there may be several targets.",
    )
    output: Output | None = Field(
        None, description="`nifti` is the default for a volume, `png` for an image."
    )
