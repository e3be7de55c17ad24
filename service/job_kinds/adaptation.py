"""Adapt an artefact of the federation to a hospital, by the scans of a cohort."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="adaptation",
    run="service.worker.cohort_job:run_adaptation",
    options=None,
    card="service.adaptation.card.sections:of_adaptation",
    stages={
        **COMMON,
        "measuring": "measuring how far the scans are from the federation's, and adapting",
        "adapting": "adapting",
        "fitting": "learning from the masks, some patients held out at a time",
        "joining": "learning from the masks",
        "comparing": "comparing the clusters' models",
        "judging": "judging the candidate",
        "drawing": "drawing the pictures",
        "publishing": "publishing the candidate",
    },
)
