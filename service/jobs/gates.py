"""What masks decide of a candidate's gate, and how that is taken back.

A gate is JSON of a job: `passed`, its `checks`, and `masks`, the latest verdict by masks. `passed` is what
the masks decided, else whether every check passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Decision = Literal["accepts", "refuses", "undecided"]


def decided(low: float, high: float) -> Decision:
    """What the one-sided bounds of the change of Dice decide, each 95 % certain."""
    return "accepts" if low >= 0 else "refuses" if high < 0 else "undecided"


def gate_with_masks(gate: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    """The gate with a verdict by masks, which replaces an earlier one; without any for None."""
    found = {name: value for name, value in (gate or {}).items() if name != "masks"}
    checks = found.setdefault("checks", [])
    found["passed"] = bool(checks) and all(check.get("passed") is True for check in checks)
    if verdict is not None:
        found["masks"] = dict(verdict)
        if verdict["decision"] != "undecided":
            found["passed"] = verdict["decision"] == "accepts"
    return found


def words(verdict: Mapping[str, Any]) -> str:
    """A verdict by masks as a sentence."""
    change, low, high = (100 * float(verdict[name]) for name in ("change", "at_least", "at_most"))
    said = {
        "accepts": f"With 95 % certainty it is at least {low:+.1f}: they accept the candidate.",
        "refuses": f"With 95 % certainty it is at most {high:+.1f}: they refuse the candidate.",
        "undecided": f"It is from {low:+.1f} to {high:+.1f}, each with 95 % certainty: they decide nothing.",
    }[str(verdict["decision"])]
    return (
        f"Masks of {verdict['masks']} scans, drawn where the candidate and the global model differ most: "
        f"over the cohort's {verdict['patients']} patients Dice changes by {change:+.1f} points. {said}"
    )
