"""The page's tries: routing otherwise than the profile does, on the same sites and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import scores as tables
from benchmarks.outside_scores import BAKED, at, scores_of
from benchmarks.tables import table

Row = Mapping[str, Any]


def tries_sections(tries: Mapping[str, Sequence[Row]], usual: Sequence[Row], mode: str) -> list[str]:
    """A line per try and preset, of the merged network; `usual` are all rows of the profile's own setting."""
    body = []
    as_usual = scores_of(usual, mode)
    sites = tables.sites_of(as_usual)
    for name, rows in tries.items():
        found = scores_of(rows, mode)
        for arm in sorted(arm for arm in found if arm.startswith("routing ") and arm.endswith("(merged)")):
            tried = found[arm]
            here = [
                site for site in sites if any(unit[0] == site for seed in tried.values() for unit in seed)
            ]
            line = [arm.removesuffix(" (merged)"), name, len(tried)]
            line += [tables.mean_at(at(tried, site), [site]) for site in sites]
            for reference in (arm, BAKED):
                other = as_usual.get(reference, {})
                line.append(str(tables.difference(tried, other, here) or "–"))
            verdicts = [line for row in rows for line in row["result"].get("gate", [])]
            kind = f"{arm.removesuffix(' (merged)')}, {mode}"
            mine = [line for line in verdicts if line["candidate"] == kind]
            line.append(f"{sum(not line['verdict']['passed'] for line in mine)} of {len(mine)}")
            body.append(line)
    header = ["preset", "try", "seeds", *sites, "less as usual", f"less {BAKED}", "refused by the gate"]
    return [table(header, body)] if body else []
