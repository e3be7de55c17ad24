"""The papers' tables on one's own data: `--data` is a folder with task.yaml, and so one set.

A segmentation is a federation as `training.data.federation.load_federation` reads it; a classification is one
.npz in MedMNIST's layout beside task.yaml. Any other `--data` is the folder that has the shared sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.accuracy.papers.report import PaperTables
from benchmarks.harness.cells import Row
from benchmarks.harness.experiment import RESULTS, OptionError, Options, P
from model_store.errors import TaskError
from model_store.task import Task, TaskKind
from personalization.errors import NetworkError
from training.data.cases import Federation
from training.data.federation import TASK_FILE, load_federation
from training.errors import ConfigurationError, FederationError

_OWN = """\
**Own data.** The set is `{name}`. Its image size is the task's, and its other settings are those of the
command. The paper's figures, of other sets, stand beside these for the order of the arms, not for the
level."""


class PaperOnData(PaperTables[P]):
    """Tables of the shared sets, or of one's own set.

    `data_note` says how the shared sets differ from the paper's, `method_note` what holds for every set;
    `kind` is that of the tasks.
    """

    kind: ClassVar[TaskKind]
    data_note: ClassVar[str]
    method_note: ClassVar[str]

    def __init__(self, options: Options) -> None:
        """Raise OptionError for own data without a rows file of their own, too."""
        super().__init__(options)
        if self.own:
            _check_rows(options.rows)

    @cached_property
    def own(self) -> bool:
        """Whether --data is one's own set."""
        return (self.data / TASK_FILE).is_file()

    @cached_property
    def own_task(self) -> Task:
        """The task of one's own data."""
        with readable_errors(self.data):
            task = Task.load(self.data / TASK_FILE)
        if task.kind != self.kind:
            raise OptionError(
                f"--data: {self.name} needs a task of kind {self.kind}, found {task.kind} in "
                f"'{self.data / TASK_FILE}'; {_OTHERS[self.kind]}"
            )
        return task

    def shared(self, place: str) -> Path:
        """The file or folder of a shared set."""
        path = self.data / place
        if not path.exists():
            raise OptionError(
                f"--data: expected {self.data_help}, or a folder of your own with {TASK_FILE} and "
                f"{_OWN_DATA[self.kind]}, found neither '{path}' nor '{self.data / TASK_FILE}'; "
                "see benchmarks/accuracy/papers/README.md"
            )
        return path

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """For own data, leave out how the shared sets differ from the paper's."""
        first, *rest = super().sections(rows)
        return [f"{_OWN.format(name=self.own_name)}\n\n{self.method_note}" if self.own else first, *rest]

    @property
    def own_name(self) -> str:
        """The name of one's own set: that of the folder."""
        return self.data.resolve().name

    @cached_property
    def own_federation(self) -> Federation[Any]:
        """One's own sites: at least two, with a patient for every fold and one for training."""
        with readable_errors(self.data):
            federation = load_federation(self.data, self.own_task)
        if len(federation.sites) < 2:
            raise OptionError(
                f"--data: expected at least two sites in '{self.data}', found {len(federation.sites)}; "
                "a site is a folder with images/ and masks/"
            )
        least = max(getattr(self.profile, "seeds", 1), 2)
        for site in federation.sites:
            if len(site.patients) < least:
                raise OptionError(
                    f"--data: site '{site.name}': expected at least {least} patients, of whom every seed "
                    f"tests others, found {len(site.patients)}; add patients, leave the site out, or give "
                    "--set seeds=2"
                )
        return federation

    @cached_property
    def own_digest(self) -> str:
        """A digest of one's own data: rows and runs of changed data are others."""
        return self.own_federation.digest.removeprefix("sha256:")[:16]


_OTHERS = {
    "segmentation": "paper-fedins and paper-fedbicross take a classification",
    "classification": "paper-iop-fl and paper-fedoap take a segmentation",
}
_OWN_DATA = {
    "segmentation": "a folder per site with images/ and masks/",
    "classification": "one .npz in MedMNIST's layout",
}


@contextmanager
def readable_errors(data: Path) -> Iterator[None]:
    """Raise what is wrong with the data, or does not fit them, as an OptionError."""
    try:
        yield
    except (FederationError, ConfigurationError, TaskError, NetworkError) as error:
        raise OptionError(f"--data: '{data}': {error}") from error


def _check_rows(rows: Path | None) -> None:
    expected = "--rows: expected a file outside docs/results, which has the recorded tables, for own data"
    if rows is None:
        raise OptionError(f"{expected}, found none; give one, for example --rows own/table.jsonl")
    if RESULTS.resolve() in rows.resolve().parents:
        raise OptionError(f"{expected}, found '{rows}'; give another, for example --rows own/table.jsonl")
