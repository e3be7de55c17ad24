"""The cells of a comparison: one run of a method with one seed, and the row that is kept of it.

OUT/rows.jsonl        a line per cell that ended, with each test patient's score: for this machine alone
OUT/records/CELL.json the record of each finished run
OUT/runs/RUN/         a run that goes on when the comparison does; deleted once the cell is finished
OUT/failures/CELL.log the tracebacks of a method that failed, with those of its hospitals
"""

from __future__ import annotations

import errno
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from typing_extensions import override

from model_store.durable import write_durably
from model_store.errors import LocumStoreError
from personalization.metrics import metrics_of
from training.algorithm import Phase
from training.config import MethodConfig, RunConfig
from training.data.cases import Federation
from training.engine.folder import FAILURES, RunFolder, SiteFolder, differing
from training.engine.history import TEST, RoundEntry, Silent
from training.errors import ProblemsFound, RunMismatch, TrainingError
from training.parts.export import EXPORT
from training.parts.test import TESTED
from training.record import RunRecord
from training.run import Result, Run, execute

Cell: TypeAlias = tuple[str, int]
"""A method's name, and a seed."""
# By hospital and test patient: its score, or those of its images; None where it is undefined.
Patients: TypeAlias = dict[str, dict[str, tuple[float | None, ...]]]


class Row(BaseModel):
    """A cell that ended: what it scored and cost, or why it failed.

    `scores` has a model of the method by name: `` that all hospitals share, `cluster` that of their cluster,
    `personal` their own. `sent` and `received` are bytes of a hospital, and `seconds` those of the rounds,
    without test and export. `wall` is what the cell took.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    seed: int
    identity: dict[str, JsonValue]
    failure: str | None = None
    rounds: int = 0
    metric: str = ""
    scores: dict[str, Patients] = {}
    sent: float = 0
    received: float = 0
    seconds: float = 0
    wall: float = 0

    @property
    def cell(self) -> Cell:
        """Its method and seed."""
        return self.method, self.seed

    @property
    def answering(self) -> Patients:
        """The scores of the model that answers each hospital: its own, its cluster's, or the global one."""
        found: Patients = {}
        for model in ("", "cluster", "personal"):
            found |= self.scores.get(model, {})
        return found


class Rows:
    """The rows of a folder; the last of a cell counts."""

    def __init__(self, path: Path) -> None:
        """Raise TrainingError where the file is not one of rows."""
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        try:
            self._rows = {row.cell: row for row in map(Row.model_validate_json, lines)}
        except ValidationError as error:
            raise TrainingError(f"{path} is not a comparison's: {error}; use another --out") from error

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, cell: Cell) -> Row | None:
        """The row of a cell; None where it has not ended."""
        return self._rows.get(cell)

    def put(self, row: Row) -> None:
        """Keep a row, durably."""
        self._rows[row.cell] = row
        self._write()

    def drop(self, methods: Sequence[str]) -> None:
        """Forget the cells of these methods, if any."""
        if not methods:
            return
        self._rows = {cell: row for cell, row in self._rows.items() if row.method not in methods}
        self._write()

    def _write(self) -> None:
        text = "".join(f"{row.model_dump_json()}\n" for row in self._rows.values())
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, text.encode(), mode=0o600)


# The run's folder is deleted; the failures of its hospitals are in the cell's log.
_POINTER = re.compile(rf"; see sites/\S+/{FAILURES} in the run's folder|\. Fix the cause and resume")
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS)


class BudgetSpent(Exception):
    """The budget ended in the middle of a cell, of which the rounds so far are kept."""

    def __init__(self, entry: RoundEntry) -> None:
        self.reached = f"{entry.phase} {entry.round + 1}/{entry.rounds}"
        super().__init__(self.reached)


