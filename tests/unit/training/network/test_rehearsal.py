"""What two rehearsals of a run say of it."""

from __future__ import annotations

import pytest

from training.algorithm import Phase
from training.choices.fedavg import FedAvgConfig
from training.config import MethodConfig
from training.engine.history import RoundEntry, SiteEntry
from training.network.rehearsal import sentences, shortened


def round_of(phase: str, seconds: float, **sites: float) -> RoundEntry:
    own = {name: SiteEntry(1.0, {}, {"w": 2**20}, {"w": 2**21}, (), took) for name, took in sites.items()}
    return RoundEntry(phase, 0, 1, seconds, own)


def phase(name: str, rounds: int) -> Phase:
    nothing = (lambda *_: None,) * 2
    return Phase(name, rounds, (), (), *nothing)  # type: ignore[arg-type]


def test_time_of_a_run_follows_from_the_time_of_a_step_and_the_batches_of_each_hospital() -> None:
    plan = (phase("train", 25), phase("test", 1))
    config = FedAvgConfig(batch_size=10, local_epochs=2, least_steps=4)
    # A step takes 2 s at north and 0.5 s at south; 3 s and 1 s are for the rest, and 2 s for sending.
    few = [round_of("train", 7.0, north=5.0, south=1.5), round_of("test", 9.0, north=8.0)]
    more = [round_of("train", 15.0, north=13.0, south=3.5), round_of("test", 9.0, north=8.0)]
    proved, takes = sentences(plan, config, few, more, {"north": 195, "south": 11})
    assert proved.startswith("Rehearsed: 2 hospitals registered, computed and delivered;")
    # North: 3 + 40 * 2 + 2 = 85 s; south: 1 + 4 * 0.5 + 2 = 5 s; 25 * 85 + 9 = 2134 s.
    assert takes == (
        "25 rounds: about 35:34, and north decides: a round takes 1:25 (40 batches of 2 s) there. "
        "Then south 0:05 (4 batches of 0.5 s)."
    )


def test_method_that_counts_no_steps_is_taken_by_its_round() -> None:
    class Plain(MethodConfig):
        pass

    entries = [round_of("train", 7.0, north=5.0)]
    takes = sentences((phase("train", 3),), Plain(), entries, entries, {"north": 195})[1]
    assert takes == "3 rounds: about 0:21, and north decides: a round takes 0:07 there."


@pytest.mark.parametrize("steps", [1, 5])
def test_shortened_has_one_round_of_so_many_steps(steps: int) -> None:
    short = shortened(FedAvgConfig(rounds=25, local_epochs=3), steps)
    assert isinstance(short, FedAvgConfig)
    assert (short.rounds, short.local_steps, short.least_steps) == (1, steps, 0)
