"""Streams: warm-up, alarms, state that continues to the same bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from service.watch import REFERENCE, Alarm, Level, Share
from service.watch.limits import limit_of
from service.watch.scores import Reference

SPACING = 10_000.0


def shifted(shift: float, before: int, after: int = 60, seed: int = 0) -> NDArray[np.float64]:
    values = np.random.default_rng(seed).normal(size=before + after)
    values[before:] += shift
    return values


def test_sums_are_those_of_a_loop() -> None:
    values = shifted(1.0, 300)
    level = Level()
    alarm = level.take(values, SPACING)
    up = down = 0.0
    since = 0
    for number, score in enumerate(Reference().score(values), start=1):
        if number <= REFERENCE:
            continue
        up, down = max(0.0, up + (score - 0.5)), max(0.0, down + (-score - 0.5))
        since = since if up else number
        if up >= limit_of(SPACING):
            assert alarm == Alarm(number, since, True, up, limit_of(SPACING))
            break
    else:
        pytest.fail("the loop did not alarm")
    assert 300 < alarm.at < 330
    assert 290 <= alarm.since <= 310


@pytest.mark.parametrize(("shift", "up"), [(2.0, True), (-2.0, False)])
def test_both_sides_are_watched(shift: float, up: bool) -> None:
    alarm = Level().take(shifted(shift, 200), SPACING)
    assert alarm
    assert alarm.up is up
    assert 200 < alarm.at < 215


def test_the_reference_raises_no_alarm_and_is_not_summed() -> None:
    level = Level()
    assert level.take(np.arange(REFERENCE), SPACING) is None
    assert level.state["up"] == [0.0, 0]
    alarm = level.take(np.arange(REFERENCE, 2 * REFERENCE), SPACING)
    assert alarm
    assert alarm.at > REFERENCE


def test_usual_scans_stand_in_for_the_first_answers() -> None:
    usual = np.random.default_rng(1).normal(size=100)
    alarm = Level({"": Reference(usual)}).take(np.full(20, 3.0), SPACING)
    assert alarm
    assert alarm.at < 10


def test_after_usual_scans_false_alarms_are_as_frequent_and_an_early_change_is_found() -> None:
    draw = np.random.default_rng(4)
    spacing = 200.0

    def first(values: NDArray[np.float64], usual: int) -> int:
        level = Level({"": Reference(draw.lognormal(0, 0.5, usual))}) if usual else Level()
        alarm = level.take(values, spacing)
        return len(values) if alarm is None else alarm.at

    lengths = [first(draw.lognormal(0, 0.5, 3000), 60) for _ in range(200)]
    assert 0.75 * spacing < np.mean(lengths) < 1.25 * spacing
    # One standard deviation from the first answer on: without known scans it is what is usual.
    changed = {usual: [first(draw.lognormal(0.5, 0.5, 150), usual) for _ in range(60)] for usual in (0, 60)}
    assert np.median(changed[60]) < 20
    assert np.mean([length == 150 for length in changed[0]]) > 0.3


def test_many_answers_at_once_are_one_after_the_other_and_state_survives_json() -> None:
    values = np.round(shifted(1.5, 150), 1)
    strata = np.array(["a", "b", "b"])[np.arange(len(values)) % 3]
    whole, state, kept = Level(), Level().state, {}
    first = None
    for number, value in enumerate(values):
        level = Level.of(json.loads(json.dumps(state)), {name: Reference(own) for name, own in kept.items()})
        alarm = level.take([value], SPACING, strata[number : number + 1])
        first = first or alarm
        state = level.state
        kept = {name: reference.values for name, reference in level.references.items()}
    assert first
    assert whole.take(values, SPACING, strata) == first
    assert whole.state == state
    assert all((whole.references[name].values == kept[name]).all() for name in "ab")


def test_after_an_alarm_every_answer_alarms_while_the_change_lasts() -> None:
    values = shifted(3.0, 300)
    level = Level()
    alarm = level.take(values[:320], SPACING)
    assert alarm
    again = level.take(values[320:321], SPACING)
    assert again
    assert (again.at, again.since) == (321, alarm.since)


def test_strain_is_one_at_an_alarm_and_larger_for_a_shorter_spacing() -> None:
    level, alarm = Level(), None
    values = iter(shifted(2.0, 200))
    while alarm is None:
        before = level.strain(SPACING)
        alarm = level.take([next(values)], SPACING)
    assert before < 1 <= level.strain(SPACING) < level.strain(SPACING / 12)
    share = Share()
    assert share.strain(SPACING) == 0
    alarm = share.take([False] * 200 + [True] * 20, SPACING)
    assert alarm
    assert share.strain(SPACING) >= 1


def test_a_pattern_by_stratum_alarms_only_where_all_have_one_rank() -> None:
    rng = np.random.default_rng(2)
    weekend = np.arange(4000) // 20 % 7 >= 5
    values = rng.normal(size=4000) + 2.0 * weekend
    assert Level().take(values, SPACING)
    assert Level().take(values, SPACING, np.where(weekend, "weekend", "working day")) is None


def test_false_alarms_of_numbers_are_as_frequent_as_was_set() -> None:
    rng, spacing, alarms = np.random.default_rng(3), 500.0, 0
    for _ in range(60):
        values = rng.standard_t(3, size=5000)
        while len(values):
            alarm = Level().take(values, spacing)
            values = values[alarm.at :] if alarm else values[:0]
            alarms += alarm is not None
    # 600 were set. The 50 answers that say what is usual, and small references, make them rarer.
    assert 400 < alarms < 660


def test_a_share_that_grows_is_found_and_one_that_shrinks_is_not() -> None:
    draws = np.random.default_rng(4).random(800)
    more = Share().take(np.where(np.arange(800) < 600, draws < 0.05, draws < 0.4), SPACING)
    assert more
    assert 600 < more.at < 640
    assert 570 < more.since < more.at
    assert Share().take(np.where(np.arange(800) < 600, draws < 0.4, draws < 0.05), SPACING) is None


def test_usual_scans_say_how_large_a_share_is() -> None:
    known = [number % 10 == 0 for number in range(60)]
    share, learnt = Share.after(known), Share()
    # Between 50 and 100 answers the share stays as it was chosen at 50.
    learnt.take(known[:50], SPACING)
    chosen = [float(each.state["share"]) for each in (share, learnt)]
    assert chosen[0] == pytest.approx(chosen[1], abs=0.03)
    assert share.take([number % 10 == 0 for number in range(40)], SPACING) is None
    alarm = share.take([True] * 20, SPACING)
    assert alarm
    # Numbers go on after the scans that were known.
    assert 100 < alarm.at < 115
    assert alarm.since >= 60
    # Too few of them: the share is chosen after 50 with the answers.
    assert Share.after(known[:20]).state["share"] == 1.0


def test_shares_at_once_are_one_after_the_other_and_state_survives_json() -> None:
    draws = np.random.default_rng(5).random(260)
    values = np.where(np.arange(260) < 210, draws < 0.1, draws < 0.8)
    whole, share, first = Share(), Share(), None
    for value in values:
        share = Share.of(json.loads(json.dumps(share.state)))
        alarm = share.take([value], SPACING)
        first = first or alarm
    assert first
    assert whole.take(values, SPACING) == first
    assert whole.state == share.state


def test_the_share_is_chosen_at_fifty_answers_and_at_every_doubling() -> None:
    share, chosen = Share(), []
    for number in range(1, 410):
        share.take([number % 25 == 0], SPACING)
        if not chosen or share.state["share"] != chosen[-1][1]:
            chosen.append((number, share.state["share"]))
    assert [number for number, _ in chosen] == [1, 50, 100, 200, 400]
    # Above one in 25, and nearer to it each time.
    assert 0.04 < chosen[4][1] < chosen[3][1] < chosen[2][1] < chosen[1][1] < 0.1


@pytest.mark.parametrize("value", [False, True])
def test_a_share_of_none_or_all_never_alarms(value: bool) -> None:
    assert Share().take([value] * 2000, 100.0) is None


def test_false_alarms_of_shares_are_no_more_frequent_than_was_set() -> None:
    rng, spacing, alarms = np.random.default_rng(6), 500.0, 0
    for usual in (0.02, 0.1, 0.3) * 10:
        values = rng.random(10_000) < usual
        while len(values):
            alarm = Share().take(values, spacing)
            values = values[alarm.at :] if alarm else values[:0]
            alarms += alarm is not None
    assert 200 < alarms < 600
