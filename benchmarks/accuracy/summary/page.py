"""Write docs/results/summary.md from the recorded rows of every benchmark of accuracy.

    python -m benchmarks summary

A question is a situation of somebody who must choose. Every arm that was run is named in short, with what it
changes against the question's baseline; a table has those that help in some setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean

import numpy as np

from benchmarks.accuracy.papers.report import PaperTables
from benchmarks.accuracy.picking.report import CHANCE, regrets
from benchmarks.accuracy.summary.arms import ALIASES, leaves
from benchmarks.accuracy.summary.settings import (
    SETS,
    Setting,
    Shift,
    of_dose,
    of_papers,
    recorded,
    rows_of_dose,
    rows_of_lens,
)
from benchmarks.accuracy.volumes.report import elsewhere, inside, level, seconds_of
from benchmarks.harness.cells import Row
from benchmarks.harness.experiment import RESULTS
from benchmarks.harness.scores import Difference
from benchmarks.harness.tables import table, write_text
from benchmarks.registry import EXPERIMENTS, find
from personalization.options.picking import CRITERIA

PATH = RESULTS / "summary.md"
VOLUMES = "volumes.cpu"
_LEGEND = """\
Every arm of every benchmark of accuracy is on this page, written from the recorded rows. A figure is the
change against the baseline on the same patients or images, in points (hundredths) of Dice or of accuracy; the
baseline's level, the mean of sites, is in bold. ▲ *helps*, ▼ *harms*: the 95 % interval (paired bootstrap
over patients within sites, seeds averaged first) leaves zero out, and each of three seeds or more agrees.
Without a sign no difference is shown. In brackets: too few seeds or patients to say. Nothing is corrected for
the number of comparisons. A table has the arms that help somewhere; those that do not are in short, and on
the linked pages with intervals, costs and all sites.

Besides what a line says leaves the hospital, each site of a federation sends the number of its images, its
scores and summary statistics of its intensities ([threat model](../explanation/threat-model.md))."""
# What was measured before, and not since.
_EARLIER = (
    "## Earlier studies",
    """\
Smaller benchmarks came before the tables above. Their pages, rows and code are in the history, in
`docs/results` and `benchmarks` of the commit that is named:

- `inside` (`a4dbd5def7f5`): by the paper's recipe, IOP-FL's personal models are 9 points below the global one
  on gliomas, and fine-tuned ones 2;
- `outside` (`a4dbd5def7f5`): by that recipe, routing loses 1 to 3 points on gliomas and 1 on vessels, Tent
  next to nothing, and statistics of the cohort gain 1 on gliomas;
- `cross_organ` (`57696fa04a18`): with one recipe for every arm, FedOAP is 4 points below each site alone, and
  level after twice the rounds; zero-shot on another organ is worth next to nothing;
- `instance_adaptive` (`cfb51d4909fc`): a pool of FedIns gains 1 to 3 points of Dice over its frozen network,
  and on a small ViT nothing over random entries;
- `one_shot` (`f5bd7dcbd1ca`): FedBiCross beats the other one-shot methods at home, and not what a hospital
  had before;
- `unseen` (`73bd79f67199`): a playbook that chose among four recipes gained 1.3 points on the phantom and 1.4
  on real sets behind the strongest scanner, no more than one fitted on shuffled features; members' personal
  models gain 0.3 points in the mean, and none of eleven loses 0.1.""",
)
_SIGNS = {"helps": " ▲", "harms": " ▼", "no difference shown": ""}


@dataclass(frozen=True)
class Question:
    """A situation: what it is, what it needs, and the settings that say something about it.

    `than` names the baseline that all its settings have. `outside`: the hospital is no member.
    """

    title: str
    needs: str
    than: str
    settings: Callable[[], Iterable[Setting]]
    outside: bool = False

    @cached_property
    def found(self) -> tuple[Setting, ...]:
        """The settings, read once."""
        return tuple(self.settings())

    @property
    def arms(self) -> list[str]:
        """Every arm of every setting by its common name, in the order of the tables."""
        return list(dict.fromkeys(_common(arm) for setting in self.found for arm in setting.scores))

    def changes(self, arm: str) -> list[Difference]:
        """What each setting that compares the arm says of it."""
        changes = (_change(setting, arm) for setting in self.found)
        return [change for change in changes if change is not None]

    def sections(self) -> list[str]:
        """The question's part of the page."""
        kept = [a for a in self.arms if self.changes(a) == [] or self.kind(a) in _KINDS[:2]]
        body = [
            [arm, *(_shown(setting, arm) for setting in self.found), leaves(arm, self.outside)]
            for arm in kept
        ]
        return [
            f"## {self.title}",
            f"Needs: {self.needs}. Against {self.than}. Tested: {'; '.join(map(_tested, self.found))}.",
            table(["arm", *map(_column, self.found), "leaves the hospital"], body)
            if len(kept) > 1
            else f"No arm helps: {', '.join(dict.fromkeys(map(_column, self.found)))}.",
            *_unscored(self.found),
        ]

    def kind(self, arm: str) -> str:
        """What the settings say of an arm together."""
        return _kind({change.verdict for change in self.changes(arm)})


