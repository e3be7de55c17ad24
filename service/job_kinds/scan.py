"""Adapt an artefact to one scan, and answer it."""

from __future__ import annotations

from service.job_kinds.kind import COMMON, JobKind

KIND = JobKind(
    name="scan",
    run="service.worker.cohort_job:run_scan",
    options="service.prediction.options:SegmentOptions",
    card="service.adaptation.card.sections:of_adaptation",
    unjudged="Nothing is kept of an adaptation to one scan, so there is no candidate to judge.",
    stages={**COMMON, "adapting": "adapting", "segmenting": "segmenting"},
    answers=True,
    of_its_maker=True,
)
