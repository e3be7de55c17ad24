"""What is not computed yet, the most worth first, for whatever time a machine is there.

    python -m benchmarks queue --data DIR                  what is left
    python -m benchmarks queue --data DIR --minutes 30     compute it

It is computed in pieces of at most eight minutes, each a `run` of its own that is then ended: finished cells
have their rows, and the next piece continues the unfinished one from its checkpoints. A cell without any, as
those of cost, must fit into a piece: `--piece` makes it longer.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.cells import Cell, Rows, describe, key
from benchmarks.harness.experiment import Experiment, OptionError, Options, chosen
from benchmarks.harness.gpu import CPU, missing
from benchmarks.registry import find

PIECE = 8.0


@dataclass(frozen=True)
class Wanted:
    """Cells of an experiment: those of the profile, or the part of them that `only` chooses."""

    experiment: str
    profile: str = "cpu"
    only: tuple[str, ...] = ()

    def opened(self, data: Path | None) -> Experiment[Any]:
        """The experiment with its options. Raises OptionError where it needs data and has none."""
        found = find(self.experiment)
        given = data if found.data_help is not None else None
        return found(Options(self.profile, given, only=self.only))

    def command(self, data: Path | None) -> list[str]:
        """The command that computes what is left."""
        options = self.opened(data).options
        parts = [sys.executable, "-m", "benchmarks", "run", self.experiment, "--profile", self.profile]
        parts += [] if options.data is None else ["--data", str(options.data)]
        return [*parts, *(part for each in self.only for part in ("--only", each))]


@dataclass(frozen=True)
class Left:
    """Cells without a row, the seconds that one takes by the recorded rows, or why none can be computed."""

    cells: Sequence[Cell] = ()
    seconds_each: float | None = None
    lacking: str | None = None


# By worth: what a table or a claim of the documentation lacks comes first.
WANTED: tuple[Wanted, ...] = (
    Wanted("paper-fedins", "pretrained"),
    Wanted("paper-fedbicross"),
    Wanted("paper-iop-fl"),
    Wanted("lens"),
    Wanted("volumes"),
    Wanted("dose"),
    Wanted("throughput", "gpu"),
    Wanted("serving_cost", "gpu"),
    Wanted("method_cost", "gpu"),
    Wanted("round_cost", "gpu"),
    Wanted("dicom_cost", "gpu"),
)


def left(wanted: Wanted, data: Path | None) -> Left:
    """What is left of it on this machine."""
    try:
        experiment = wanted.opened(data)
        cells = chosen(experiment.cells(), wanted.only, None)
    except (OptionError, OSError) as error:
        return Left(lacking=str(error))
    rows = Rows(experiment.rows_path).read()
    finished = {key(row["cell"]) for row in rows}
    seconds = [float(row["seconds"]) for row in rows if "seconds" in row]
    return Left(
        [cell for cell in cells if key(cell) not in finished],
        median(seconds) if seconds else None,
        missing(getattr(experiment.profile, "device", CPU)),
    )


def show(data: Path | None) -> None:
    """Print what is left, by worth: how many cells, and which, with the command of each part."""
    for wanted in WANTED:
        found = left(wanted, data)
        name = " ".join([wanted.experiment, wanted.profile, *wanted.only])
        if found.cells:
            minutes = len(found.cells) * (found.seconds_each or math.nan) / 60
            print(f"{name}: {len(found.cells)} cells", end="")
            print("" if math.isnan(minutes) else f", about {minutes:.0f} minutes by those that are recorded")
        if found.lacking is not None:
            print(f"{name}: not on this machine: {found.lacking}")
        for cell in found.cells:
            print(f"    {describe(cell)}")


def compute(data: Path | None, minutes: float, longest: float = PIECE) -> None:
    """Compute what is left for so many minutes; a part that fails is left for another day."""
    ends = time.monotonic() + 60 * minutes
    for wanted in WANTED:
        while ends > time.monotonic():
            found = left(wanted, data)
            if not found.cells or found.lacking is not None:
                break
            command = wanted.command(data)
            print(" ".join(command), flush=True)
            if piece(command, min(60 * longest, ends - time.monotonic())) is not None:
                # Finished, failed, or what is left is another run's.
                break


def piece(command: Sequence[str], seconds: float) -> int | None:
    """Run a command for so long; return how it ended, None where it was ended."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # With the processes that it started.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
