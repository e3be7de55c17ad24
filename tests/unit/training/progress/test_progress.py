from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.helpers.training.sites import declared
from tests.helpers.waiting import wait_for
from training.engine.history import RoundEntry, SiteEntry
from training.progress import Afterwards, PlainProgress, RichProgress, RunState, open_progress
from training.progress.format import duration, number, size, sparkline

PLAN = (declared("describe", 1, (), ()), declared("train", 4, (), ()), declared("validate", 1, (), ()))
SITES = ("aster", "birch")


# A practice takes twenty times as long as a validation.
PRACTICE = {"practice": Afterwards("practise", "validate", 20.0)}


def entry(**metrics: float) -> SiteEntry:
    return SiteEntry(8.0, metrics, {"weights": 1000, "metrics": 8}, {"weights": 1000}, (), 0.5)


class Clock:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(target, phase: str, round_: int, rounds: int, seconds: float, **sites: SiteEntry) -> RoundEntry:
    """One round as reported by an engine; sites that are not given drop out."""
    target.round_started(phase, round_, rounds, SITES)
    for name, site in sites.items():
        target.site_finished(phase, round_, name, site)
    dropped = {name: "its worker died" for name in SITES if name not in sites}
    done = RoundEntry(phase, round_, rounds, seconds, sites, dropped)
    target.round_finished(done)
    return done


class _State(RunState):
    """The state, called like an observer."""

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        super().site_finished(site, entry)


def test_time_left_is_the_median_round_time_times_rounds_left() -> None:
    clock = Clock()
    state = _State("run", PLAN, SITES, clock)
    assert (state.total, state.done, state.left) == (6, 0, None)
    play(state, "describe", 0, 1, 0.1, aster=entry(), birch=entry())
    assert (state.done, state.left) == (1, None)
    play(state, "train", 0, 4, 10.0, aster=entry(loss=1.0), birch=entry(loss=0.5))
    assert state.left == 30.0
    play(state, "train", 1, 4, 12.0, aster=entry(loss=1.0), birch=entry(loss=0.5))
    assert state.left == 22.0
    state.round_started("train", 2, 4, SITES)
    clock.now += 5
    assert state.left == 17.0
    clock.now += 500
    assert state.left == 11.0


def test_time_left_counts_the_runs_that_follow_and_names_what_follows_them() -> None:
    state = _State("run", PLAN, SITES, Clock(), place=(1, 3), then=PRACTICE)
    play(state, "train", 0, 4, 10.0, aster=entry())
    # Three rounds of this run and four of each of two more.
    assert (state.total, state.done, state.left) == (18, 2, 110.0)
    assert state.unknown == ["describe", "validate", "practice"]
    output = io.StringIO()
    progress = PlainProgress(Console(file=output, width=200))
    progress.run_started("iop-fl", PLAN, SITES, place=(1, 3), then=PRACTICE)
    play(progress, "train", 0, 4, 10.0, aster=entry())
    progress.run_started("practice without aster", PLAN, ["birch"], place=(2, 3), then=PRACTICE)
    assert progress.state.left == 80.0
    assert "run 1 of 3, then practice" in output.getvalue()
    assert "run 2 of 3, then practice; about 1:20 in all" in output.getvalue()
    play(progress, "train", 3, 4, 10.0, aster=entry())
    play(progress, "validate", 0, 1, 3.0, aster=entry())
    # The last run's training and validation, and the practice.
    assert progress.state.left == 40.0 + 3.0 + 60.0
    assert progress.state.unknown == ["describe"]
    progress.run_started("practice without birch", PLAN, ["aster"], place=(3, 3), then=PRACTICE)
    play(progress, "validate", 0, 1, 1.0, aster=entry())
    assert progress.state.left == 60.0
    progress.run_started("practice", (declared("measure", 1, (), ()), declared("practise", 1, (), ())), SITES)
    assert (progress.state.left, progress.state.unknown) == (60.0, ["measure"])
    assert output.getvalue().endswith("practise 1; about 1:00 in all, not counting measure\n")


def test_no_time_left_is_said_while_all_that_takes_long_is_unknown() -> None:
    output = io.StringIO()
    progress = PlainProgress(Console(file=output, width=200))
    progress.run_started("iop-fl", PLAN, SITES, place=(1, 3))
    play(progress, "describe", 0, 1, 0.1, aster=entry())
    assert progress.state.left == pytest.approx(0.2)
    assert "left" not in output.getvalue()


