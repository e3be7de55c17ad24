"""The tries on the page: routing with settings other than the profile's, on the same sites and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.accuracy.outside.scores import BAKED, at, scores_of
from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import table


def tries_sections(tries: Mapping[str, Sequence[Row]], usual: Sequence[Row], mode: str) -> list[str]:
    """A line per try and preset, of the merged network; `usual` are all rows of the profile's own setting."""
    body = []
    as_usual = scores_of(usual, mode)
    sites = tables.sites_of(as_usual)
    for name, rows in tries.items():
        found = scores_of(rows, mode)
        for arm in sorted(arm for arm in found if arm.startswith("routing ") and arm.endswith("(merged)")):
            tried, preset = found[arm], arm.removesuffix(" (merged)")
            here = [site for site in sites if at(tried, site)]
            line = [preset, name, len(tried)]
            line += [tables.mean_at(at(tried, site), [site]) for site in sites]
            for reference in (arm, BAKED):
                other = as_usual.get(reference, {})
                line.append(str(tables.difference(tried, other, here) or "–"))
            judged = [entry for row in rows for entry in row["result"].get("gate", [])]
            mine = [entry["verdict"] for entry in judged if entry["candidate"] == f"{preset}, {mode}"]
            line.append(f"{sum(not verdict['passed'] for verdict in mine)} of {len(mine)}")
            body.append(line)
    header = ["preset", "try", "seeds", *sites, "less as usual", f"less {BAKED}", "refused by the gate"]
    return [table(header, body)] if body else []
