"""Bound by the masks of the chosen scans how a candidate changes Dice, and decide on it."""

from __future__ import annotations

from dataclasses import replace

from service.job_kinds import mask_check

KIND = replace(
    mask_check.KIND,
    name="mask-verdict",
    run="service.worker.mask_check:run_mask_verdict",
    options="service.adaptation.mask_checks:VerdictOptions",
    draws=False,
)
