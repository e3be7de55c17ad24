"""Which label-free number finds the masks that must be looked at?

`docs/results/protocol-review.md` says what was fixed before it was run. Sets, networks, training and scores
are those of `lens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from benchmarks.accuracy.dose.experiment import POLYPS
from benchmarks.accuracy.lens.experiment import INSTANCE, LensExperiment
from benchmarks.accuracy.lens.experiment import PROFILES as OF_LENS
from benchmarks.accuracy.lens.experiment import Profile as LensProfile
from benchmarks.accuracy.lens.hospital import Trained
from benchmarks.accuracy.lens.rungs import AS_THEY_ARE, DRAWN, UNDRAWN
from benchmarks.accuracy.review.hospital import Meeting, at_all
from benchmarks.accuracy.review.report import figure_of, sections
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Table


def _profile(name: str, rungs: tuple[str, ...], left_out: tuple[str, ...]) -> LensProfile:
    known = OF_LENS[name]
    sets = {each: own for each, own in known.sets.items() if each not in left_out}
    return replace(known, sets=sets, ablation=(), rungs=rungs)


class Review(LensExperiment):
    """How much of the lost Dice each signal finds."""

    name = "review"
    title = "Which masks must be looked at"
    question = "Which label-free number finds the masks that must be looked at?"
    profiles: ClassVar[Mapping[str, LensProfile]] = {
        "smoke": _profile("smoke", (AS_THEY_ARE, "3"), ()),
        "cpu": _profile("cpu", (AS_THEY_ARE, *DRAWN, *UNDRAWN), (INSTANCE, POLYPS)),
    }
    tables = (Table("review.cpu", data="../shared/data"),)

    @override
    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Train without the hospital, and take the signals of answers to it and to the members."""
        name, site, seed = cell["set"], cell["site"], cell["seed"]
        run = self.run_of(name)(site, seed)
        trained = Trained.of(run, self.folder_of(name) / "runs" / run.id, self.options.workers)
        cases = self.federation(name).site(site).cases
        found = at_all(Meeting.of(trained, run), run, cases, seed, cell["rungs"])
        return {"device": run.settings.device, **found}

    @override
    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The choice and the criteria first, then every set."""
        planned = {name: len(self.profile.seeds) for name in self.profile.sets}
        return sections(rows, planned, self.command, self._figure)

    @override
    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """What each signal finds, by hospital."""
        return {self._figure: figure_of(rows)}
