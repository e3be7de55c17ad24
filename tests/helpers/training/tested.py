"""The metrics that a site would send of its test, made from its patients' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from training.engine.history import RoundEntry, SiteEntry
from training.paired import PairedSums

# label (empty: all) -> the scores of the shared model and of the site's own, or None
Scores = Mapping[str, tuple[Sequence[float], Sequence[float] | None]]


def sent(scores: Scores, metric: str = "dice", **more: float) -> dict[str, float]:
    """The metrics of a site with these scores. `more` has others; `__` in a name stands for `/`."""
    metrics: dict[str, float] = {}
    for label, (shared, own) in scores.items():
        of = f"/{label}" if label else ""
        for model, values in (("", shared), ("personal_", own)):
            if values:
                metrics[f"{model}test_{metric}{of}"] = sum(values) / len(values)
                metrics[f"{model}test_n{of}"] = float(len(values))
        if own:
            sums = PairedSums.of(shared, own)
            metrics[f"personal_test_paired_n{of}"] = sums.count
            for what in ("before", "change", "squares"):
                metrics[f"personal_test_paired_{what}{of}"] = getattr(sums, what) / sums.count
    return metrics | {name.replace("__", "/"): value for name, value in more.items()}


def round_of(
    sites: Mapping[str, Mapping[str, float]], dropped: Mapping[str, str] | None = None
) -> RoundEntry:
    """The round of the phase `test` in which sites sent these metrics."""
    entries = {site: SiteEntry(1.0, metrics, {}, {}, (), 0.1) for site, metrics in sites.items()}
    return RoundEntry("test", 0, 1, 0.1, entries, dropped or {})
