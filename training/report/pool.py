"""The report's section on an SSF pool: use of the keys by round, and the traffic it saves."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from training.algorithm import Publication
from training.record import RunRecord
from training.report.charts import Line, colour_of, line_chart


def content(record: RunRecord, publication: Publication | None) -> dict[str, Any] | None:  # noqa: ARG001
    """Collect the variables of `pool.html` from a publication of kind `ssf-pool`; None without one."""
    if publication is None:
        return None
    facts, composite = publication.exhibits.facts, publication.composite
    seen = [entry for entry in facts["usage"] if entry["picks"] is not None]
    picks = composite["usage"] or []
    images = sum(picks) / composite["top"] if picks else 0
    shares = [count / images for count in picks] if images else []
    charts = {
        "Entropy of the keys' use; 1 means that all are used equally": ("entropy", True),
        "Keys that no image picks": ("dead", False),
    }
    return {
        "backbone": publication.details["backbone"],
        "entries": composite["entries"],
        "top": composite["top"],
        "exchanged": facts["exchanged"],
        "share": facts["exchanged"]["pool"] / facts["exchanged"]["full_fine_tuning"],
        "cells": [{"value": share, "shade": round(0.75 * share, 3)} for share in shares],
        "charts": [
            {
                "title": title,
                # The SVG is drawn here and holds only numbers.
                "svg": Markup(line_chart({title: _line(seen, name, index)}, share=share)),
            }
            for index, (title, (name, share)) in enumerate(charts.items())
            if seen
        ],
    }


def _line(seen: list[dict[str, Any]], name: str, index: int) -> Line:
    return Line([(entry["round"], entry[name]) for entry in seen], colour_of(index))
