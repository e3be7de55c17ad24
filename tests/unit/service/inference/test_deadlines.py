"""Deadlines: what is due is called, by one thread, and what ended before is not."""

from __future__ import annotations

import threading

from service.inference.deadlines import Deadlines

LONG = 60.0


def test_block_that_takes_too_long_is_called_while_it_lasts() -> None:
    called = threading.Event()
    with Deadlines().within(0.01, called.set):
        assert called.wait(LONG)


def test_block_that_ends_in_time_is_not_called() -> None:
    deadlines, calls, sentinel = Deadlines(), [], threading.Event()
    for _ in range(100):
        with deadlines.within(0.02, lambda: calls.append(1)):
            pass
    # Due after all of them.
    with deadlines.within(0.1, sentinel.set):
        assert sentinel.wait(LONG)
    assert calls == []


def test_earlier_deadline_wakes_the_thread_that_waits_for_a_later_one() -> None:
    deadlines, late, soon = Deadlines(), threading.Event(), threading.Event()
    with deadlines.within(LONG * 60, late.set), deadlines.within(0.01, soon.set):
        assert soon.wait(LONG)
    assert not late.is_set()


def test_many_blocks_have_one_thread() -> None:
    deadlines, ready = Deadlines(), threading.Barrier(9)

    def work() -> None:
        with deadlines.within(LONG, lambda: None):
            ready.wait(LONG)
            ready.wait(LONG)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    ready.wait(LONG)
    watching = [each for each in threading.enumerate() if each is deadlines._thread]
    ready.wait(LONG)
    for worker in workers:
        worker.join()
    assert len(watching) == 1
