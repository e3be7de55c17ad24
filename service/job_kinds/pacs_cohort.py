"""Add series of a PACS to a cohort."""

from __future__ import annotations

from service.job_kinds.kind import ON_A_PACS, JobKind

KIND = JobKind(
    name="pacs-cohort",
    run="service.worker.pacs:run_pacs_cohort",
    options="service.pacs.requests:FillOptions",
    stages={**ON_A_PACS, "searching": "searching the PACS"},
    adds_scans=True,
)
