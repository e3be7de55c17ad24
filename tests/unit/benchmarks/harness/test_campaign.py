"""What campaigns of faults share: the draw, the batches, and what never happens."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.campaign import Campaign, NeverHappened, batches, recovery, violated

CELL = {"seed": 4, "batch": 2, "faults": 3}


class Draws(Campaign[int]):
    """A system that never recovers from the fault `last`."""

    last = 99
    ended = False

    def strike(self) -> int:
        if len(self.strikes) == self.last:
            raise NeverHappened("not within 2 s")
        return self.draw.randrange(1000)

    def finish(self) -> None:
        self.ended = True


def test_a_batch_draws_the_same_faults_again_and_other_ones_than_the_next() -> None:
    campaigns = [Draws(CELL), Draws(CELL), Draws({**CELL, "batch": 3})]
    for campaign in campaigns:
        campaign.run()
    first, again, other = (campaign.strikes for campaign in campaigns)
    assert len(first) == 3
    assert first == again != other
    assert campaigns[0].ended
    assert campaigns[0].broken == []


def test_what_never_happens_ends_the_batch_and_is_a_violation() -> None:
    campaign = Draws(CELL)
    campaign.last = 1
    campaign.run()
    assert len(campaign.strikes) == 1
    assert not campaign.ended
    assert campaign.broken == ["unbounded: not within 2 s"]
    assert violated([{"result": {"violations": campaign.broken}}]) == [
        "## Violated invariants: 1",
        "- unbounded: not within 2 s",
    ]


@pytest.mark.parametrize(("faults", "count"), [(12, 1), (13, 2), (24, 2)])
def test_batches_have_the_asked_faults_at_least(faults: int, count: int) -> None:
    assert [cell["batch"] for cell in batches(faults, 12, 0)] == list(range(count))


def test_recoveries_are_counted_by_kind_and_over_all() -> None:
    seconds: list[tuple[str, Any]] = [
        ("cut", 1.0),
        ("cut", 3.0),
        ("cut", None),
        ("slow", None),
        ("killed", 9.0),
    ]
    rows = [{"result": {"faults": [{"kind": kind, "recovered_s": s} for kind, s in seconds]}}]
    assert recovery(rows, ("cut", "slow", "killed")) == [
        ["cut", 3, "2.0", "2.8", "3.0", 1],
        ["killed", 1, "9.0", "9.0", "9.0", 0],
        ["all", 5, "3.0", "7.8", "9.0", 2],
    ]
