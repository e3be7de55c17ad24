"""The page of `review`: what the rule chooses, the protocol's criteria, a figure, then signals by set.

The unit is a hospital: hospitals are averaged first, then seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.accuracy.review import replay
from benchmarks.accuracy.review.hospital import SCALE, Signals
from benchmarks.accuracy.review.measures import Fit, Values, Worth, worth
from benchmarks.harness.cells import Row
from benchmarks.harness.figures import strip_chart
from benchmarks.harness.tables import crossed, table

REAL = ("lungs_cxr", "retina_vessels", "brain_lgg_flair", "breast_ultrasound")
ORACLE, ENTROPY = "oracle", "entropy"
# In the order in which a tie is decided.
SINGLE = ("sdc", "sdc, empty first", ENTROPY, "size", "pieces", "R")
FREE, SECOND = "free", "second"
FITS = {
    FREE: ("sdc", "empty", ENTROPY, "size", "pieces", "R"),
    SECOND: ("sdc", "empty", ENTROPY, "size", "pieces", "R", "dose", "half"),
}
TWICE = ("dose", "half", "statistics", SECOND)
SIGNALS = (*SINGLE, FREE, *TWICE)
# What a signal must find more, to be served in the place of another.
TIE, BY_FIT, BY_SECOND = 0.005, 0.02, 0.05
GOAL, LEAST_AUC = 0.85, 0.7
# Losses and doubts of some answers.
Doubts = Mapping[str, Values]


@dataclass(frozen=True)
class Told:
    """Some answers: what they lost, and every doubt of them."""

    lost: Values
    doubts: Doubts

    @classmethod
    def of(cls, tables: Iterable[Signals], prefix: str = "") -> Told | None:
        """The global model's answers, or with `dosed ` the dosed that the gate passes; None: there are none.

        A signal that the network does not have is not among the doubts.
        """
        columns: dict[str, list[int | None]] = {}
        for each in tables:
            for name, values in each.items():
                columns.setdefault(name, []).extend(values)
        known = {
            name: np.array(values, np.float64) / SCALE
            for name, values in columns.items()
            if values and None not in values
        }
        if prefix and known:
            known = {name: values[known["passed"] > 0] for name, values in known.items()}
        if not known or not len(known["dice"]):
            return None
        own = {name: known.get(prefix + name, known.get(name)) for name in (*FITS[SECOND], "statistics")}
        alike = ("sdc", "dose", "half", "statistics")
        doubts = {
            name: 1 - values if name in alike else values
            for name, values in own.items()
            if values is not None
        }
        doubts["sdc, empty first"] = doubts["sdc"] + 2 * doubts["empty"]
        return cls(1 - known[prefix + "dice"], doubts)

    def fits(self) -> dict[str, Fit]:
        """To these answers."""
        return {
            name: Fit.of(self.lost, {part: self.doubts[part] for part in parts if part in self.doubts})
            for name, parts in FITS.items()
            if name == FREE or "dose" in self.doubts
        }

    def fitted(self, fits: Mapping[str, Fit]) -> Told:
        """With the doubts that the fits make."""
        return Told(self.lost, {**self.doubts, **{name: fit(self.doubts) for name, fit in fits.items()}})

    @property
    def worth(self) -> dict[str, Worth]:
        """The worth of every signal, and of an oracle."""
        signals = {name: self.doubts[name] for name in SIGNALS if name in self.doubts}
        return {name: worth(self.lost, doubt) for name, doubt in {ORACLE: self.lost, **signals}.items()}


@dataclass(frozen=True)
class OfCell:
    """The answers of a cell; fits are to its members' validation scans. None where there is no answer.

    `members` has the worth for the rule: each member's answers by fits to the others'.
    """

    cell: Mapping[str, Any]
    outside: Told
    served: Told | None
    members: Mapping[str, Worth]

    @classmethod
    def of(cls, row: Row) -> OfCell:
        """Fit, and apply."""
        result = row["result"]
        members = {name: Told.of(tables.values()) for name, tables in result["members"].items()}
        own = {name: told for name, told in members.items() if told is not None}
        fits = joined(own.values()).fits()
        left_out = {
            name: told.fitted(joined(each for other, each in own.items() if other != name).fits())
            for name, told in own.items()
        }
        outside = [Told.of([each]) for each in result["outside"].values()]
        served = Told.of(result["outside"].values(), "dosed ")
        of_served = Told.of([each for m in result["members"].values() for each in m.values()], "dosed ")
        return cls(
            row["cell"],
            joined(each.fitted(fits) for each in outside if each is not None),
            served and served.fitted(of_served.fits() if of_served else {}),
            joined(left_out.values()).worth,
        )

    @property
    def set_(self) -> str:
        """The set's name."""
        return str(self.cell["set"])


