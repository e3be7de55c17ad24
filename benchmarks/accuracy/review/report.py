"""The page of `review`: what the rule chooses, the protocol's criteria, then every set and signal.

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
from benchmarks.accuracy.review.measures import Fit, Values, Worth, found, risks, worth
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import table
from training.report.charts import Line, colour_of, line_chart

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
_DRAWN = {ORACLE: "blue", "sdc": "orange", ENTROPY: "green", "R": "violet", "dose": "ochre"}
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
    rungs: tuple[Told, ...]
    home: Told | None
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
        at_home = [each for tables in result["home"].values() for each in tables.values()]
        home, served = Told.of(at_home), Told.of(result["outside"].values(), "dosed ")
        of_served = Told.of([each for m in result["members"].values() for each in m.values()], "dosed ")
        rungs = tuple(each.fitted(fits) for each in outside if each is not None)
        return cls(
            row["cell"],
            joined(rungs),
            rungs,
            home and home.fitted(fits),
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


def sections(
    rows: Sequence[Row], planned: Mapping[str, int], command: str, files: Mapping[str, str]
) -> list[str]:
    """All sections for which there are rows; `planned` has the number of seeds of each set, `files` the
    figure of each."""
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
    for name in sets:
        own = [cell for cell in cells if cell.set_ == name]
        parts += [f"## {name}", _of_set(own), _hospitals(own, choice), _empty(own)]
        parts += [f"![Risk by coverage]({files[name]})", _caption()]
        if any(cell.served for cell in own):
            parts += [_of_served(own)]
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


def _within(signal: str, cell: OfCell) -> float | None:
    """What is found within each rung alone."""
    values = [
        found(each.lost, each.lost if signal == ORACLE else each.doubts[signal])
        for each in cell.rungs
        if signal == ORACLE or signal in each.doubts
    ]
    defined = [value for value in values if math.isfinite(value)]
    return fmean(defined) if defined else None


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


def _of_set(cells: Sequence[OfCell]) -> str:
    header = ["signal", "found", "of oracle", "each seed", "AURC", "AUC", "within a rung", "at home"]
    lines = []
    for name in (ORACLE, *SIGNALS):
        seeds = each_seed(cells, partial(_of, "outside", "found", name))
        if seeds:
            lines.append(
                [
                    name,
                    _hundredths(fmean(seeds.values())),
                    f"{100 * _share_of_oracle(cells, name):.0f} %",
                    ", ".join(map(_hundredths, seeds.values())),
                    f"{100 * mean(cells, partial(_of, 'outside', 'aurc', name)):.1f}",
                    f"{mean(cells, partial(_of, 'outside', 'auc', name)):.2f}",
                    _hundredths(mean(cells, partial(_within, name))),
                    _hundredths(mean(cells, partial(_of, "home", "found", name))),
                ]
            )
    return table(header, lines)


def _of_served(cells: Sequence[OfCell]) -> str:
    answers = sum(len(cell.served.lost) for cell in cells if cell.served)
    lines = [
        [
            name,
            _hundredths(mean(cells, partial(_of, "served", "found", name))),
            f"{100 * _share_of_oracle(cells, name, 'served'):.0f} %",
            f"{mean(cells, partial(_of, 'served', 'auc', name)):.2f}",
        ]
        for name in (ORACLE, *SIGNALS)
        if math.isfinite(mean(cells, partial(_of, "served", "found", name)))
    ]
    said = f"Dosed answers of cohorts that the gate passes ({answers:,}):"
    return said + "\n\n" + table(["signal", "found", "of oracle", "AUC"], lines)


def _hospitals(cells: Sequence[OfCell], choice: str) -> str:
    known = []
    for site in dict.fromkeys(cell.cell["site"] for cell in cells):
        own = [cell for cell in cells if cell.cell["site"] == site]
        if any(choice in cell.outside.doubts for cell in own):
            share, entropy = (_share_of_oracle(own, name) for name in (choice, ENTROPY))
            lost = 100 * mean(own, lambda cell: float(cell.outside.lost.mean()))
            known.append(f"{site} {100 * share:.0f} % ({100 * entropy:.0f} %; {lost:.0f} points lost)")
    said = f"Share of what the oracle finds, by hospital: `{choice}` (`entropy`; mean loss) at "
    return f"{said}{', '.join(known)}."


def _empty(cells: Sequence[OfCell]) -> str:
    told = [cell.outside for cell in cells]
    empty = np.concatenate([each.doubts["empty"] for each in told]) > 0
    lost = np.concatenate([each.lost for each in told])
    if not empty.any():
        return "No answer is empty."
    there = f"{int(empty.sum()):,} of {len(empty):,} answers lack a label"
    others = f"; the others lost {100 * lost[~empty].mean():.0f}" if (~empty).any() else ""
    return f"{there}: they lost {100 * lost[empty].mean():.0f} points in the mean{others}."


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


def curves(rows: Sequence[Row], name: str) -> str:
    """Risk by coverage of a set outside, means over its cells."""
    told = [OfCell.of(row).outside for row in rows if row["cell"]["set"] == name]
    coverages = np.arange(5.0, 101.0, 5.0)
    lines = {}
    for index, signal in enumerate(_DRAWN):
        own = [each for each in told if signal == ORACLE or signal in each.doubts]
        if own:
            risk = mean_of([_at(each, signal, coverages) for each in own])
            lines[signal] = Line([*zip(coverages.tolist(), risk, strict=True)], colour_of(index))
    return line_chart(lines, along="answers kept, in %")


def _at(told: Told, signal: str, coverages: Values) -> Values:
    risk = risks(told.lost, told.lost if signal == ORACLE else told.doubts[signal])
    places = np.ceil(coverages / 100 * len(risk)).astype(int) - 1
    return np.asarray(100 * risk[places], np.float64)


def mean_of(curves_: Sequence[Values]) -> list[float]:
    """The mean of curves."""
    return [float(value) for value in np.mean(curves_, axis=0)]


def _caption() -> str:
    colours = ", ".join(f"`{signal}` {colour}" for signal, colour in _DRAWN.items())
    return f"Points of Dice that the answers kept have lost, least doubt first: {colours}."


def _hundredths(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "–"


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**missed**"
