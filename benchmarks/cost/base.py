"""What the benchmarks of cost share: a table of their own name, and kinds of cells."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, P, Table
from benchmarks.harness.gpu import CPU, as_in_workers, device_of, on_device


class Kind(NamedTuple):
    """What measures a cell in a folder of its own, and what shows the rows of such cells."""

    measure: Callable[[Cell, Path], Mapping[str, Any]]
    show: Callable[[Sequence[Row]], list[str]]


class CostExperiment(Experiment[P]):
    """A cost. The field `by` of a cell names its kind; without one the only kind is ""."""

    by: ClassVar[str] = ""
    # The least and the most that a ratio of the rows can be: another one was measured wrongly.
    possible: ClassVar[tuple[float, float]] = (0.1, 10.0)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.tables = (Table(cls.name, data=None if cls.data_help is None else "../shared/data"),)

    @abstractmethod
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of cells, in the order of the page."""

    @abstractmethod
    def measured(self) -> Sequence[Cell]:
        """All cells of the profile, without their device."""

    def cells(self) -> list[Cell]:
        """All cells of the profile, on its device."""
        return on_device(self.measured(), getattr(self.profile, "device", CPU))

    def compute(self, cell: Cell, work: Path) -> Mapping[str, Any]:
        """Measure one cell."""
        with as_in_workers(device_of(cell)):
            return self.kinds()[cell.get(self.by, "")].measure(cell, work)

    @classmethod
    def impossible(cls, result: Mapping[str, Any], where: str = "") -> list[str]:
        """The ratios of a row that are none that this can have, by the path of their names."""
        least, most = cls.possible
        found: list[str] = []
        for name, value in result.items():
            path = f"{where}.{name}" if where else name
            if isinstance(value, Mapping):
                found += cls.impossible(value, path)
            elif "ratio" in re.split(r"[._]", path) and not least <= value <= most:
                found.append(f"{path} = {value}")
        return found

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """The kinds that have a row, in their order."""
        found: list[str] = []
        for name, kind in self.kinds().items():
            own = [row for row in rows if row["cell"].get(self.by, "") == name]
            found += kind.show(own) if own else []
        return found