QUESTIONS = (
    Question(
        "A member of a federation with one task",
        "masks for some training scans at every site, and a connection for tens of rounds",
        "FedAvg's global model at the same site",
        lambda: of_papers("paper-iop-fl", "inside", "FedAvg"),
    ),
    Question(
        "A hospital from outside, without labels: the scans that were learned from",
        "a cohort of unlabeled scans, and the federation's models; [method_cost](method_cost.md) has the "
        "cost of each recipe over a plain pass",
        "the global model unchanged",
        lambda: of_papers("paper-iop-fl", "outside", "FedAvg"),
        outside=True,
    ),
    Question(
        "A federation over different organs",
        "masks for some training images at every site; organs and modalities may differ",
        "FedAvg",
        lambda: of_papers("paper-fedoap", "comparison", "FedAvg"),
    ),
    Question(
        "The parts of FedOAP",
        "as above",
        "FedAvg on FedOAP's network",
        lambda: of_papers("paper-fedoap", "ablation", "none: FedAvg on its network"),
    ),
    Question(
        "Classification from a network that was trained before",
        "classes for some images at every site, and a backbone that every site has",
        "FedAvg of all weights",
        lambda: of_papers("paper-fedins", "comparison", "FedAvg"),
    ),
    Question(
        "The parts of FedIns",
        "as above",
        "the pool of scales and shifts",
        lambda: of_papers("paper-fedins", "ablation", "SSF pool"),
    ),
    Question(
        "Hospitals that can exchange models once",
        "classes for some images at every site, and one exchange",
        "the model that the hospital trained alone",
        lambda: of_papers("paper-fedbicross", "comparison", "Local-only"),
    ),
    Question(
        "The parts of FedBiCross",
        "as above",
        "the whole method",
        lambda: of_papers("paper-fedbicross", "ablation", "FedBiCross"),
    ),
)

_SETTINGS = "as the part above of the same paper"
STUDIES = (
    Question(
        "A study: the moving average's tau, IOP-FL",
        _SETTINGS,
        "tau 0.9, the paper's",
        lambda: of_papers("paper-iop-fl", "tau", "IOP-FL, tau 0.9"),
    ),
    Question(
        "A study: how many members train, IOP-FL",
        _SETTINGS,
        "the global model of three members",
        lambda: of_papers("paper-iop-fl", "members", "FedAvg, 3 members"),
        outside=True,
    ),
    Question(
        "A study: the terms of the loss outside, IOP-FL",
        _SETTINGS,
        "the global model unchanged",
        lambda: of_papers("paper-iop-fl", "terms", "FedAvg"),
        outside=True,
    ),
    Question(
        "A study: seconds against gain outside, IOP-FL",
        _SETTINGS,
        "the global model unchanged",
        lambda: of_papers("paper-iop-fl", "epochs", "FedAvg"),
        outside=True,
    ),
    Question(
        "A study: clients that are less or more alike, FedIns",
        _SETTINGS,
        "FedAvg of all weights",
        lambda: of_papers("paper-fedins", "alpha", "FedAvg"),
    ),
    Question(
        "A study: an organ that takes no part, FedOAP",
        "a global model; masks of some images for the two epochs",
        "FedAvg on FedOAP's network, as it is",
        lambda: of_papers("paper-fedoap", "unseen", "FedAvg on FedOAP's network, zero-shot"),
        outside=True,
    ),
    Question(
        "A study: clients that are less or more alike, FedBiCross",
        _SETTINGS,
        "FedAvg-1",
        lambda: of_papers("paper-fedbicross", "alpha", "FedAvg-1"),
    ),
    Question(
        "A study: ten and twenty clients, FedBiCross",
        _SETTINGS,
        "FedAvg-1",
        lambda: chain(
            of_papers("paper-fedbicross", "10 clients", "FedAvg-1"),
            of_papers("paper-fedbicross", "20 clients", "FedAvg-1"),
        ),
    ),
    Question(
        "A study: how often a trajectory is sampled, FedBiCross",
        _SETTINGS,
        "the whole method",
        lambda: of_papers("paper-fedbicross", "samples", "FedBiCross"),
    ),
)


