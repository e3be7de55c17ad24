"""Say which scans of a cohort are unlike the others or the task, in a job's result, warnings and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model_store.unlike import CohortKinds
from service.jobs.sections import Row, Section, Table, number

# A warning names so many scans, the card so many.
_NAMED, _LISTED = 5, 50


def facts_of(labels: Sequence[str], found: CohortKinds) -> dict[str, Any]:
    """What the guard says of the cohort, for the job's result. `labels` name its scans.

    `warned` is the share of scans that it warns of, `kinds` how many scans each kind has, the most first. The
    scans are those that are warned of or left out.
    """
    sizes = np.unique(found.kind, return_counts=True)[1]
    scans = [
        {"scan": label, "says": [each.text for each in warnings], "used": bool(used)}
        for label, warnings, used in zip(labels, found.warnings, found.used, strict=True)
        if warnings or not used
    ]
    return {
        "warned": round(found.share_warned, 4),
        "mistaken": round(found.share_mistaken, 4),
        "kinds": sorted(map(int, sizes), reverse=True),
        "unlike": scans,
    }


def said_of_unlike(facts: Mapping[str, Any]) -> list[str]:
    """What a person should know of it before the candidate."""
    kinds, scans = facts["kinds"], facts["unlike"]
    total, out = sum(kinds), [each for each in scans if not each["used"]]
    said = []
    if len(kinds) > 1:
        said.append(
            f"the cohort has {len(kinds)} kinds of scans, that are less alike than two scanners: "
            f"{' and '.join(map(str, kinds))} of its {total} scans"
        )
    if out:
        named = "; ".join(f"{each['scan']}: {_why(each)}" for each in out[:_NAMED])
        more = f"; and {len(out) - _NAMED} more" if len(out) > _NAMED else ""
        said.append(
            f"{len(out)} of {total} scans {'is' if len(out) == 1 else 'are'} left out, unlike the others or "
            f"the task ({named}{more}). Nothing is fitted to {'it' if len(out) == 1 else 'them'}; option "
            "unlike=include has all scans used"
        )
    return said


def _why(scan: Mapping[str, Any]) -> str:
    return ", ".join(scan["says"]) or "it does not look like the others"


def section(result: Mapping[str, Any]) -> tuple[Section, ...]:
    """The scans that are unlike, for the job's card; nothing of a result without."""
    share, scans = number(result.get("warned")), result.get("unlike")
    if share is None or not isinstance(scans, list) or not scans:
        return ()
    rows = tuple(
        Row(
            name=str(scan["scan"]),
            cells=(_why(scan),),
            mark="" if scan.get("used") else "left out",
        )
        for scan in scans[:_LISTED]
        if isinstance(scan, Mapping) and isinstance(scan.get("says"), list) and "scan" in scan
    )
    sentences = [
        f"The guard warns of {100 * share:.0f} % of the cohort's scans. It goes on to warn of their like, "
        "unless they were included (option unlike=include)."
    ]
    if len(scans) > _LISTED:
        sentences.append(f"The first {_LISTED} of {len(scans)} are listed.")
    body = Table(columns=("scan", "what it says"), figures=0, rows=rows)
    return (Section(title="Scans unlike the others or the task", sentences=tuple(sentences), body=body),)
