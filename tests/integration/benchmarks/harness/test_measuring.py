from __future__ import annotations

import sys

import numpy as np
import psutil

from benchmarks.harness.measuring import family, high_water, in_new_process, processor_seconds
from training.processes import process_context


def test_a_new_process_does_not_have_this_ones_memory() -> None:
    held = np.ones(2**25)
    assert in_new_process(high_water) < high_water() - held.nbytes / 2


def test_a_forked_worker_is_of_the_family_and_one_apart_is_not() -> None:
    context = process_context()
    ours, theirs = context.Pipe()
    worker = context.Process(target=theirs.recv)
    # The pipe's own end keeps the worker waiting.
    worker.start()
    try:
        assert worker.pid in {each.pid for each in family()}
        assert worker.pid not in {each.pid for each in family(worker.pid)}
    finally:
        ours.send(None)
        worker.join()


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = psutil.Popen([sys.executable, "-c", ""])
    gone.wait()
    this = processor_seconds([psutil.Process()])
    assert 0 < this <= processor_seconds([psutil.Process(), gone])
