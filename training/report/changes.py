"""The report's section on what models of their own change: at members, and at a hospital from outside."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from training.algorithm import Publication
from training.record import RunRecord
from training.report.charts import Change, forest_chart


def content(record: RunRecord, publication: Publication | None) -> dict[str, Any] | None:  # noqa: ARG001
    """Collect the variables of `changes.html` from a routing space's publication; None without any."""
    if publication is None:
        return None
    personal = publication.details.get("personal") or {}
    inside = [
        Change(site, found["val_dice"] - found["val_dice_global"])
        for site, found in sorted(personal.items())
        if found["val_dice"] is not None and found["val_dice_global"] is not None
    ]
    practised = publication.details.get("playbook")
    outside = [Change(site, *found) for site, found in practised["changes"].items()] if practised else []
    if not inside and not outside:
        return None
    # The SVG is drawn here; names in it are escaped by the drawing library.
    return {
        "inside": Markup(forest_chart(inside)) if inside else None,
        "shares": {site: found["share"] for site, found in sorted(personal.items())},
        "outside": Markup(forest_chart(outside)) if outside else None,
        "recipe": practised["best"] if practised else None,
        "promise": practised["promise"] if practised else None,
        "cost": (practised["rounds"], practised["sent"]) if practised else None,
    }
