"""Make a graph in another precision, and judge it on the scans of a cohort."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="quantisation",
    run="service.worker.quantisation:run_quantisation",
    options="service.adaptation.quantisation:QuantisationOptions",
    card="service.adaptation.card.sections:of_quantisation",
    stages={
        **COMMON,
        "quantising": "comparing the graphs, scan by scan",
        "publishing": "publishing the candidate",
    },
)