@dataclass(frozen=True)
class Trainer:
    """Trains cells on one federation, all by the same settings but the seed.

    `configs` has the configuration of each method, or why it has none. `watch` is called after each round.
    """

    federation: Federation[Any]
    configs: Mapping[str, MethodConfig | str]
    settings: RunConfig
    folder: Path
    workers: int | None
    watch: Callable[[Cell, RoundEntry], None]

    def identity(self, cell: Cell) -> dict[str, Any]:
        """What determines the result of a cell, as JSON; without a configuration, what all cells share."""
        config = self.configs[cell[0]]
        if isinstance(config, str):
            return self.run(cell, MethodConfig()).identity() | {"config": {}}
        return self.run(cell, config).identity()

    def run(self, cell: Cell, config: MethodConfig) -> Run:
        """The run of a cell."""
        name, seed = cell
        return Run(self.federation, name, config, self.settings.model_copy(update={"seed": seed}))

    def check(self, rows: Iterable[Row], cells: Iterable[Cell]) -> None:
        """Check that finished cells have the data and settings of the others. Raises RunMismatch."""
        wanted = {cell: self.identity(cell) for cell in cells}
        shared = ("data", "splits", "run")
        of_all = next(iter(wanted.values()))
        problems: dict[str, None] = {}
        for row in rows:
            if row.failure is not None:
                continue
            identity = wanted.get(row.cell)
            found: dict[str, Any] = row.identity
            if identity is None:
                # Not asked for now: only what all cells share has to be the same.
                identity, found = ({name: each.get(name) for name in shared} for each in (of_all, found))
                run = identity["run"]
                identity["run"] = {**run, "seed": row.seed}
            problems |= dict.fromkeys(f"{row.method}, {each}" for each in differing(identity, found))
        if problems:
            raise RunMismatch(
                f"{self.folder} holds cells of other data or settings; use another --out, or train a method "
                "once more with --again METHOD",
                [*problems],
            )

    def train(self, cell: Cell, *, afresh: bool) -> Row:
        """Train a cell, and return its row; a failure of the method is one, too.

        A run that was stopped goes on, unless it shall begin `afresh`. Raises what is no fault of the method:
        BudgetSpent, KeyboardInterrupt, and an OSError as of a full disk.
        """
        started = time.perf_counter()
        name, seed = cell
        identity = self.identity(cell)
        log = self.folder / "failures" / f"{name}-{seed}.log"
        log.unlink(missing_ok=True)
        config = self.configs[name]
        if isinstance(config, str):
            return Row(method=name, seed=seed, identity=identity, failure=config)
        run = self.run(cell, config)
        folder = self.folder / "runs" / run.id
        if afresh:
            rmtree(folder, ignore_errors=True)
        try:
            observer = _Watching(run, lambda entry: self.watch(cell, entry))
            result = execute(run, folder, workers=self.workers, resume=True, observer=observer)
            row = self._row(result, folder, identity, started)
            RunRecord.of(result).write(_made(self.folder / "records") / f"{name}-{seed}.json")
        except BudgetSpent:
            raise
        except Exception as error:
            if _is_of_the_machine(error):
                raise
            own = (path.read_text(errors="replace") for path in sorted(folder.glob(f"sites/*/{FAILURES}")))
            text = "\n".join(("".join(traceback.format_exception(error)), *own))
            _made(log.parent)
            log.write_text(text, encoding="utf-8", errors="replace")
            wall = time.perf_counter() - started
            row = Row(method=name, seed=seed, identity=identity, failure=sentence(error), wall=wall)
        rmtree(folder, ignore_errors=True)
        return row

    def _row(self, result: Result, folder: Path, identity: dict[str, Any], started: float) -> Row:
        """The row of a finished run. Raises TrainingError for what cannot be compared."""
        run, history = result.run, result.history
        dropped = [f"{site}: {why}" for entry in history for site, why in entry.dropped.items()]
        if dropped:
            raise TrainingError(
                f"a hospital dropped out, so that it was trained on fewer than the others ({dropped[0]})"
            )
        checkpoint = RunFolder(folder).checkpoint()
        assert checkpoint is not None
        scores: dict[str, Patients] = {}
        for site, slot in checkpoint.site_slots.items():
            kept = TESTED.read(SiteFolder(folder, site).load(slot)).scores
            for model, by_patient in kept.items():
                if by_patient:
                    scores.setdefault(model, {})[site] = dict(by_patient)
        if not scores:
            why = (
                "no hospital has a patient to test on"
                if any(step.name == TEST for step in run.algorithm().plan())
                else "it scores no test patient: its parts have no `Test` (training/parts/test.py)"
            )
            raise TrainingError(why)
        counted = [entry for entry in history if entry.phase not in (TEST, EXPORT)]
        sites = len(run.sites())
        parts = [part for entry in counted for part in entry.deliveries.values()]
        return Row(
            method=run.method,
            seed=run.settings.seed,
            identity=identity,
            rounds=run.config.rounds,
            metric=metrics_of(run.federation.task.kind)[0].name,
            scores=scores,
            sent=sum(sum(part.sent.values()) for part in parts) / sites,
            received=sum(sum(part.received.values()) for part in parts) / sites,
            seconds=sum(entry.seconds for entry in counted),
            wall=max(time.perf_counter() - started, sum(entry.seconds for entry in history)),
        )


class _Watching(Silent):
    """Passes on the rounds of a run, but the last one: with it the cell is finished."""

    def __init__(self, run: Run, watch: Callable[[RoundEntry], None]) -> None:
        last = run.algorithm().plan()[-1]
        self._last = last.name, (last.rounds if isinstance(last, Phase) else last.steps) - 1
        self._watch = watch

    @override
    def round_finished(self, entry: RoundEntry) -> None:
        if (entry.phase, entry.round) != self._last:
            self._watch(entry)


def sentence(error: Exception) -> str:
    """The sentence of an error; of one that is not the package's own, with its kind and place."""
    if isinstance(error, ProblemsFound):
        return f"{error.heading}: {'; '.join(error.problems)}"
    if isinstance(error, TrainingError | LocumStoreError):
        return _POINTER.sub("", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether an error is a full disk or the like, which the next method would meet as well."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            return True
        error = error.__cause__
    return False


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
