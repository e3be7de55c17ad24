"""Segment one scan that takes longer than a request should."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="segment",
    run="service.worker.segment:run_segment",
    options="service.prediction.options:SegmentOptions",
    stages={**COMMON, "segmenting": "segmenting"},
    answers=True,
    of_its_maker=True,
)
