"""Does a network that sees slices larger help a hospital with a wider field of view?

The fourth amendment of `docs/results/protocol-lens.md` says what was fixed before it was run. Sets, networks
and hospitals are those of `lens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from typing_extensions import override

from benchmarks.accuracy.dose.experiment import POLYPS
from benchmarks.accuracy.field_of_view.hospital import Rung, at
from benchmarks.accuracy.lens.experiment import PROFILES as OF_LENS
from benchmarks.accuracy.lens.experiment import VOLUMES, LensExperiment
from benchmarks.accuracy.lens.experiment import Profile as LensProfile
from benchmarks.accuracy.lens.hospital import Trained
from benchmarks.accuracy.outside.hospital import some_of
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Table
from benchmarks.harness.tables import table

_RUNGS = tuple(Rung(*each) for each in ((1.0,), (1.5,), (2.0,), (3.0,), (1.0, "3"), (2.0, "3")))
_BY_NAME = {rung.name: rung for rung in _RUNGS}


def _profile(name: str, seeds: tuple[int, ...], rungs: Sequence[Rung]) -> LensProfile:
    """Slices that are segmented, of the profile of `lens`."""
    known = OF_LENS[name]
    sets = {each: own for each, own in known.sets.items() if each not in (VOLUMES, POLYPS)}
    return LensProfile(sets, seeds, (), known.scanners, known.phantoms, tuple(rung.name for rung in rungs))


class FieldOfView(LensExperiment):
    """What larger slices give an outside hospital with a wider field of view."""

    name = "field_of_view"
    title = "A wider field of view"
    question = "Does a network that sees slices larger help a hospital with a wider field of view?"
    profiles: ClassVar[Mapping[str, LensProfile]] = {
        "smoke": _profile("smoke", (31,), _RUNGS[2:3]),
        "cpu": _profile("cpu", (31, 32, 33), _RUNGS),
    }
    tables = (Table("field_of_view.cpu", data="../shared/data"),)

    @override
    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train without the hospital, and meet its wider scans."""
        name, site, seed = cell["set"], cell["site"], cell["seed"]
        run = self.run_of(name)(site, seed)
        trained = Trained.of(run, self.folder_of(name) / "runs" / run.id, self.options.workers)
        cases = some_of(self.federation(name).site(site).cases)
        found = {rung: at(trained, cases, _BY_NAME[rung], site, seed) for rung in cell["rungs"]}
        return {"device": run.settings.device, "at": found}

    @override
    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {}

    @override
    def sections(self, rows: Sequence[Row]) -> list[str]:
        """A table for each set."""
        said = (
            "[The protocol](protocol-lens.md) has what was fixed before this was run, and what was known by "
            "then (fourth amendment). Dice as it is served, in hundredths, means over hospitals and seeds; a "
            "cohort is half of a hospital's patients, and z how many times larger slices are to be shown."
        )
        sets = dict.fromkeys(row["cell"]["set"] for row in rows)
        return [said, *(part for name in sets for part in (f"## {name}", _table(rows, name)))]


def _table(rows: Sequence[Row], name: str) -> str:
    own = [row for row in rows if row["cell"]["set"] == name]
    columns = ["field of view", "cohorts", "found", "served", "z", "as it is", "as served", "worst hospital"]
    lines = []
    for rung in dict.fromkeys(rung for row in own for rung in row["result"]["at"]):
        there = [row["result"]["at"][rung] for row in own if rung in row["result"]["at"]]
        cohorts = [cohort for each in there for cohort in each["cohorts"]]
        zooms = [cohort["zoom"] for cohort in cohorts if cohort["zoom"] is not None]
        passed = [each for each in cohorts if each.get("gate") is not None and not each["gate"]["failed"]]
        before = fmean(each["arms"]["global"] for each in there)
        changes = [each["arms"]["served"][0] for each in there]
        figures = (
            f"{100 * before:.1f}",
            f"{100 * (before + fmean(changes)):.1f}",
            f"{100 * min(changes):+.1f}",
        )
        told = ", ".join(f"{zoom:g}" for zoom in sorted(set(zooms)))
        lines.append([rung, str(len(cohorts)), str(len(zooms)), str(len(passed)), told, *figures])
    return table(columns, lines)
