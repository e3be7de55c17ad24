"""What a benchmark declares (question, profiles, cells, page), and how it is run and reported.

    class Squares(Experiment[Profile]):
        name, title = "squares", "Squares"
        question = "How large are squares?"
        profiles = {"cpu": Profile(count=3)}
        tables = (Table("squares"),)

        def cells(self) -> list[Cell]:
            return [{"n": n} for n in range(self.profile.count)]

        def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
            return {"square": cell["n"] ** 2}

        def sections(self, rows: Sequence[Row]) -> list[str]:
            return [table(["n", "square"], [[r["cell"]["n"], r["result"]["square"]] for r in rows])]

    run_experiment(Squares(Options(profile="cpu")))

`benchmarks.registry` lists the experiments; `python -m benchmarks` is the command line.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from benchmarks.harness.cells import STATE_DIR, Cell, Row, Rows, in_order, run
from benchmarks.harness.gpu import CPU, missing
from benchmarks.harness.tables import write_page, write_text
from personalization.errors import PersonalizationError

P = TypeVar("P")

RESULTS = Path("docs/results")


class OptionError(ValueError):
    """An option does not fit the experiment: the message names the option, what was expected and found."""


@dataclass(frozen=True)
class Table:
    """A recorded table: the stem of its files in docs/results, and the options of its command."""

    name: str
    profile: str = "cpu"
    data: str | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class Options:
    """The options of one run or report.

    `rows` None means the experiment's usual file for the profile. `seeds` keeps the first seeds only, `only`
    keeps cells by `FIELD=PATTERN`, `settings` changes the profile by `FIELD=VALUE`. `workers` and `state_dir`
    change no result.
    """

    profile: str = "cpu"
    data: Path | None = None
    rows: Path | None = None
    seeds: int | None = None
    only: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    workers: int = 1
    state_dir: Path = STATE_DIR


class Experiment(ABC, Generic[P]):
    """One benchmark, opened with the options of a run. P is the type of its profiles, a dataclass.

    `baseline` is the profile as declared, `profile` the same with the run's `settings`. `data_help` says what
    --data is; None means that the experiment makes its data. With `shows_tries` the page has a section for
    cells of a changed profile; without it such cells need a rows file of their own.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    profiles: ClassVar[Mapping[str, Any]]
    tables: ClassVar[Sequence[Table]]
    data_help: ClassVar[str | None] = None
    shows_tries: ClassVar[bool] = False

    def __init__(self, options: Options) -> None:
        """Raise OptionError for an option that does not fit."""
        if options.profile not in self.profiles:
            raise OptionError(f"--profile: {unknown('profile', options.profile, self.profiles)}")
        if self.data_help is not None and options.data is None:
            raise OptionError(f"--data: {self.name} needs it: {self.data_help}")
        if self.data_help is None and options.data is not None:
            raise OptionError(f"--data: {self.name} makes its own data, found '{options.data}'; leave it out")
        if options.settings and options.rows is None and not self.shows_tries:
            raise OptionError("--rows: a changed profile (--set) needs a rows file of its own, found none")
        self.options = options
        self.baseline: P = self.profiles[options.profile]
        self.profile: P = changed(self.baseline, options.settings)

    @property
    def data(self) -> Path:
        """The folder given as --data."""
        assert self.options.data is not None
        return self.options.data

    @property
    def rows_path(self) -> Path:
        """The rows file: --rows, or the usual one of the profile."""
        return self.options.rows or self.usual_rows(self.options.profile)

    @classmethod
    def usual_rows(cls, profile: str) -> Path:
        """The file of the first recorded table with this profile, else docs/results/NAME.PROFILE.jsonl."""
        recorded = (table.name for table in cls.tables if table.profile == profile)
        return RESULTS / f"{next(recorded, f'{cls.name}.{profile}')}.jsonl"

    @classmethod
    def of_table(cls, table: Table) -> Experiment[P]:
        """The experiment, opened with the options of a recorded table."""
        data = None if table.data is None else Path(table.data)
        return cls(Options(table.profile, data, RESULTS / f"{table.name}.jsonl", table.seeds))

    @property
    def command(self) -> str:
        """The command that makes this run's page, without the options that change no result."""
        options = self.options
        parts = ["python", "-m", "benchmarks", "run", self.name, "--profile", options.profile]
        if options.data is not None:
            parts += ["--data", str(options.data)]
        if options.seeds is not None:
            parts += ["--seeds", str(options.seeds)]
        for setting in () if self.shows_tries else options.settings:
            parts += ["--set", setting]
        if self.rows_path != self.usual_rows(options.profile):
            parts += ["--rows", str(self.rows_path)]
        return shlex.join(parts)

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All cells of the profile, in the order in which they are computed. May read the data."""

    @abstractmethod
    def compute(self, cell: Cell, work: Path) -> Mapping[str, Any]:
        """The result of one cell; `work` is a folder of the cell's own, kept until the cell is finished."""

    @abstractmethod
    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The page below its title, from the rows of `shown`, at least one. Reads no data."""

    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:  # noqa: ARG002
        """Files that the page shows and that are written beside it: name and SVG, from the same rows."""
        return {}

    def shown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that the page shows: those of the profile's cells, in their order; all with tries."""
        return rows if self.shows_tries else in_order(rows, self.cells())