def _common(arm: str) -> str:
    return ALIASES.get(arm, arm)


def _own(setting: Setting, arm: str) -> str | None:
    """The setting's own name of an arm, None where it has not got it."""
    return next((own for own in setting.scores if _common(own) == arm), None)


def _change(setting: Setting, arm: str) -> Difference | None:
    own = _own(setting, arm)
    return None if own is None else setting.changes.get(own)


def _shown(setting: Setting, arm: str) -> str:
    own = _own(setting, arm)
    if own is None:
        return ""
    if own == setting.baseline:
        return f"**{100 * setting.level(own):.1f}**"
    found = setting.changes[own]
    if found is None:
        return "–"
    mean = found.interval.mean
    if found.verdict not in _SIGNS:
        return f"({100 * mean:+.1f})"
    sign = _SIGNS[found.verdict]
    # A small change with a sign would read as none.
    digits = 2 if sign and abs(mean) < 0.0005 else 1
    return f"{100 * mean:+.{digits}f}{sign}"


def _column(setting: Setting) -> str:
    return f"[{setting.name}]({setting.table}.md)"


def _tested(setting: Setting) -> str:
    sites, seeds = _counted(len(setting.sites), "site"), _counted(setting.seeds, "seed")
    return f"{sites}, {setting.units} patients or images, {seeds}"


def _unscored(settings: Sequence[Setting]) -> list[str]:
    """Arms that are on the linked pages alone."""
    found = dict.fromkeys(f"{arm} ({s.table})" for s in settings for arm in s.unscored)
    return [f"With the paper's metric alone, on the linked page: {', '.join(found)}."] if found else []


# ---------------------------------------------------------------------- the page


def sections() -> list[str]:
    """The whole page, from the recorded rows alone."""
    by_dose = of_dose(rows_of_dose())
    return [
        "# What to choose",
        "```bash\npython -m benchmarks summary\n```",
        _LEGEND,
        "## In short",
        "In brackets: how many of the settings that have the arm say so, and the least and greatest change.",
        "\n".join(
            [
                *_auto(by_dose),
                *chain.from_iterable(_in_short(question) for question in QUESTIONS if question.found),
            ]
        ),
        *_sets(),
        *_dose(by_dose),
        *_lens(),
        *chain.from_iterable(question.sections() for question in (*QUESTIONS, *STUDIES) if question.found),
        *_volumes(),
        *_picking(),
        *_not_computed(),
        *_EARLIER,
    ]


def write() -> None:
    """Write the page."""
    write_text(PATH, "\n\n".join(sections()) + "\n")


def _auto(shifts: Sequence[Shift]) -> list[str]:
    """What the default does, by severity."""
    own = [shift for shift in shifts if "auto" in shift.changes]
    sets = ", ".join(dict.fromkeys(shift.set for shift in own))
    return [
        f"- **A hospital from outside, by default** (`auto`, on {sets}), against the global model unchanged:",
        *(f"  - {line}" for line in _by_severity(own, "auto")),
    ]


