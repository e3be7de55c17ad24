"""The gate's tables: which candidates it passed or refused, and their change of Dice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.tables import mean_and_spread, table

# One point of Dice: a candidate that loses more does harm.
HARM = -0.01


def gate_sections(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per kind of candidate, the four kinds of verdict, and whether harm was done."""
    known = [line for line in lines if line["change"] is not None]
    if not known:
        return []
    kinds = dict.fromkeys(line["candidate"] for line in sorted(known, key=lambda line: line["planted"]))
    body = [_kind(kind, [line for line in known if line["candidate"] == kind]) for kind in kinds]
    header = ["candidate", "count", "change of Dice", "worst", "harmful", "refused", "harm let through"]
    return [
        "### The gate",
        "Every merged candidate against its parent, the global model with the statistics of training; "
        "the inductive ones on patients that were not learned from. Harmful: more than one point of Dice "
        "below the parent. The gate sees no label.",
        table([*header, "good refused", "refused for"], body),
        _harm(known),
    ]


def _kind(kind: str, lines: Sequence[Mapping[str, Any]]) -> list[object]:
    changes = [line["change"] for line in lines]
    reasons = Counter(
        check["name"] for line in lines for check in line["verdict"]["checks"] if not check["passed"]
    )
    return [
        kind + (" (planted)" if lines[0]["planted"] else ""),
        len(lines),
        mean_and_spread(changes),
        f"{min(changes):+.3f}",
        sum(map(_harmful, lines)),
        sum(not _passed(line) for line in lines),
        sum(_harmful(line) and _passed(line) for line in lines),
        sum(not _harmful(line) and not _passed(line) for line in lines),
        ", ".join(f"{name} {count}" for name, count in reasons.most_common(3)) or "–",
    ]


def _harm(lines: Sequence[Mapping[str, Any]]) -> str:
    own = [line for line in lines if not line["planted"]]
    harmful = [line for line in lines if _harmful(line)]
    through = [line for line in harmful if _passed(line)]
    listed = "; ".join(
        f"{line['candidate']} at {line['site']}, seed {line['seed']}: {line['change']:+.3f}"
        for line in through
    )
    alone = "" if any(map(_passed, own)) else ": where nothing passes, no harm is done, and no good"
    return (
        f"{sum(map(_passed, own))} of {len(own)} candidates that were not planted may be assigned{alone}. "
        f"Of {len(harmful)} harmful candidates the gate refused {len(harmful) - len(through)} and let "
        f"{len(through)} through ({listed or 'none'}). Of {len(own)} candidates that were not planted "
        f"{sum(map(_harmful, own))} were harmful, and the gate was what prevented "
        f"{sum(_harmful(line) and not _passed(line) for line in own)} of these."
    )


def _harmful(line: Mapping[str, Any]) -> bool:
    change: float = line["change"]
    return change < HARM


def _passed(line: Mapping[str, Any]) -> bool:
    passed: bool = line["verdict"]["passed"]
    return passed
