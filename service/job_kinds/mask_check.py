"""Choose the scans of which masks would say most of a candidate."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="mask-check",
    run="service.worker.mask_check:run_mask_check",
    options="service.adaptation.mask_checks:CheckOptions",
    stages={**COMMON, "checking": "comparing the candidate with the global model, scan by scan"},
    of_candidate=True,
    draws=True,
)