def _by_severity(shifts: Sequence[Shift], arm: str) -> Iterator[str]:
    for severity in sorted({shift.severity for shift in shifts}):
        found = [shift.changes[arm] for shift in shifts if shift.severity == severity]
        yield f"severity {severity}: {_range(found, 'hospital')}"


def _range(found: Sequence[Mapping[str, float]], who: str) -> str:
    """The least and the greatest mean of a set, and the worst of all `who`."""
    means = [100 * fmean(changes.values()) for changes in found]
    worst = 100 * min(min(changes.values()) for changes in found)
    return f"{min(means):+.1f} to {max(means):+.1f} in the mean of a set, {worst:+.1f} at the worst {who}"


def _in_short(question: Question) -> list[str]:
    """Every arm once, by what the settings say."""
    kinds: dict[str, list[str]] = {}
    for arm in question.arms:
        if changes := question.changes(arm):
            kinds.setdefault(question.kind(arm), []).append(_named(arm, changes))
    lines = [f"  - {kind.lower()}: {', '.join(kinds[kind])}" for kind in _KINDS if kind in kinds]
    return [f"- **{question.title}**, against {question.than}:", *lines]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _named(arm: str, changes: Sequence[Difference]) -> str:
    """An arm, how many columns say so of those that have it, and its least and its greatest change."""
    words, found = [change.verdict for change in changes], [100 * change.interval.mean for change in changes]
    helps, harms = words.count("helps"), words.count("harms")
    said = f"helps in {helps}, harms in {harms}" if helps and harms else f"in {helps or harms}"
    said = f"{said} of {len(changes)}: " if helps or harms else ""
    least, most = f"{min(found):+.1f}", f"{max(found):+.1f}"
    span = least if least == most else f"{least} to {most}"
    return f"{arm} ({said}{span})"


_KINDS = (
    "Helps somewhere, harms nowhere",
    "Helps somewhere and harms somewhere",
    "Harms somewhere, helps nowhere",
    "No difference shown",
    "Too few seeds or patients to say",
)


def _kind(words: set[str]) -> str:
    helps, harms = "helps" in words, "harms" in words
    if helps or harms:
        return _KINDS[1 if helps and harms else 0 if helps else 2]
    return _KINDS[3 if "no difference shown" in words else 4]


def _sets() -> list[str]:
    """How many sites, labels and scans each set has."""
    body = [
        [name, found.shift, len(found.images), sum(found.patients) or "not named", sum(found.images)]
        for name, found in SETS.items()
    ]
    return [
        "## The sets",
        "All labelled images are counted; those of the last two are of alpha 0.3 and seed 0. A run trains on "
        "a half to two thirds of a member's patients.",
        table(["set", "what differs between sites", "sites", "patients", "labelled images"], body),
    ]


def _dose(shifts: Sequence[Shift]) -> list[str]:
    """What the dose by shift serves, and doses without a gate."""
    return [
        "## A hospital from outside, by a dose that grows with the shift",
        "Needs: a cohort of unlabeled scans, and the federation's models. Points against the global model "
        "unchanged: the mean of sets, and the worst hospital of any. Columns are the severity of a drawn "
        "scanner; 0 is none. `auto` is what is served by default, 0 where it refuses; `by shift` is its dose "
        "without the gate. A classifier is left alone by now: `auto` of polyp_centres is from before, in two "
        "of three seeds. Nothing leaves the hospital. Each set: [dose.cpu](dose.cpu.md).",
        _shifts("recipe", shifts),
    ]


def _lens() -> list[str]:
    """What a lens before the network gives."""
    rows = rows_of_lens()
    shifts = of_dose(rows)
    sets = ", ".join(dict.fromkeys(str(row["cell"]["set"]) for row in rows))
    return [
        "## A hospital from outside, through a lens before the network",
        "As above, of any network, with the fingerprint of its members. `served` is what the gate of the "
        f"lens serves, `auto` the dose by shift. Sets: {sets}. Each: [lens.cpu](lens.cpu.md).",
        _shifts("recipe", shifts),
    ]