def test_time_left_names_the_phases_of_which_nothing_is_known() -> None:
    state = _State("run", PLAN, SITES, Clock())
    play(state, "describe", 0, 1, 0.1, aster=entry())
    assert (state.left, state.unknown) == (None, ["train", "validate"])
    play(state, "train", 0, 4, 10.0, aster=entry())
    assert (state.left, state.unknown) == (30.0, ["validate"])
    play(state, "train", 3, 4, 10.0, aster=entry())
    assert (state.left, state.unknown) == (None, ["validate"])
    play(state, "validate", 0, 1, 10.0, aster=entry())
    assert (state.left, state.unknown) == (None, [])


def test_time_left_before_the_first_round_is_the_forecast_until_a_round_is_measured() -> None:
    clock = Clock()
    state = _State("run", PLAN, SITES, clock, {"describe": 0.0, "train": 20.0, "validate": 5.0})
    assert (state.left, state.unknown) == (85.0, [])
    clock.now += 7
    play(state, "describe", 0, 1, 7.0, aster=entry())
    state.round_started("train", 0, 4, SITES)
    clock.now += 15
    assert state.left == 70.0
    clock.now += 15
    assert state.left == 65.0
    play(state, "train", 0, 4, 30.0, aster=entry())
    assert state.left == 95.0


def test_resumed_run_counts_earlier_rounds() -> None:
    state = _State("run", PLAN, SITES, Clock())
    play(state, "train", 2, 4, 10.0, aster=entry(), birch=entry())
    assert state.done == 4
    assert state.left == 10.0


def test_site_state_tracks_metrics_bytes_and_participation() -> None:
    state = _State("run", PLAN, SITES, Clock())
    play(state, "train", 0, 4, 1.0, aster=entry(loss=1.0, val_dice=0.25), birch=entry(loss=0.5))
    play(state, "train", 1, 4, 1.0, aster=entry(loss=0.8, val_dice=0.5))
    aster, birch = state.sites["aster"], state.sites["birch"]
    assert aster.metrics["val_dice"] == [0.25, 0.5]
    assert (aster.state, aster.bytes) == ("done", 2 * 2008)
    assert (birch.state, birch.last("loss"), birch.last("val_dice")) == ("dropped", 0.5, None)
    assert state.metrics == ["loss", "val_dice"]
    assert state.mean("loss") == pytest.approx(0.65)
    state.round_started("train", 2, 4, ("birch",))
    assert aster.state == "absent"


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    made = Console(file=stream, force_terminal=terminal, width=120, color_system=None, legacy_windows=False)
    return made, stream


def test_open_progress_chooses_rich_for_a_terminal_and_plain_otherwise() -> None:
    assert isinstance(open_progress(console(terminal=True)[0]), RichProgress)
    assert isinstance(open_progress(console(terminal=False)[0]), PlainProgress)


def test_plain_progress_prints_one_line_per_round() -> None:
    made, stream = console(terminal=False)
    with PlainProgress(made) as progress:
        progress.run_started("iop-fl on phantom", PLAN, SITES)
        play(progress, "describe", 0, 1, 0.1, aster=entry(), birch=entry())
        play(progress, "train", 0, 4, 2.0, aster=entry(loss=0.5, val_dice=0.25), birch=entry(loss=0.75))
        progress.warning("site [birch] dropped")
        play(progress, "train", 1, 4, 2.0, aster=entry(loss=0.25, val_dice=0.5))
        progress.published("phantom@1", "sha256:" + "ab" * 32)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "iop-fl on phantom: 2 sites (aster, birch); rounds: describe 1, train 4, validate 1",
        "describe 1/1  4.0 kB  0.1 s",
        "train 1/4  loss 0.625 (aster 0.500, birch 0.750)  Dice 0.250 (aster 0.250)  "
        "4.0 kB  2.0 s  0:06 left, not counting validate",
        "warning site [birch] dropped",
        "train 2/4  loss 0.250 (aster 0.250)  Dice 0.500 (aster 0.500)  2.0 kB  2.0 s  at least 0:04 left",
        f"published phantom@1  sha256:{'ab' * 32}",
    ]


def test_plain_progress_says_the_forecast_time_before_the_first_round() -> None:
    made, stream = console(terminal=False)
    progress = PlainProgress(made)
    progress.run_started("run", PLAN, SITES, {"describe": 1.0, "train": 20.0})
    play(progress, "describe", 0, 1, 1.0, aster=entry())
    assert stream.getvalue().splitlines() == [
        "run: 2 sites (aster, birch); rounds: describe 1, train 4, validate 1; "
        "about 1:21 in all, not counting validate",
        "describe 1/1  2.0 kB  1.0 s  1:20 left, not counting validate",
    ]


