"""Train every method with every seed on the same hospitals, within a budget, and make the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from annotated_types import Le

from model_store.errors import LocumStoreError
from model_store.store import Store
from personalization.metrics import metrics_of
from training.command import federation_of, phantom_folder
from training.compare.cells import BudgetSpent, Cell, Row, Rows, Trainer, sentence
from training.compare.figures import lines_of
from training.compare.page import Comparison
from training.config import MethodConfig, RunConfig, parse, read_sections
from training.data.cases import FEW_CASES, Federation
from training.engine.folder import locked
from training.engine.history import RoundEntry
from training.errors import ConfigurationError, TrainingError
from training.methods.registry import Method, fitting, method
from training.options import DEFAULT_STORE, DataOptions
from training.phantom import phantom_of
from training.progress.format import duration

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is compared: methods by name, the first of which the others are measured by, and seeds.

    `rounds` are those of every method: by default of the configuration's file, else of the first method. Of
    the file's section `method` each takes the fields that it has. `budget` is in seconds.
    """

    methods: Sequence[str]
    data: DataOptions = field(default_factory=DataOptions)
    seeds: Sequence[int] = (0, 1, 2)
    rounds: int | None = None
    config: Path | None = None
    store: str = DEFAULT_STORE
    out: Path = Path(".locum/compare")
    workers: int | None = None
    budget: float | None = None
    again: Sequence[str] = ()

    def cells(self) -> list[Cell]:
        """The cells in the order of their training: each method with the first seed, then the next."""
        return [(name, seed) for seed in self.seeds for name in self.methods]


def _silent(_: str) -> None: ...


def compare(request: Request, say: Say = print, go_on: str = "", show: Say = _silent) -> Comparison:
    """Train what is missing, write the table to the request's folder, and return it.

    `say` gets a line for each cell, `show` where the cell under way is. `go_on` is the command that goes on
    after the budget. Raises TrainingError before anything is trained: for an unknown method, data or settings
    that are invalid, and a folder with cells of other ones.
    """
    started = time.monotonic()
    chosen = _chosen(request)
    with locked(
        request.out, f"{request.out} is in use by another comparison; wait for it, or use another --out"
    ):
        root = request.data.data or phantom_folder(request.out, chosen[0].kinds[0])
        configs, settings = _configured(request, chosen)
        federation = federation_of(request.data, root, settings.seed)
        configs = _prepared(configs, request.store, federation)
        budget = _Budget(started, request.budget, show)
        trainer = Trainer(federation, configs, settings, request.out, request.workers, budget.check)
        rows = Rows(request.out / "rows.jsonl")
        rows.drop(request.again)
        trainer.check(rows, request.cells())
        for warning in _warnings(trainer, request):
            say(f"warning: {warning}")
        _train(request, trainer, rows, budget, say)
        found = _comparison(request, federation, settings, rows, go_on)
        found.write()
    return found


def _chosen(request: Request) -> list[Method]:
    """The methods. Raises ConfigurationError that has what is wrong with all of them."""
    found, problems = [], []
    for name in request.methods:
        try:
            found.append(method(name))
        except ConfigurationError as error:
            problems.append(error)
    if problems:
        raise (
            problems[0]
            if len(problems) == 1
            else ConfigurationError("some methods cannot be compared", [sentence(each) for each in problems])
        )
    for what, given in (("methods", request.methods), ("seeds", request.seeds)):
        if not given or len({*given}) < len(given):
            listed = ", ".join(map(str, given)) or "none"
            raise ConfigurationError(f"--{what} cannot be used", [f"expected each once, found {listed}"])
    if unknown := {*request.again} - {*request.methods}:
        raise ConfigurationError("--again cannot be used", [f"not compared: {', '.join(sorted(unknown))}"])
    return found


def _configured(
    request: Request, chosen: Sequence[Method]
) -> tuple[dict[str, MethodConfig | str], RunConfig]:
    """Each method's configuration, or why it has none, and the settings of every run.

    Raises ConfigurationError for a field that no method has, and where no method can be configured.
    """
    section, run_section = read_sections(request.config)
    where = str(request.config) if request.config else "the options"
    # One file may do for several comparisons: a field is wrong where no method at all has it.
    unknown = [name for name in section if not fitting(partial(_has, name))]
    if unknown:
        problems = [f"{name}: no method has this field" for name in unknown]
        raise ConfigurationError(f"{where}, method", problems)
    # Defaults suit real scans; the phantom's few slices want their own.
    defaults = dict(phantom_of(chosen[0].kinds[0]).training) if request.data.data is None else {}
    if {"network", "network_arguments", "width"} & section.keys():
        defaults.pop("width", None)
    fields = {"rounds": chosen[0].config.model_fields["rounds"].default, **defaults, **section}
    if request.rounds is not None:
        fields["rounds"] = request.rounds
    # Nothing is published: consent decides only what methods exchange that need it.
    leave_out = {"leave_out": request.data.leave_out} if request.data.leave_out else {}
    settings = parse(RunConfig, {"consent": "all", **run_section, **leave_out}, f"{where}, run")
    configs: dict[str, MethodConfig | str] = {}
    refused = []
    for each in chosen:
        own = {name: value for name, value in fields.items() if name in each.config.model_fields}
        own["rounds"] = _rounds(each.config, own["rounds"])
        try:
            configs[each.name] = parse(each.config, own, f"{where}, method {each.name}")
        except ConfigurationError as error:
            configs[each.name] = sentence(error)
            refused.append(error)
    if len(refused) == len(chosen):
        raise refused[0]
    return configs, settings


