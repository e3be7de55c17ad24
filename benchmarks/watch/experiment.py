"""False alarms of a watch beside what was set, delays beside theory, and silence: by simulated years."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.harness.cells import Cell, Row, key
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.tables import crossed, table
from benchmarks.watch import simulation
from benchmarks.watch.simulation import (
    DAILY,
    LEVELS,
    MOST,
    MOVES_TOGETHER,
    SHARES,
    STREAMS,
    WEEKLY,
    WEEKLY_AS_ONE,
)
from service.watch import Budget
from service.watch.limits import delay_of, limit_of, spacing_of

# Those of which the promise is kept; the others show where it is not.
PROMISED = ("normal", "skewed", "heavy tails", WEEKLY, "two scanners")
OTHERS = ("zeros", MOVES_TOGETHER, WEEKLY_AS_ONE, DAILY)
GOAL = 0.2
# Montgomery, Introduction to Statistical Quality Control, table 9.3: two-sided, k = 0.5, by h and shift.
TEXTBOOK = {
    (4.0, 0.0): 168.0,
    (4.0, 1.0): 8.38,
    (4.0, 2.0): 3.34,
    (5.0, 0.0): 465.0,
    (5.0, 1.0): 10.4,
    (5.0, 2.0): 4.01,
}


@dataclass(frozen=True)
class Profile:
    """Hospitals and the years of each; how often a delay is drawn; scans a day; months between false
    alarms."""

    hospitals: int = 40
    years: int = 10
    repeats: int = 400
    rates: tuple[int, ...] = (5, 20, 200)
    months: float = 12.0


PROFILES = {"smoke": Profile(2, 1, 4, (5,)), "cpu": Profile()}


class Watch(Experiment[Profile]):
    """Spacing of false alarms, delays, shares, silence and the limits behind them."""

    name = "watch"
    title = "What a watch promises"
    question = "Are false alarms as rare as was set, and after how many scans is a change found?"
    profiles = PROFILES
    tables = (Table("watch"),)

    def cells(self) -> list[Cell]:
        """By table, the cheap ones first."""
        profile = self.profile
        setting = {"months": profile.months, "streams": STREAMS}
        often = {**setting, "repeats": profile.repeats}
        limits = [
            {"of": "limit", "limit": h, "shift": shift, "repeats": 10 * profile.repeats}
            for h, shift in TEXTBOOK
        ]
        levels = [
            {
                "of": "level",
                "law": law,
                "by_weekday": ranked,
                "shift": shift,
                "before": before,
                "per_day": 20,
                **often,
            }
            for law, ranked in (
                ("normal", False),
                ("skewed", False),
                ("heavy tails", False),
                ("normal", True),
            )
            for before in (50, 100, 500, 5000)
            for shift in (0.5, 1.0, 2.0)
        ]
        shares = [
            {"of": "share", "usual": usual, "changed": changed, "before": before, "per_day": 20, **often}
            for usual, changed in ((0.0, 0.1), (0.0, 0.3), (0.02, 0.1), (0.1, 0.3), (0.3, 0.6))
            for before in (50, 100, 500, 5000)
        ]
        silence = [
            {"of": "silence", "per_day": per_day, "weeks": weeks, **often}
            for per_day in (2, 5, 10, 20)
            for weeks in (2, 4, 26)
        ]
        years = [
            {
                "of": "years",
                "law": law,
                "per_day": rate,
                "hospitals": profile.hospitals,
                "years": profile.years,
                **setting,
            }
            for rate in profile.rates
            for law in (*PROMISED, *(OTHERS if rate <= 20 else ()))
        ]
        return [*limits, *levels, *shares, *silence, *years]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """One cell; its random numbers follow from the cell alone."""
        seed = zlib.crc32(key(cell).encode())
        if cell["of"] == "years":
            found: Counter[str] = Counter()
            for hospital in range(cell["hospitals"]):
                rng = np.random.default_rng([seed, hospital])
                found += simulation.false_alarms(
                    rng, cell["law"], cell["per_day"], cell["years"], _budget(cell)
                )
            return {kind: found[kind] for kind in ("level", "share", "silence")}
        rng = np.random.default_rng(seed)
        repeats = range(cell["repeats"])
        if cell["of"] == "limit":
            lengths = [simulation.run_length(rng, cell["limit"], cell["shift"]) for _ in repeats]
            return {
                "theory": round(spacing_of(cell["limit"], cell["shift"]), 3),
                "mean": round(mean(lengths), 3),
                "error": round(float(np.std(lengths)) / len(lengths) ** 0.5, 3),
            }
        if cell["of"] == "silence":
            days = [
                simulation.days_of_silence(rng, cell["per_day"], cell["weeks"], _budget(cell))
                for _ in repeats
            ]
            return {"mean": round(mean(days), 3), "first": days.count(1) / len(days), "longest": max(days)}
        spacing = _budget(cell).spacing(cell["per_day"])
        before = cell["before"]
        delay: Callable[[], int | None]
        if cell["of"] == "level":
            law, shift, theory = (
                cell["law"],
                cell["shift"],
                round(delay_of(limit_of(spacing), cell["shift"]), 3),
            )
            ranked = cell["by_weekday"]

            def delay() -> int | None:
                return simulation.delays(rng, law, ranked, shift, before, cell["per_day"], spacing)
        else:
            theory = None

            def delay() -> int | None:
                return simulation.share_delays(rng, cell["usual"], cell["changed"], before, spacing)

        delays = [each for each in (delay() for _ in repeats) if each is not None]
        return {
            "theory": theory,
            "series": len(delays),
            "found": round(mean(each < MOST for each in delays), 4) if delays else None,
            "median": median(delays) if delays else None,
            "mean": round(mean(delays), 3) if delays else None,
        }

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """False alarms, delays, shares, silence, limits."""
        made = {"years": _years, "level": _levels, "share": _shares, "silence": _silence, "limit": _limits}
        found = {of: [row for row in rows if row["cell"]["of"] == of] for of in made}
        return [made[of](found[of]) for of in made if found[of]]


def _budget(cell: Cell) -> Budget:
    return Budget(cell["months"], cell["streams"])


def _years(rows: Sequence[Row]) -> str:
    between: dict[tuple[object, object], str] = {}
    shares: dict[str, list[float]] = {}
    for row in rows:
        cell, result = row["cell"], row["result"]
        years = cell["hospitals"] * cell["years"]
        alarms = sum(result.values())
        months = 12 * years / alarms if alarms else math.inf
        kept = abs(months / cell["months"] - 1) <= GOAL
        shown = f"{months:.1f}" if kept else f"**{months:.1f}**"
        between[cell["law"], f"{cell['per_day']} scans a day"] = f"{shown} ({alarms})"
        if cell["law"] in PROMISED:
            for kind, of in _PARTS:
                share = result[kind] * cell["streams"] * cell["months"] / (12 * years * of)
                shares.setdefault(kind, []).append(share)
    used = ", ".join(f"{_KINDS[kind]} {min(own):.2f} to {max(own):.2f}" for kind, own in shares.items())
    cell = rows[0]["cell"]
    text = (
        f"{cell['hospitals']} hospitals, watched for {cell['years']} years each without a change, with "
        f"{cell['months']:.0f} months set between false alarms of {LEVELS} numbers and {len(SHARES)} shares "
        f"({_percents()} %) together. Each alarm begins a new series with the next day. Scans come as "
        "Poisson, fewer on weekends. Shown are the months between false alarms, bold where more than 20 % "
        f"off, and the alarms. The promised laws ({', '.join(PROMISED)}) use this much of what each kind may "
        f"have: {used}. Shares and silence use less, since their sums move in steps and the usual share is "
        "taken from its upper side.\n\n"
        f"`{WEEKLY}`: numbers of a weekend are half a standard deviation higher, and ranked among those of "
        f"weekends. Without that (`{WEEKLY_AS_ONE}`) the promise breaks, as it does where numbers of one day "
        f"resemble each other (`{DAILY}`: its mean varies by 0.3 standard deviations): such days look like "
        f"changes. `zeros` has 0 in six of ten answers, and `{MOVES_TOGETHER}` numbers that are "
        "correlated by 0.9: both make false alarms rarer than was set."
    )
    return f"## False alarms beside what was set\n\n{text}\n\n{crossed('law', between)}"


_KINDS = {"level": "numbers", "share": "shares", "silence": "silence"}
_PARTS = (("level", LEVELS), ("share", len(SHARES)), ("silence", 1))


def _percents() -> str:
    return ", ".join(f"{share:.0%}".rstrip("%") for share in SHARES)


def _levels(rows: Sequence[Row]) -> str:
    found: dict[tuple[object, object], str] = {}
    for row in rows:
        cell = row["cell"]
        law = cell["law"] + (", by weekday" if cell["by_weekday"] else "")
        theory = f"{cell['shift']} sd, theory {row['result']['theory']:.1f}"
        found[f"{law}, {cell['before']} before", theory] = _found(row)
    text = (
        "Scans from a shift of one number to its alarm, at 20 scans a day and the limit of the table above. "
        "Theory is Brook and Evans' chain for normal numbers of which the law is known: a small reference is "
        f"blinded by the changed values that enter it. A series without an alarm after {MOST} scans counts "
        f"as {MOST}. `by weekday`: ranked within each of seven weekdays, so that 50 answers have seen three. "
        "AIM-CU (the FDA's) takes its figures from `spc`, a package of R, and was not run beside this."
    )
    text += " The median, and in brackets the share of series that found it and the mean."
    head = "law, scans before"
    return f"## After how many scans a change is found\n\n{text}\n\n{crossed(head, found)}"


def _shares(rows: Sequence[Row]) -> str:
    found: dict[tuple[object, object], str] = {}
    for row in rows:
        cell = row["cell"]
        share = f"{cell['usual']:.0%} to {cell['changed']:.0%}"
        found[share, f"{cell['before']} scans before"] = _found(row)
    return f"## After how many scans a share is found to have grown\n\n{crossed('share of answers', found)}"


def _found(row: Row) -> str:
    result = row["result"]
    if not result["series"]:
        return "–"
    return f"{result['median']:.0f} ({result['found']:.0%}, {result['mean']:.0f})"


def _silence(rows: Sequence[Row]) -> str:
    found: dict[tuple[object, object], str] = {}
    for row in rows:
        weeks = f"{row['cell']['weeks']} weeks before"
        found[row["cell"]["per_day"], weeks] = f"{row['result']['mean']:.2f} ({row['result']['longest']})"
    text = (
        "Working days until an alarm, where scans came on working days and stop on a Monday: the mean, and "
        "the longest."
    )
    return f"## After how many days silence is found\n\n{text}\n\n{crossed('scans a day', found)}"


def _limits(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cell, result = row["cell"], row["result"]
        book = TEXTBOOK[cell["limit"], cell["shift"]]
        lines.append(
            [
                f"{cell['limit']:.0f}",
                cell["shift"],
                f"{book:g}",
                f"{result['theory']:.2f}",
                f"{result['mean']:.2f} ± {result['error']:.2f}",
            ]
        )
    text = (
        "Scans until an alarm of a two-sided sum, k = 0.5, from zero: in the textbook (Montgomery, table "
        "9.3), by the chain, and simulated with the standard error of the mean."
    )
    head = ("limit h", "shift, sd", "textbook", "chain", "simulated")
    return f"## The limits\n\n{text}\n\n{table(head, lines)}"
