"""Find segmentations in a PACS that a person edited, and take them for corrections of the answers."""

from __future__ import annotations

from service.job_kinds.kind import ON_A_PACS, JobKind

KIND = JobKind(
    name="pacs-correction",
    run="service.worker.pacs_correction:run_pacs_correction",
    options="service.pacs.requests:FillOptions",
    stages={**ON_A_PACS, "searching": "searching the PACS", "measuring": "comparing with the answers"},
)
