"""The report's section on what own models change: at the sites, and at a hospital from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from training.algorithm import Publication
from training.data.cases import FEW_CASES
from training.record import RunRecord
from training.report.charts import Change, forest_chart


def content(record: RunRecord, publication: Publication | None) -> dict[str, Any] | None:
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
    changes = practised["by_shift"]["members"] if practised else {}
    outside = [Change(site, *found) for site, found in changes.items()]
    if not inside and not outside:
        return None
    # The SVG is drawn here; names in it are escaped by the drawing library.
    return {
        "inside": Markup(forest_chart(inside)) if inside else None,
        "shares": [_chosen(record, site, found) for site, found in sorted(personal.items())],
        "outside": Markup(forest_chart(outside)) if outside else None,
        "licence": _licence(practised["by_shift"]) if practised else None,
        "cost": (practised["rounds"], practised["sent"]) if practised else None,
    }


def _chosen(record: RunRecord, site: str, found: Mapping[str, Any]) -> str:
    """How much of its own training a site keeps, and how many patients that rests on."""
    count = next((each.patients.get("val", 0) for each in record.sites if each.name == site), 0)
    rests = f"chosen on {count} validation patients{', few' if count < FEW_CASES else ''}"
    if found.get("share_from") == "the federation's patients":
        rests = "chosen on all sites' validation patients together"
    return f"{site} {found['share']:g} ({rests})"


def _licence(by_shift: Mapping[str, Any]) -> str:
    """What the practice of the dose by shift says, for a person."""
    return (
        f"As its gate serves it, Dice changed by {100 * by_shift['mean']:+.1f} points in the mean and by "
        f"{100 * by_shift['worst']:+.1f} in the worst of {by_shift['episodes']} episodes; "
        f"{100 * by_shift['lost']:.0f} % of them lost more than a point. The largest shift that was "
        f"practised is {by_shift['largest']:.1f}, where 1 is usual between hospitals."
    )