def joined(parts: Iterable[Told]) -> Told:
    """The answers of all parts, of which there is at least one; doubts are those that all have."""
    some = [*parts]
    names = [name for name in some[0].doubts if all(name in each.doubts for each in some)]
    return Told(
        np.concatenate([each.lost for each in some]),
        {name: np.concatenate([each.doubts[name] for each in some]) for name in names},
    )


def sections(rows: Sequence[Row], planned: Mapping[str, int], command: str, figure: str) -> list[str]:
    """All sections for which there are rows; `planned` has the number of seeds of each set, `figure` is the
    file of the figure."""
    cells = [OfCell.of(row) for row in rows]
    seeds = sorted({int(cell.cell["seed"]) for cell in cells})
    answers = sum(len(cell.outside.lost) for cell in cells)
    parts = [
        "[The protocol](protocol-review.md) was fixed before anything was run. `found` is the share of the "
        "lost Dice, in hundredths, among the 20 % of answers that a signal names first; chance finds 20. "
        f"Means over hospitals, then over seeds. Seeds: {', '.join(map(str, seeds))}. {len(rows)} cells are "
        f"finished, with {answers:,} answers to hospitals from outside."
    ]
    if not cells:
        return parts
    scores, choice = scored(cells), chosen(scored(cells))
    sets = list(dict.fromkeys(cell.set_ for cell in cells))
    parts += [
        "## Findings",
        _findings(cells, choice),
        "## What the rule chooses",
        *_choice(scores, choice, sets, planned),
    ]
    parts += ["## Criteria", table(["criterion", "found", "met"], [*_criteria(cells, choice)])]
    by_set = {name: [cell for cell in cells if cell.set_ == name] for name in sets}
    parts += [
        "What each signal finds more than `entropy`, in hundredths, at each hospital and seed:",
        f"![found more than entropy]({figure})",
        "## Hospitals from outside",
        "`found`, and in brackets its share of the oracle's and the AUC of the worst quarter.",
        crossed("signal", _of_sets(by_set, "outside")),
        _empty(by_set),
    ]
    main = (ORACLE, SINGLE[0], choice)
    if served := {key: own for key, own in _of_sets(by_set, "served").items() if key[0] in main}:
        parts += ["The same of dosed answers of cohorts that the gate passes:", crossed("signal", served)]
    parts += replay.section(rows)
    lacking = _lacking(cells, planned, command)
    return [*parts, "## Not computed yet", lacking] if lacking else parts


# ------------------------------------------------------------------ the rule


def scored(cells: Sequence[OfCell]) -> dict[str, dict[str, float]]:
    """What each signal finds on the members' scans, by set: the mean over cells."""
    known: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        for name, each in cell.members.items():
            if math.isfinite(each.found):
                known.setdefault(name, {}).setdefault(cell.set_, []).append(each.found)
    return {name: {set_: fmean(each) for set_, each in sets.items()} for name, sets in known.items()}