@pytest.mark.parametrize(
    ("validated", "said"),
    [(0, " of training patients"), (1, " of 1 patient"), (2, " of 2 patients"), (3, "")],
)
def test_a_score_of_few_patients_says_so_and_a_loss_does_not(validated: int, said: str) -> None:
    for display in (PlainProgress, RichProgress):
        made, stream = console(terminal=display is RichProgress)
        progress = display(made)
        progress.run_started("run", PLAN, SITES, None, {"aster": validated, "birch": 9})
        play(progress, "train", 0, 4, 1.0, aster=entry(loss=0.5, val_dice=0.25), birch=entry(val_dice=0.5))
        if display is RichProgress:
            made.print(progress.render())
            assert f"0.250{said} " in stream.getvalue()
        else:
            assert f"Dice 0.375 (aster 0.250{said}, birch 0.500)" in stream.getvalue()
            assert "loss 0.500 (aster 0.500)" in stream.getvalue()


def test_number_of_patients_that_all_sites_have_stands_once() -> None:
    made, stream = console(terminal=False)
    progress = PlainProgress(made)
    progress.run_started("run", PLAN, SITES, None, dict.fromkeys(SITES, 1))
    play(progress, "train", 0, 4, 1.0, aster=entry(val_dice=0.25), birch=entry(val_dice=0.5))
    assert "Dice 0.375 (aster 0.250, birch 0.500, each of 1 patient)" in stream.getvalue()


@pytest.mark.parametrize("display", [PlainProgress, RichProgress])
def test_scores_of_the_end_say_which_model_they_are_of_and_of_how_many_patients(display: type) -> None:
    made, stream = console(terminal=display is RichProgress)
    progress = display(made)
    progress.run_started("run", PLAN, SITES)
    aster = {"test_dice": 0.5, "test_n": 12.0, "personal_test_dice/cup": 0.75, "personal_test_n/cup": 2.0}
    birch = {"test_dice": 0.8, "test_n": 4.0}
    play(progress, "test", 0, 1, 1.0, aster=entry(**aster), birch=entry(**birch))
    assert "test 0.575 n=16 (aster 0.500 n=12, birch 0.800 n=4, few)" in stream.getvalue()
    assert "own test cup 0.750 n=2, few (aster 0.750 n=2, few)" in stream.getvalue()


@pytest.mark.parametrize("display", [PlainProgress, RichProgress])
def test_own_models_are_compared_on_the_same_patients(display: type) -> None:
    made, stream = console(terminal=display is RichProgress)
    progress = display(made)
    progress.run_started("run", PLAN, SITES)
    # Changes of 0.1 and 0.3: 0.2, and 12.706 standard errors of 0.1.
    paired = {"n": 2.0, "before": 0.5, "change": 0.2, "squares": 0.05}
    own = {f"personal_test_paired_{what}": value for what, value in paired.items()}
    play(progress, "test", 0, 1, 1.0, aster=entry(test_n=2.0, **own), birch=entry())
    assert "own minus shared, same patients: +0.200 (-1.071 to +1.471) n=2, few" in stream.getvalue()


@pytest.mark.parametrize("display", [PlainProgress, RichProgress])
def test_score_of_the_only_label_is_not_repeated(display: type) -> None:
    made, stream = console(terminal=display is RichProgress)
    progress = display(made)
    progress.run_started("run", PLAN, SITES)
    alone = {"test_dice": 0.5, "test_n": 2.0, "test_dice/organ": 0.5, "test_n/organ": 2.0}
    play(progress, "test", 0, 1, 1.0, aster=entry(**alone), birch=entry(**alone))
    assert "test 0.500 n=4, few (aster 0.500, birch 0.500, each n=2, few)" in stream.getvalue()
    assert "organ" not in stream.getvalue()
    two = alone | {"test_dice/rim": 0.3, "test_n/rim": 2.0, "test_dice": 0.4}
    play(progress, "test", 0, 1, 1.0, aster=entry(**two), birch=entry(**two))
    assert "test organ 0.500" in stream.getvalue()
    assert "test rim 0.300" in stream.getvalue()


@pytest.mark.parametrize("display", [PlainProgress, RichProgress])
def test_what_policies_withhold_is_said_in_the_round(display: type) -> None:
    made, stream = console(terminal=display is RichProgress)
    progress = display(made)
    progress.run_started("run", PLAN, SITES)
    kept = replace(entry(), withheld=("personal",))
    play(progress, "train", 0, 4, 1.0, aster=kept, birch=kept)
    play(progress, "train", 1, 4, 1.0, aster=kept, birch=entry())
    assert "personal withheld by aster, birch\n" in stream.getvalue()
    assert "personal withheld by aster\n" in stream.getvalue()