def _has(field: str, method: Method) -> bool:
    return field in method.config.model_fields


def _rounds(config: type[MethodConfig], rounds: Any) -> Any:
    """The rounds of a method: as many as the others have, or the most that it can have."""
    bounds: list[Any] = config.model_fields["rounds"].metadata
    most = [int(str(bound.le)) for bound in bounds if isinstance(bound, Le)]
    return min([rounds, *most]) if isinstance(rounds, int) else rounds


def _prepared(
    configs: Mapping[str, MethodConfig | str], store: str, federation: Federation[Any]
) -> dict[str, MethodConfig | str]:
    """The configurations with what they need of the store, or why a method cannot have it."""
    found = dict(configs)
    task = federation.task
    for name, config in configs.items():
        kinds = method(name).kinds
        if task.kind not in kinds:
            found[name] = f"it is for {' and '.join(kinds)}, and '{task.name}' is a {task.kind}"
        elif not isinstance(config, str):
            try:
                found[name] = config.prepared(Store(store), task, task.name)
            except (TrainingError, LocumStoreError) as error:
                found[name] = sentence(error)
    return found


def _warnings(trainer: Trainer, request: Request) -> list[str]:
    """What of the data probably is a mistake, as a run says it, and hospitals that test few patients."""
    name, config = next((n, c) for n, c in trainer.configs.items() if not isinstance(c, str))
    run = trainer.run((name, request.seeds[0]), config)
    return run.warnings()


class _Budget:
    """The time that is left, and what is known of the cells' times."""

    def __init__(self, started: float, seconds: float | None, show: Say) -> None:
        self._end = None if seconds is None else started + seconds
        self._show = show

    @property
    def spent(self) -> bool:
        """Whether the budget has ended."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self, cell: Cell, entry: RoundEntry) -> None:
        """After a round: show it, and raise BudgetSpent if the budget has ended."""
        self._show(f"{cell[0]}, seed {cell[1]}: {entry.phase} {entry.round + 1}/{entry.rounds}")
        if self.spent:
            raise BudgetSpent(entry)

    def forecast(self, rows: Rows, cells: Sequence[Cell]) -> str:
        """Say how long these cells take by those that have finished, and how many of them fit."""
        by_method: dict[str, list[float]] = {}
        for row in rows:
            if row.failure is None:
                by_method.setdefault(row.method, []).append(row.wall)
        if not by_method or not cells:
            return ""
        mean = fmean(wall for walls in by_method.values() for wall in walls)
        expected = [fmean(by_method.get(name, [mean])) for name, _ in cells]
        others = f"the other {len(cells)} take" if len(cells) > 1 else "the last one takes"
        said = f"{others} about {duration(sum(expected))}"
        if self._end is None:
            return said
        left, fit = self._end - time.monotonic(), 0
        for seconds in expected:
            left -= seconds
            fit += left >= 0
        return f"{said}, of which the budget has time for {'all' if fit == len(cells) else fit or 'none'}"


def _train(request: Request, trainer: Trainer, rows: Rows, budget: _Budget, say: Say) -> None:
    """Train the cells that have not finished, until the budget ends."""
    cells = request.cells()
    waiting = [cell for cell in cells if (row := rows.get(cell)) is None or row.failure is not None]
    if kept := len(cells) - len(waiting):
        say(f"{kept} of {len(cells)} cells are finished already, in {request.out}")
    metric = metrics_of(trainer.federation.task.kind)[0].title
    for index, cell in enumerate(waiting):
        name, seed = cell
        if budget.spent:
            return
        before = rows.get(cell)
        try:
            row = trainer.train(cell, afresh=before is not None)
        except BudgetSpent as spent:
            say(f"{name}, seed {seed}: stopped after {spent.reached}, where it goes on")
            return
        rows.put(row)
        done = len(cells) - len(waiting) + index + 1
        ahead = budget.forecast(rows, waiting[index + 1 :])
        say(
            f"{name}, seed {seed}: {_outcome(row, metric)}   {done} of {len(cells)} cells"
            + (f"; {ahead}" if ahead else "")
        )


def _outcome(row: Row, metric: str) -> str:
    if row.failure is not None:
        return f"failed: {row.failure}"
    (line,) = lines_of([row], [row.method])
    few = ", few" if line.patients < FEW_CASES else ""
    worst = line.worst
    return (
        f"{metric} {line.score:.3f} n={line.patients}{few}, worst {worst.name} {worst.score:.3f} "
        f"n={worst.patients}   {duration(row.wall)}"
    )


def _comparison(
    request: Request, federation: Federation[Any], settings: RunConfig, rows: Rows, go_on: str
) -> Comparison:
    ended = {cell: rows.get(cell) for cell in request.cells()}
    failed: dict[str, dict[int, str]] = {}
    missing: dict[str, list[int]] = {}
    for (name, seed), row in ended.items():
        if row is None:
            missing.setdefault(name, []).append(seed)
        elif row.failure is not None:
            failed.setdefault(name, {})[seed] = row.failure
    return Comparison(
        task=federation.task.name,
        metric=metrics_of(federation.task.kind)[0].name,
        methods=tuple(request.methods),
        seeds=tuple(request.seeds),
        sites=tuple(site.name for site in federation.sites if site.name not in settings.leave_out),
        lines=tuple(lines_of((row for row in ended.values() if row is not None), request.methods)),
        failed=failed,
        missing=missing,
        folder=request.out,
        go_on=go_on,
    )
