"""What the history of a run says of its sites."""

from __future__ import annotations

from training.engine.history import RoundEntry, missing


def test_sites_that_were_missing_are_said_by_phase_and_round_with_the_last_reason() -> None:
    dropped = {2: {"north": "late"}, 3: {"north": "late"}, 6: {"north": "away", "south": "revoked"}}
    train = [RoundEntry("train", number - 1, 7, dropped=dropped.get(number, {})) for number in range(1, 8)]
    test = [RoundEntry("test", 0, 1, dropped={"north": "left the run"}, absent={"west": "no consent"})]
    assert missing([*train, *test]) == {
        "north": "train 2-3, 6 of 7, test: left the run",
        "south": "train 6 of 7: revoked",
    }
    assert missing(train[:1]) == {}