def test_plain_progress_counts_scores_of_few_patients_where_it_names_no_site() -> None:
    made, stream = console(terminal=False)
    progress = PlainProgress(made)
    sites = {f"s{i}": entry(val_dice=i / 10) for i in range(9)}
    progress.run_started("run", PLAN, [*sites], None, {"s1": 1, "s2": 0, "s3": 3})
    play(progress, "train", 0, 4, 1.0, **sites)
    assert "Dice 0.400 (0.000 to 0.800, 2 of fewer than 3 patients)" in stream.getvalue()


def test_plain_progress_of_many_sites_prints_mean_and_range() -> None:
    made, stream = console(terminal=False)
    progress = PlainProgress(made)
    progress.run_started("run", PLAN, [f"s{i}" for i in range(9)])
    sites = {f"s{i}": entry(val_dice=i / 10) for i in range(9)}
    progress.round_started("train", 0, 4, tuple(sites))
    for name, site in sites.items():
        progress.site_finished("train", 0, name, site)
    progress.round_finished(RoundEntry("train", 0, 4, 1.0, sites))
    assert "Dice 0.400 (0.000 to 0.800)" in stream.getvalue()


def test_rich_progress_shows_every_site_and_ends_as_done() -> None:
    made, stream = console(terminal=True)
    with RichProgress(made) as progress:
        progress.run_started("iop-fl on phantom", PLAN, SITES)
        play(progress, "train", 2, 4, 1.0, aster=entry(loss=0.5, val_dice=0.9, own_number=2.0))
        made.print(progress.render())
        half = stream.getvalue()
        play(progress, "train", 3, 4, 1.0, aster=entry(loss=0.5), birch=entry(loss=0.5))
        play(progress, "validate", 0, 1, 1.0, aster=entry(val_dice=0.875), birch=entry(val_dice=0.5))
    for fragment in ("iop-fl on phantom", "train 3/4", "aster", "0.900", "own number", "dropped", "left"):
        assert fragment in half
    last = stream.getvalue()[len(half) :]
    assert "done" in last
    assert "0.688" in last  # the mean of 0.875 and 0.5


def test_rich_progress_without_a_run_is_empty() -> None:
    made, _ = console(terminal=True)
    assert str(RichProgress(made).render()) == ""
    with pytest.raises(RuntimeError, match="call run_started first"):
        _ = RichProgress(made).state


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1.0 kB"),
        (size(31_064_600), "31.1 MB"),
        (size(123_456_789), "123 MB"),
        (size(4.2e12), "4.2 TB"),
        (duration(7.4), "0:07"),
        (duration(765), "12:45"),
        (duration(11045), "3:04:05"),
        (number(None), "–"),
        (number(float("nan")), "–"),
        (number(0.70951), "0.710"),
        (sparkline([0.0, 0.5, 1.0, float("nan")]), "▁▅█ "),
        (sparkline([0.0] * 40 + [1.0], width=3), "▁▁█"),
        (sparkline([1e308, float("inf"), -1e308, float("-inf"), -0.1, 0.99]), "██▁▁▁█"),
    ],
)
def test_size_duration_number_and_sparkline_format_values(found: str, expected: str) -> None:
    assert found == expected


def test_plain_progress_says_within_a_round_who_works_and_for_how_long() -> None:
    made, stream = console(terminal=False)
    progress = PlainProgress(made)
    progress.run_started("run", PLAN, SITES)
    progress.still_running()
    play(progress, "train", 0, 4, 100.0, aster=entry(), birch=entry())
    progress.still_running()
    before = stream.getvalue().splitlines()
    assert len(before) == 2, "between rounds there is nothing to say"
    clock = Clock()
    progress.state._clock = clock
    progress.round_started("train", 1, 4, SITES)
    clock.now += 70
    progress.site_finished("train", 1, "aster", entry())
    progress.still_running()
    assert stream.getvalue().splitlines()[2:] == [
        "train 2/4  running for 1:10  done: aster  working: birch  at least 3:50 left"
    ]


def test_plain_progress_reminds_by_itself_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.progress.display._REMIND_SECONDS", 0.01)
    made, stream = console(terminal=False)
    with PlainProgress(made) as progress:
        progress.run_started("run", PLAN, SITES)
        progress.round_started("train", 0, 4, SITES)
        wait_for(lambda: "train 1/4  running for" in stream.getvalue())
    told = stream.getvalue()
    assert not progress._watch.is_alive()
    assert stream.getvalue() == told
