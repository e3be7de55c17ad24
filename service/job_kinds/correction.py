"""Compare corrections of a model's answers with what it answered."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="correction",
    run="service.worker.correction:run_correction",
    options="service.corrections.rows:MeasuringOptions",
    stages={**COMMON, "measuring": "comparing corrections with the answers"},
)