def _shifts(arm: str, shifts: Sequence[Shift]) -> str:
    """A line for every arm, and a column for every severity: the mean of its sets, and the worst hospital."""
    severities = sorted({shift.severity for shift in shifts})
    most = len({shift.set for shift in shifts})
    body = [[name, *(_of_arm(name, shifts, each, most) for each in severities)] for name in _arms_of(shifts)]
    return table([arm, *(f"severity {each}" for each in severities)], body)


def _arms_of(shifts: Sequence[Shift]) -> dict[str, None]:
    return dict.fromkeys(arm for shift in shifts for arm in shift.changes)


def _of_arm(arm: str, shifts: Sequence[Shift], severity: int, most: int) -> str:
    found = [shift.changes[arm] for shift in shifts if shift.severity == severity and arm in shift.changes]
    if not found:
        return ""
    means = [100 * fmean(changes.values()) for changes in found]
    worst = 100 * min(min(changes.values()) for changes in found)
    return f"{fmean(means):+.1f} ({worst:+.1f})" + (
        f", {_counted(len(found), 'set')}" if most > 1 + len(found) else ""
    )


def _volumes() -> list[str]:
    """What segmenting volumes whole reaches beside slices; levels, since arms are of other networks."""
    by_arm: dict[tuple[str, str], list[Row]] = {}
    for row in inside(recorded(VOLUMES)):
        for model in row["result"]["models"]:
            by_arm.setdefault((row["cell"]["arm"], model), []).append(row)
    body = [
        [
            f"{arm}, {model}" if model != "global" and (arm, "global") in by_arm else arm,
            len(rows),
            *(
                f"{fmean(level(row['result']['models'][model], metric) for row in rows):.{digits}f}"
                for metric, digits in (("dice", 3), ("hd95", 2), ("nsd", 3))
            ),
            seconds_of(rows),
        ]
        for (arm, model), rows in by_arm.items()
    ]
    body += [
        [f"{arm}, {answers}" if answers != "global" else arm, seeds, dice, hd95, "", ""]
        for arm, answers, seeds, dice, hd95 in elsewhere(recorded(VOLUMES))
        if answers.partition(",")[0] in ("global", "auto")
    ]
    return [
        "## Slices or whole volumes",
        "Needs: masks for some training volumes at every site, and a connection for tens of rounds. Levels "
        "on 12 held-out patients of hippocampus_nifti at three sites, of sites left out, and of photographs "
        "of vessels (HD95 in pixels); CPU seconds of the training. Each class and patient: "
        f"[{VOLUMES}]({VOLUMES}.md). Weights leave the hospital, every round.",
        table(["arm", "seeds", "Dice", "HD95, mm", "surface Dice", "CPU s"], body),
    ]


def _not_computed() -> list[str]:
    """How many cells of each paper's tables have no row."""
    body = []
    for name in EXPERIMENTS:
        for each in find(name).tables if name.startswith("paper-") else ():
            opened = find(name).of_table(each)
            assert isinstance(opened, PaperTables)
            rows = opened.shown(recorded(each.name))
            lacking = opened.lacking(rows)
            if count := sum(map(len, lacking.values())):
                parts = dict.fromkeys(part for part, _ in lacking)
                link = f"[{each.name}]({each.name}.md#not-computed-yet)"
                body.append([link, len(rows), count, ", ".join(parts)])
    return [
        "## Not computed yet",
        "The linked pages name every arm, and the command that computes it.",
        table(["table", "cells with a row", "without", "of"], body),
    ]


def _picking() -> list[str]:
    """What each criterion loses to the best cluster."""
    rows = [row for row in recorded("picking") if len(set(row["result"]["assignment"].values())) > 1]
    lost = list(chain.from_iterable(map(regrets, rows)))
    body = [
        [
            name,
            f"{100 * float(np.mean([np.mean(each[name]) for each in lost])):.1f}",
            f"{100 * max(max(each[name]) for each in lost):.1f}",
        ]
        for name in (*CRITERIA, CHANCE)
    ]
    return [
        "## Picking a cluster without labels",
        "Needs: unlabeled images, and a federation's cluster models. Points of accuracy lost to the best "
        f"cluster, on the phantom, over {len(lost)} choices ([picking](picking.md)). Nothing leaves the "
        "hospital.",
        table(["criterion", "lost", "lost at most"], body),
    ]
