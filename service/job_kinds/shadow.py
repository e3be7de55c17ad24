"""Let a second version answer a scan unseen, and compare both answers."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="shadow",
    run="service.worker.shadow:run_shadow",
    options="service.shadow:ShadowOptions",
    stages={**COMMON, "comparing": "comparing the answers of two versions"},
)
