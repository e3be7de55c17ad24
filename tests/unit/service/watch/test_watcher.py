"""The watch over stored observations: what it calls, since when, and that it counts each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import event, select

from service import observation
from service.database import (
    Acceptance,
    Assignment,
    CorrectedLabel,
    Correction,
    Database,
    Job,
    Observation,
    Watch,
    WatchCursor,
    WatchEvent,
    WatchRule,
)
from service.observation import Answer, Observed, SeenLabel
from service.watch.budget import Budget
from service.watch.rules import stop_of
from service.watch.views import deviant, events, points, seen
from service.watch.watcher import close, forget, look, restart
from tests.helpers.service.alarmed import put_alarm

BEGAN = datetime(2026, 1, 5, 8, tzinfo=UTC)  # a Monday
PER_DAY = 20


@pytest.fixture
def watched(database: Database) -> Database:
    """The hospital `north` is served version `sha256:1` of `organ`."""
    assign(database, "sha256:1", BEGAN)
    return database


def assign(database: Database, digest: str, at: datetime) -> None:
    number = int(digest.rpartition(":")[2])
    with database.write() as session:
        own = {"version": number, "digest": digest, "actor": "ada", "reason": "test", "at": at}
        session.add(Assignment(hospital="north", model="organ", sequence=number, **own))


def answered(
    number: int,
    shift: float,
    at: datetime,
    *,
    voxels: int = 1000,
    version: str = "sha256:1",
    software: str = "1",
    scan: int | None = None,
    **fields: Any,
) -> Answer:
    seen = Observed(
        *("organ", version, "sha256:g", f"sha256:{number if scan is None else scan}", (64, 64, 9)),
        *(0.5, "float32", "CPU"),
        labels=(SeenLabel("liver", 0.9, voxels, voxels / 1000, 1),),
        locum="1",
        scanner="CT 2",
        acquisition={"software": software},
        shift=shift,
        shift_at="norms",
        **fields,
    )
    return Answer(seen, "north", "key:pacs", f"r{number}", "http", at)


def times(count: int, begin: datetime = BEGAN) -> list[datetime]:
    """Of answers at `PER_DAY`, every day of the week."""
    return [
        begin + timedelta(days=number // PER_DAY, minutes=20 * (number % PER_DAY)) for number in range(count)
    ]


def store(database: Database, answers: Sequence[Answer]) -> None:
    for start in range(0, len(answers), 100):
        with database.write() as session:
            observation.append(session, answers[start : start + 100])


def year(shifts: Sequence[float], **fields: Any) -> list[Answer]:
    return [
        answered(number, shift, at, **fields)
        for number, (shift, at) in enumerate(zip(shifts, times(len(shifts)), strict=True))
    ]


def log_normal(count: int, seed: int = 0) -> list[float]:
    return np.exp(np.random.default_rng(seed).normal(0, 0.3, count)).tolist()


def state_of(database: Database) -> Watch:
    with database.read() as session:
        (watch,) = session.scalars(select(Watch)).all()
        return watch


def test_change_of_shift_is_called_with_its_beginning_and_its_answers(watched: Database) -> None:
    usual = log_normal(1000)
    changed = [3 * each for each in log_normal(60, 1)]
    store(watched, year(usual))
    assert look(watched, BEGAN) == 1000
    calm = state_of(watched)
    assert (calm.state, calm.answers, calm.since) == ("routine", 1000, None)
    later = times(1060)[1000:]
    store(watched, [answered(1000 + n, each, later[n], software="2") for n, each in enumerate(changed)])
    look(watched, later[-1])
    watch = state_of(watched)
    assert watch.state == "investigate"
    with watched.read() as session:
        (own,) = seen(session)
        alarms = {each.stream: each for each in own.alarms}
        assert set(alarms) == {"shift"}
        # Three standard deviations: within a dozen answers, and dated to the very first or close to it.
        assert alarms["shift"].at <= later[12]
        assert abs(alarms["shift"].since - later[0]) < timedelta(days=1)
        kinds = [(each.kind, each.details.get("after")) for each in events(session, "north", "organ", 10)]
        assert ("software", "2") in kinds
        found = deviant(alarms["shift"], points(session, "north", "organ", 100))
        assert len(found) == 6
        assert [value for _, value in found] == sorted(np.log(changed))[:-7:-1]
        # Once it is answered, what came later belongs to another series.
        alarms["shift"].answered_at = later[19]
        found = deviant(alarms["shift"], points(session, "north", "organ", 100))
        assert [value for _, value in found] == sorted(np.log(changed[:20]))[:-7:-1]
        session.expunge(alarms["shift"])
        assert stop_of(session, "north", "organ") == "warn"


def test_many_watches_are_read_by_as_many_queries_as_one(watched: Database) -> None:
    asked: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        asked.append(statement)

    counts = []
    with watched.write() as session:
        event.listen(session.get_bind(), "before_cursor_execute", note)
        for months, scanner in enumerate(("CT 1", "CT 2", "CT 3"), start=1):
            put_alarm(session, "north", "organ", "sha256:1", scanner)
            rule = {"hospital": "north", "model": "organ", "months": float(months), "stop": "hold"}
            session.add(WatchRule(**rule, actor="ada", reason="as agreed", at=BEGAN))
            session.flush()
            asked.clear()
            found = seen(session)
            counts.append(len(asked))
            assert seen(session, "south") == seen(session, "north", "other") == []
        event.remove(session.get_bind(), "before_cursor_execute", note)
    assert counts == [counts[0]] * 3
    assert [(each.watch.scanner, len(each.alarms)) for each in found] == [
        ("CT 1", 1),
        ("CT 2", 1),
        ("CT 3", 1),
    ]
    # The newest setting is that of all.
    assert {(each.rule.months, each.rule.stop) for each in found} == {(3.0, "hold")}


def test_each_answer_counts_once_for_several_processes_and_batches(watched: Database) -> None:
    whole = year(log_normal(700))
    other = Database(watched.url.render_as_string(hide_password=False))
    try:
        for start in range(0, 700, 175):
            store(watched, whole[start : start + 175])
            with ThreadPoolExecutor(4) as pool:
                taken = list(pool.map(look, [watched, other, watched, other], [BEGAN] * 4))
            assert sum(taken) == 175
    finally:
        other.dispose()
    by_parts = state_of(watched)
    assert by_parts.answers == 700
    with watched.write() as session:
        session.delete(session.get_one(Watch, ("north", "organ", "CT 2")))
        session.get_one(WatchCursor, 1).last = 0
    look(watched, BEGAN)
    at_once = state_of(watched)
    assert (at_once.streams, at_once.usual) == (by_parts.streams, by_parts.usual)


def test_same_scan_other_versions_and_what_a_person_asked_for_are_not_counted(watched: Database) -> None:
    at = times(10)
    store(
        watched,
        [
            answered(0, 1.0, at[0]),
            answered(1, 1.0, at[1], scan=0),
            answered(2, 1.0, at[2], version="sha256:9"),
            answered(3, 1.0, at[3], usual=False),
            answered(4, 1.0, at[4]),
        ],
    )
    assert look(watched, BEGAN) == 5
    assert state_of(watched).answers == 2


def test_another_version_begins_the_series_anew_and_closes_its_alarms(watched: Database) -> None:
    store(watched, year([*log_normal(400), *(9 * each for each in log_normal(40, 1))]))
    look(watched, BEGAN)
    assert state_of(watched).state == "investigate"
    begin = times(440)[-1] + timedelta(minutes=1)
    assign(watched, "sha256:2", begin)
    store(watched, [answered(1000, 9.0, begin + timedelta(minutes=1), version="sha256:2")])
    look(watched, begin)
    watch = state_of(watched)
    assert (watch.state, watch.answers, watch.version) == ("routine", 1, "sha256:2")
    with watched.read() as session:
        found = events(session, "north", "organ", 10)
        assert found[0].kind == "version"
        assert {each.answered_by for each in found if each.kind == "alarm"} == {"service"}


def test_person_s_answer_begins_the_series_anew(watched: Database) -> None:
    store(watched, year([*log_normal(400), *(9 * each for each in log_normal(40, 1))]))
    look(watched, BEGAN)
    with watched.write() as session:
        session.add(
            WatchRule(hospital="north", model="organ", months=6, stop="hold", actor="a", reason="r", at=BEGAN)
        )
        watch = session.get_one(Watch, ("north", "organ", "CT 2"))
        session.flush()
        assert stop_of(session, "north", "organ") == "hold"
        assert close(session, watch, BEGAN, "ada", "new tube") >= 1
        restart(watch, BEGAN)
        session.flush()
        assert stop_of(session, "north", "organ") is None
    # What was unusual is usual now.
    at = times(640)[440:]
    store(watched, [answered(440 + n, 9 * each, at[n]) for n, each in enumerate(log_normal(200, 2))])
    look(watched, BEGAN)
    assert state_of(watched).state == "routine"


def accept(database: Database, shifts: Sequence[float], accepted: bool = True, old: bool = False) -> None:
    """A decision on version `sha256:1` at `north`, by scans with these shifts."""
    scans = [
        {
            "shift": shift,
            "unlike": [],
            "confidence": {"liver": 0.9},
            **({} if old else {"seen": {"liver": {"voxels": 1000, "volume_ml": 1.0}}}),
        }
        for shift in shifts
    ]
    report = {"report": {"scans": scans}}
    with database.write() as session:
        job = uuid4().hex
        of = {"id": job, "hospital": "north", "model": "organ", "parent": "sha256:1", "options": {}}
        done = {"kind": "acceptance", "state": "succeeded", "result": report}
        session.add(Job(**of, **done, created_at=BEGAN, expires_at=BEGAN))
        session.flush()
        own = {"hospital": "north", "model": "organ", "version": "sha256:1", "precision": "float32"}
        who = {"measured_by": "mara", "actor": "ines", "reason": "looked at", "at": BEGAN}
        said = {"verdict": "met", "digest": "sha256:d", "accepted": accepted, "override": False}
        session.add(Acceptance(job=job, **own, **who, **said))


def first_alarm(database: Database, count: int) -> int | None:
    """The number of the answer that alarms first of so many with twice the shift of usual ones."""
    store(database, year([2 * each for each in log_normal(count, 7)]))
    look(database, BEGAN)
    with database.read() as session:
        found = session.scalars(select(WatchEvent).where(WatchEvent.stream == "shift")).first()
        return None if found is None else times(count).index(found.at) + 1


def test_scans_of_an_acceptance_say_what_is_usual_before_the_first_answer(watched: Database) -> None:
    accept(watched, log_normal(60))
    found = first_alarm(watched, 40)
    assert found is not None
    assert found < 30
    watch = state_of(watched)
    assert (watch.answers, watch.streams["known"], watch.state) == (40, 60, "investigate")
    with watched.read() as session:
        (own,) = seen(session)
        assert not own.learning
        # It is dated within the answers, not within the scans that were accepted.
        assert own.alarms[0].since >= BEGAN
    # A person who says that this is usual is believed.
    with watched.write() as session:
        restart(session.scalars(select(Watch)).one(), times(41)[40])
    later = times(60)
    store(watched, [answered(40 + n, each, later[40 + n]) for n, each in enumerate(log_normal(20, 3))])
    look(watched, BEGAN)
    watch = state_of(watched)
    assert (watch.answers, watch.streams["known"]) == (20, 0)


@pytest.mark.parametrize(
    "other",
    ["none", "rejected since", "a report without what was seen", "too few"],
)
def test_without_scans_that_were_accepted_the_first_answers_say_it(watched: Database, other: str) -> None:
    if other == "rejected since":
        accept(watched, log_normal(60))
        accept(watched, log_normal(60), accepted=False)
    elif other == "a report without what was seen":
        accept(watched, log_normal(60), old=True)
    elif other == "too few":
        accept(watched, log_normal(9))
    assert first_alarm(watched, 40) is None
    assert state_of(watched).streams["known"] == (9 if other == "too few" else 0)
    with watched.read() as session:
        assert [each.learning for each in seen(session)] == [True]


def test_empty_masks_and_warnings_are_called(watched: Database) -> None:
    usual = year(log_normal(400))
    at = times(440)[400:]
    empty = [answered(400 + n, 1.0, each, voxels=0, unlike=1) for n, each in enumerate(at)]
    store(watched, [*usual, *empty])
    look(watched, BEGAN)
    with watched.read() as session:
        names = {str(each.stream) for each in session.scalars(select(WatchEvent))}
    assert {"no liver", "warned"} <= names


def correct(database: Database, answer: int, agreement: float | None, at: datetime) -> None:
    """A person corrected an answer so far, or accepted it, and a worker measured that."""
    with database.write() as session:
        row = session.scalars(select(Observation).where(Observation.request == f"r{answer}")).one()
        made = Correction(
            observation=row.id,
            **{name: getattr(row, name) for name in ("hospital", "model", "version", "request", "scanner")},
            answered_at=row.at,
            at=at,
            way="http",
            actor="ada",
            accepted=agreement is None,
            state="measured",
        )
        session.add(made)
        session.flush()
        changed = {"surface_dice": 1.0 if agreement is None else agreement}
        voxels = {"added_voxels": 0, "removed_voxels": 0}
        session.add(CorrectedLabel(correction=made.id, label="liver", **changed, **voxels))


def test_answers_that_persons_change_more_are_called_and_each_correction_counts_once(
    watched: Database,
) -> None:
    random = np.random.default_rng(3)
    ends = BEGAN + timedelta(days=15)
    store(watched, year(log_normal(300)))
    look(watched, now=ends)
    for number in range(0, 240, 2):
        usual = None if random.uniform() < 0.5 else float(random.uniform(0.9, 1))
        correct(watched, number, usual, ends)
    look(watched, now=ends)
    assert state_of(watched).state == "routine"
    assert state_of(watched).streams["corrections"] == 120
    look(watched, now=ends)
    assert state_of(watched).streams["corrections"] == 120
    for number in range(240, 280):
        correct(watched, number, float(random.uniform(0.4, 0.8)), ends)
    look(watched, now=ends)
    assert state_of(watched).state == "investigate"
    with watched.read() as session:
        (alarm,) = [each for each in events(session, "north", "organ", 9) if each.kind == "alarm"]
    assert (alarm.stream, alarm.details["up"]) == ("agreement with corrections", False)
    assert alarm.since is not None
    assert times(300)[230] <= alarm.since <= times(300)[250]


def test_silence_is_called_on_a_usual_day_and_not_at_a_quiet_scanner(watched: Database) -> None:
    # Two months, in which one in six would call by chance: this seed does not.
    store(watched, year(log_normal(PER_DAY * 60, 5)))
    look(watched, BEGAN)
    last = times(PER_DAY * 60)[-1]
    look(watched, last + timedelta(hours=12))
    assert state_of(watched).state == "routine"
    look(watched, last + timedelta(days=2))
    watch = state_of(watched)
    assert (watch.state, watch.since) == ("investigate", last)
    # Looking again calls nothing more.
    look(watched, last + timedelta(days=4))
    with watched.read() as session:
        assert [each.stream for each in session.scalars(select(WatchEvent))] == ["silence"]


def test_answers_of_no_hospital_are_passed_over(watched: Database) -> None:
    answer = answered(0, 1.0, BEGAN)
    store(watched, [Answer(answer.observed, None, "anonymous", "r", "http", BEGAN)])
    assert look(watched, BEGAN) == 1
    with watched.read() as session:
        assert session.scalars(select(Watch)).all() == []


def test_price_is_of_the_streams_of_all_scanners(watched: Database) -> None:
    answers = year(log_normal(PER_DAY * 20))
    other = [
        replace(each, observed=replace(each.observed, scanner="CT 1", scan="o" + each.observed.scan))
        for each in answers
    ]
    store(watched, answers)
    look(watched, BEGAN)
    # Shift, warnings, and of one label the volume, the confidence and whether it is missing.
    for scanners in (1, 2):
        with watched.read() as session:
            assert {each.price for each in seen(session)} == {str(Budget(12, 5 * scanners).price(PER_DAY))}
        store(watched, other)
        look(watched, BEGAN)


def test_scanners_beyond_the_bound_share_one_watch(
    watched: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.watch.watcher.MOST_SCANNERS", 3)
    answers = [answered(number, 1.0, at) for number, at in enumerate(times(10))]
    named = [
        replace(each, observed=replace(each.observed, scanner=f"S{n}")) for n, each in enumerate(answers)
    ]
    for each in named:
        store(watched, [each])
        look(watched, BEGAN)
    with watched.read() as session:
        found = {each.scanner: each.answers for each in session.scalars(select(Watch))}
    assert found == {"S0": 1, "S1": 1, "S2": 1, "": 7}
    with watched.write() as session:
        forget(session, "north")
    with watched.read() as session:
        assert session.scalars(select(Watch)).all() == []
