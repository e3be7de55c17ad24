"""CPU seconds of a run that may be killed and go on in another process."""

from __future__ import annotations

import time
from pathlib import Path

from typing_extensions import override

from benchmarks.harness.tables import write_text
from training.engine.history import RoundEntry, Silent


class Clock(Silent):
    """The CPU seconds of this process since it was made, and of those before it that worked in `folder`.

    They are kept with every round that is committed: what a killed process took for a round that is done
    again does not count.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "cpu_seconds"
        self._earlier = float(self._path.read_text()) if self._path.exists() else 0.0
        self._start = time.process_time()

    @property
    def seconds(self) -> float:
        """CPU seconds so far."""
        return self._earlier + time.process_time() - self._start

    @override
    def round_finished(self, entry: RoundEntry) -> None:
        write_text(self._path, str(self.seconds))