def chosen(scores: Mapping[str, Mapping[str, float]]) -> str:
    """The signal that the protocol's rule serves, by `scored`."""

    def more(name: str, other: str) -> float:
        common = [set_ for set_ in scores.get(name, {}) if set_ in scores[other]]
        gains = [scores[name][set_] - scores[other][set_] for set_ in common]
        return fmean(gains) if gains else -math.inf

    gains = {name: more(name, SINGLE[0]) for name in SINGLE}
    served = next(name for name in SINGLE if gains[name] >= max(gains.values()) - TIE)
    if more(FREE, served) >= BY_FIT:
        served = FREE
    best = max(TWICE, key=lambda name: more(name, served))
    return best if more(best, served) >= BY_SECOND else served


def _choice(
    scores: Mapping[str, Mapping[str, float]], choice: str, sets: Sequence[str], planned: Iterable[str]
) -> list[str]:
    lines = [
        [
            name,
            *(_hundredths(scores[name][set_]) if set_ in scores[name] else "–" for set_ in sets),
            _hundredths(fmean(scores[name].values())),
        ]
        for name in (ORACLE, *SIGNALS)
        if name in scores
    ]
    said = (
        f"`{choice}`. What each signal finds on validation scans of the members behind drawn scanners; fits "
        "leave out the member that they score."
    )
    if missing := [name for name in planned if name not in sets]:
        said += f" The choice is not final: there is no cell yet of {', '.join(missing)}."
    return [said, table(["signal", *sets, "mean"], lines)]


# ------------------------------------------------------------------ means


def mean(cells: Sequence[OfCell], value: Callable[[OfCell], float | None]) -> float:
    """Over hospitals, then seeds; NaN where no cell has the value."""
    by_seed = each_seed(cells, value)
    return fmean(by_seed.values()) if by_seed else math.nan


def each_seed(cells: Sequence[OfCell], value: Callable[[OfCell], float | None]) -> dict[int, float]:
    """The mean over the hospitals of each seed."""
    found_: dict[int, list[float]] = {}
    for cell in cells:
        each = value(cell)
        if each is not None and math.isfinite(each):
            found_.setdefault(int(cell.cell["seed"]), []).append(each)
    return {seed: fmean(values) for seed, values in sorted(found_.items())}


def _of(part: str, measure: str, signal: str, cell: OfCell) -> float | None:
    told = getattr(cell, part)
    if told is None or (signal != ORACLE and signal not in told.doubts):
        return None
    return float(getattr(told.worth[signal], measure))


def _criteria(cells: Sequence[OfCell], choice: str) -> Iterable[list[str]]:
    by_set = {name: [cell for cell in cells if cell.set_ == name] for name in [c.set_ for c in cells]}
    for name in REAL:
        if name in by_set:
            share = _share_of_oracle(by_set[name], choice)
            said = f"1. {name}: at least 85 % of the oracle's share"
            yield [said, f"{100 * share:.0f} %", _met(share >= GOAL)]
    gains = {
        name: mean(own, partial(_of, "outside", "found", choice))
        - mean(own, partial(_of, "outside", "found", ENTROPY))
        for name, own in by_set.items()
    }
    least = min(gains, key=gains.__getitem__)
    yield [
        "2. finds more than entropy on every set",
        f"{100 * gains[least]:+.1f} ({least})",
        _met(gains[least] > 0),
    ]
    aucs = {
        name: mean(by_set[name], partial(_of, "outside", "auc", choice)) for name in REAL if name in by_set
    }
    if aucs:
        low = min(aucs, key=aucs.__getitem__)
        yield [
            "4. AUC of the worst quarter at least 0.7 on each real set",
            f"{aucs[low]:.2f} ({low})",
            _met(aucs[low] >= LEAST_AUC),
        ]


def _share_of_oracle(cells: Sequence[OfCell], signal: str, part: str = "outside") -> float:
    return mean(cells, partial(_of, part, "found", signal)) / mean(cells, partial(_of, part, "found", ORACLE))