def run_experiment(experiment: Experiment[Any]) -> None:
    """Compute the chosen cells that have no row yet, on one thread of torch; write the page after each."""
    options = experiment.options
    try:
        cells = experiment.cells()
    except (ValidationError, PersonalizationError) as error:
        if not options.settings:
            raise
        raise OptionError(f"--set: {_readable(error)}") from error
    cells = chosen(cells, options.only, options.seeds)
    lacking = missing(getattr(experiment.profile, "device", CPU))
    if lacking is not None:
        raise OptionError(f"--profile {options.profile}: {lacking}")
    torch.set_num_threads(1)
    run(
        f"{experiment.name}.{options.profile}",
        cells,
        Rows(experiment.rows_path),
        experiment.compute,
        options.state_dir,
        partial(report_experiment, experiment),
    )
    report_experiment(experiment)


def report_experiment(experiment: Experiment[Any]) -> None:
    """Write the page beside the rows file, from the rows alone."""
    rows = experiment.rows_path
    shown = experiment.shown(Rows(rows).read())
    for name, svg in (experiment.figures(shown) if shown else {}).items():
        write_text(rows.with_name(name), svg)
    sections = experiment.sections(shown) if shown else ["No cell of this profile is finished yet."]
    page = rows.with_suffix(".md")
    write_page(page, experiment.title, experiment.command, rows, sections, places_of(shown))


def places_of(rows: Sequence[Row]) -> list[str]:
    """The commits that rows were measured at, each with its machine's kind, in the order of the rows.

    Older rows have no commit, and are not said to have one.
    """
    made = [row["made_with"] for row in rows if "commit" in row.get("made_with", {})]
    return [*dict.fromkeys(f"{each['commit']} on {each['processor']} ({each['machine']})" for each in made)]


def chosen(cells: Sequence[Cell], only: Sequence[str], seeds: int | None) -> list[Cell]:
    """The cells that match every `FIELD=PATTERN` of `only` and have one of the first `seeds` seeds.

    A pattern may have the wildcards of a shell: `arms=routing*`. Raises OptionError when no cell is left.
    """
    found = list(cells)
    for choice in only:
        field, given, pattern = choice.partition("=")
        if not given:
            raise OptionError(f"--only: expected FIELD=PATTERN, found '{choice}'")
        values = list(dict.fromkeys(str(cell[field]) for cell in cells if field in cell))
        if not values:
            fields = dict.fromkeys(name for cell in cells for name in cell)
            raise OptionError(f"--only: {unknown('field', field, fields)}")
        kept = [cell for cell in found if field in cell and fnmatchcase(str(cell[field]), pattern)]
        if not kept:
            raise OptionError(f"--only: {unknown(field, pattern, values)}")
        found = kept
    if seeds is not None:
        if not any("seed" in cell for cell in cells):
            raise OptionError("--seeds: the cells of this experiment have no seed; leave it out")
        found = [cell for cell in found if cell.get("seed", 0) < seeds]
    return found


def changed(profile: P, settings: Sequence[str]) -> P:
    """The profile with every `FIELD=VALUE` applied; `method.tau=0.5` changes an entry of a field.

    A value is JSON, or text where it is not. Raises OptionError for a field that is not there and for a value
    of another type.
    """
    if not settings:
        return profile
    assert is_dataclass(profile)
    assert not isinstance(profile, type)
    values = asdict(profile)
    for setting in settings:
        path, given, text = setting.partition("=")
        if not given:
            raise OptionError(f"--set: expected FIELD=VALUE, found '{setting}'")
        field, _, entry = path.partition(".")
        if field not in values:
            raise OptionError(f"--set: {unknown('field', field, values)}")
        if not entry:
            values[field] = _parsed(text)
            continue
        inner = values[field]
        if not isinstance(inner, dict):
            raise OptionError(f"--set: the field '{field}' has no entries, found '{path}'")
        if is_dataclass(getattr(profile, field)) and entry not in inner:
            raise OptionError(f"--set: {unknown('field', entry, inner)}")
        inner[entry] = _parsed(text)
    try:
        return TypeAdapter(type(profile)).validate_python(values)
    except ValidationError as error:
        raise OptionError(f"--set: {_readable(error)}") from error


def _readable(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}, found {each['input']!r}"
        for each in error.errors()
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def unknown(what: str, found: str, known: Iterable[str]) -> str:
    """`unknown profile 'cup'; did you mean 'cpu'? There are cpu, full`: for an error or a hint."""
    names = list(known)
    nearest = get_close_matches(found, names, n=1, cutoff=0.3)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"unknown {what} '{found}'; {hint}There are {', '.join(names)}"
