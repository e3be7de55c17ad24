"""Segment a series of a PACS, and store the answer there or keep it."""

from __future__ import annotations

from service.job_kinds.kind import ON_A_PACS, JobKind

KIND = JobKind(
    name="pacs-segment",
    run="service.worker.pacs:run_pacs_segment",
    options="service.pacs.requests:SeriesOptions",
    stages={**ON_A_PACS, "segmenting": "segmenting", "storing": "storing the answer in the PACS"},
    answers=True,
    way="pacs",
)