def _findings(cells: Sequence[OfCell], choice: str) -> str:
    """What the choice is worth, what would have been better, and who reaches the goal."""
    by_set = {cell.set_: [each for each in cells if each.set_ == cell.set_] for cell in cells}
    shares: dict[str, dict[str, float]] = {}
    for signal in SIGNALS:
        known = {name: _share_of_oracle(own, signal) for name, own in by_set.items()}
        shares[signal] = {name: share for name, share in known.items() if math.isfinite(share)}

    def told(signal: str) -> str:
        low = min(shares[signal], key=shares[signal].__getitem__)
        least, middle = shares[signal][low], fmean(shares[signal].values())
        return f"`{signal}` ({100 * middle:.0f} % in the mean of sets, least {100 * least:.0f} % on {low})"

    def best(signals: Iterable[str]) -> str:
        return max((each for each in signals if shares[each]), key=lambda each: min(shares[each].values()))

    real = [name for name in REAL if name in by_set]
    reached = [
        f"`{signal}`"
        for signal in SIGNALS
        if real and all(shares[signal].get(name, 0.0) >= GOAL for name in real)
    ]
    alone, twice = best((*SINGLE, FREE)), best(TWICE)
    return (
        f"In shares of what an oracle finds at hospitals from outside, the rule's choice is {told(choice)}. "
        f"In hindsight, by their least, the best without a second answer is {told(alone)}, and "
        f"with one {told(twice)}. The goal of 85 % on each of {len(real)} real sets is reached by "
        f"{', '.join(reached) or 'no signal'}."
    )


def _of_sets(by_set: Mapping[str, Sequence[OfCell]], part: str) -> dict[tuple[object, object], str]:
    """What each signal finds, by set."""
    shown: dict[tuple[object, object], str] = {}
    for signal in (ORACLE, *SIGNALS):
        for name, cells in by_set.items():
            found = mean(cells, partial(_of, part, "found", signal))
            if math.isfinite(found):
                share = 100 * _share_of_oracle(cells, signal, part)
                auc = mean(cells, partial(_of, part, "auc", signal))
                shown[signal, name] = f"{_hundredths(found)} ({share:.0f} %, {auc:.2f})"
    return shown


def _empty(by_set: Mapping[str, Sequence[OfCell]]) -> str:
    """How many answers lack a label, and what they and the others lost."""
    parts = []
    for name, cells in by_set.items():
        empty = np.concatenate([cell.outside.doubts["empty"] for cell in cells]) > 0
        lost = 100 * np.concatenate([cell.outside.lost for cell in cells])
        if empty.any():
            others = f", the others {lost[~empty].mean():.0f}" if (~empty).any() else ""
            count = f"{int(empty.sum()):,} of {len(empty):,}"
            parts.append(f"{name} {count} (lost {lost[empty].mean():.0f} points{others})")
    return f"Answers that lack a label: {'; '.join(parts) or 'none'}."


def _lacking(cells: Sequence[OfCell], planned: Mapping[str, int], command: str) -> str:
    """Sets of which some seed has no row, or fewer hospitals than another."""
    lines = []
    for name, count in planned.items():
        seeds = [int(cell.cell["seed"]) for cell in cells if cell.set_ == name]
        sites = len({cell.cell["site"] for cell in cells if cell.set_ == name})
        if len(seeds) < count * sites or not seeds:
            done = f"{len(seeds)} cells of seeds {', '.join(map(str, sorted({*seeds})))}" if seeds else "none"
            lines.append(f"- {name} ({done}): `{command} --only set={name.replace(' ', '?')}`")
    return "\n".join(lines)


# ------------------------------------------------------------------ the figure


def figure_of(rows: Sequence[Row]) -> str:
    """What each signal finds more than entropy, at each hospital and seed, by set."""
    parts: dict[str, dict[str, list[float]]] = {}
    for cell in map(OfCell.of, rows):
        known = {signal: _of("outside", "found", signal, cell) for signal in SIGNALS}
        base = known[ENTROPY]
        for signal, value in known.items():
            if signal != ENTROPY and value is not None and base is not None and math.isfinite(value - base):
                own = parts.setdefault(cell.set_, {}).setdefault(signal, [])
                own.append(100 * (value - base))
    return strip_chart(parts, "hundredths")


def _hundredths(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "–"


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**missed**"
