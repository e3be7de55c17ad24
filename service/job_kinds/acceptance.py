"""Score a version on a hospital's scans with masks, as it answers, and report what was asked of it."""

from __future__ import annotations

from service.job_kinds.kind import ON_A_PACS, JobKind

KIND = JobKind(
    name="acceptance",
    run="service.worker.acceptance:run_acceptance",
    options="service.adaptation.acceptances:AcceptanceOptions",
    card="service.adaptation.card.sections:of_acceptance",
    stages={
        **ON_A_PACS,
        "storing": "storing an answer in the PACS",
        "scoring": "answering the scans, and comparing with the masks",
        "rehearsing": "rehearsing a rollback",
        "picturing": "drawing the worst answers",
    },
    accepts=True,
)
