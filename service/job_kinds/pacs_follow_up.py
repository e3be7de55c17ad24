"""Read a series of a PACS and the patient's earlier ones by one version, and say what changed."""

from __future__ import annotations

from service.job_kinds.kind import ON_A_PACS, JobKind

KIND = JobKind(
    name="pacs-follow-up",
    run="service.worker.pacs_follow_up:run_pacs_follow_up",
    options="service.pacs.requests:FollowUpOptions",
    stages={
        **ON_A_PACS,
        "searching": "searching the PACS",
        "segmenting": "segmenting",
        "repeating": "answering the repeated scans",
    },
    answers=True,
    way="pacs",
)
