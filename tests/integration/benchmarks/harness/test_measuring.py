from __future__ import annotations

import sys

import numpy as np
import psutil

from benchmarks.harness.measuring import high_water, in_new_process, processor_seconds


def test_a_new_process_does_not_have_this_ones_memory() -> None:
    held = np.ones(2**25)
    assert in_new_process(high_water) < high_water() - held.nbytes / 2


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = psutil.Popen([sys.executable, "-c", ""])
    gone.wait()
    this = processor_seconds([psutil.Process()])
    assert 0 < this <= processor_seconds([psutil.Process(), gone])
