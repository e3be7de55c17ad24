from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from service.database import Assignment, Database
from service.errors import AssignmentStale, HospitalUnknown, NothingToRollBack
from service.serving import assignments


def digest(version: int) -> str:
    return f"sha256:{version:064x}"


def assign(session: Session, version: int, expected: int, hospital: str = "north") -> Assignment:
    return assignments.assign(
        session,
        hospital,
        "brain",
        version=version,
        digest=digest(version),
        expected=expected,
        actor="ada",
        reason="because",
    )


def keep(session: Session, version: int, replaces: int = 0) -> Assignment:
    shown = {"version": version, "digest": digest(version)}
    return assignments.keep(session, "north", "brain", **shown, replaces=replaces)


def assigned(session: Session, hospital: str, model: str, at: datetime | None = None) -> str | None:
    entry = assignments.assignment(session, hospital, model, at)
    return None if entry is None else entry.digest


def roll_back(session: Session, expected: int) -> Assignment:
    return assignments.roll_back(session, "north", "brain", expected=expected, actor="bo", reason="worse")


def test_assignment_log_matches_the_module_docstring(database: Database) -> None:
    with database.write() as session:
        assign(session, 3, expected=0)
        assign(session, 4, expected=1)
        roll_back(session, expected=2)
        assign(session, 5, expected=3)
    with database.read() as session:
        entries = assignments.history(session, "north", "brain")
    found = [(e.sequence, e.version, e.previous, e.restores) for e in entries]
    assert found == [(1, 3, None, None), (2, 4, 1, None), (3, 3, None, 1), (4, 5, 3, None)]
    assert [e.digest for e in entries] == [digest(v) for v in (3, 4, 3, 5)]
    assert [e.actor for e in entries] == ["ada", "ada", "bo", "ada"]


def test_second_rollback_goes_one_assignment_further_back(database: Database) -> None:
    with database.write() as session:
        for version in (1, 2, 3):
            assign(session, version, expected=version - 1)
        assert roll_back(session, expected=3).version == 2
        assert roll_back(session, expected=4).version == 1
        with pytest.raises(NothingToRollBack, match="no other version of 'brain'"):
            roll_back(session, expected=5)


def test_first_decision_is_rolled_back_to_what_served_by_default(database: Database) -> None:
    with database.write() as session:
        kept = keep(session, 3)
        assert (kept.sequence, kept.by_default, assignments.decided(kept)) == (1, True, 0)
        # A version that is published later replaces it only where the caller says so, and no decision.
        assert keep(session, 4).version == 3
        assert assign(session, 5, expected=0).previous == 1
        assert keep(session, 6, replaces=2).version == 5
        back = roll_back(session, expected=2)
        assert (back.version, back.restores, back.by_default, assignments.decided(back)) == (3, 1, False, 3)
        with pytest.raises(NothingToRollBack):
            roll_back(session, expected=3)


def test_default_that_was_recorded_since_the_caller_looked_stays(database: Database) -> None:
    with database.write() as session:
        assert keep(session, 1).version == 1
        assert keep(session, 2).version == 1
        assert keep(session, 2, replaces=1).version == 2
        assert keep(session, 3, replaces=1).version == 2
        assign(session, 4, expected=0)
        assert keep(session, 5, replaces=2).version == 4


def test_rollback_restores_no_other_entry_than_the_caller_saw(database: Database) -> None:
    with database.write() as session:
        keep(session, 1)
        keep(session, 2, replaces=1)
        seen = assignments.before(session, "north", "brain")
        assert seen is not None
        assert seen.version == 1
    # Served meanwhile; no decision was made, so the number of the one in force is the same.
    with database.write() as session:
        keep(session, 3, replaces=2)
    with pytest.raises(AssignmentStale, match="another version of 'brain' meanwhile"), database.write() as s:
        assignments.roll_back(s, "north", "brain", expected=0, actor="bo", reason="worse", to=seen.sequence)
    with database.read() as session:
        assert assigned(session, "north", "brain") == digest(3)


def test_rollback_restores_artefact_and_override(database: Database) -> None:
    with database.write() as session:
        for sequence, (artefact, override) in enumerate(((None, False), ("brain.at-north", True))):
            assignments.assign(
                session,
                "north",
                "brain",
                version=1,
                digest=digest(sequence),
                expected=sequence,
                actor="ada",
                reason="because",
                artefact=artefact,
                override=override,
            )
        assign(session, 2, expected=2)
        second, first = roll_back(session, expected=3), roll_back(session, expected=4)
        assert (second.artefact, second.override) == ("brain.at-north", True)
        assert (first.artefact, first.override) == (None, False)


def test_rollback_without_an_assignment_is_rejected(database: Database) -> None:
    with database.write() as session, pytest.raises(NothingToRollBack):
        roll_back(session, expected=0)


def test_assigned_returns_the_version_in_force_at_an_instant(database: Database) -> None:
    with database.write() as session:
        first = assign(session, 1, expected=0)
        second = assign(session, 2, expected=1)
        third = roll_back(session, expected=2)
    check_cancelled = timedelta(microseconds=1)
    expected = {
        first.at - check_cancelled: None,
        first.at: digest(1),
        second.at - check_cancelled: digest(1),
        second.at: digest(2),
        third.at - check_cancelled: digest(2),
        third.at: digest(1),
        third.at + timedelta(days=1): digest(1),
    }
    with database.read() as session:
        found = {at: assigned(session, "north", "brain", at) for at in expected}
        assert found == expected
        assert assigned(session, "north", "brain") == digest(1)
        assert assigned(session, "north", "another") is None
        assert assigned(session, "south", "brain") is None


def test_assigned_compares_instants_across_time_zones(database: Database) -> None:
    from zoneinfo import ZoneInfo

    with database.write() as session:
        entry = assign(session, 1, expected=0)
    elsewhere = entry.at.astimezone(ZoneInfo("Asia/Kolkata"))
    with database.read() as session:
        assert assigned(session, "north", "brain", elsewhere) == digest(1)
        before = elsewhere - timedelta(microseconds=1)
        assert assigned(session, "north", "brain", before) is None


def test_assignment_times_grow_when_the_clock_is_set_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [datetime(2026, 5, 2, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return times.pop(0)

    monkeypatch.setattr(assignments, "datetime", Clock)
    with database.write() as session:
        first = assign(session, 1, expected=0)
        second = assign(session, 2, expected=1)
    assert first.at < second.at
    with database.read() as session:
        assert assigned(session, "north", "brain", second.at) == digest(2)


def test_assignment_with_a_stale_sequence_is_rejected(database: Database) -> None:
    with database.write() as session:
        assign(session, 1, expected=0)
    with pytest.raises(AssignmentStale, match="at entry 1, not 0"), database.write() as session:
        assign(session, 2, expected=0)
    with pytest.raises(AssignmentStale, match="at entry 1, not 7"), database.write() as session:
        roll_back(session, expected=7)
    with database.read() as session:
        assert [e.version for e in assignments.history(session, "north", "brain")] == [1]


def test_concurrent_assignments_have_exactly_one_winner(database: Database) -> None:
    writers = 8
    barrier = threading.Barrier(writers)
    outcomes: list[str] = []

    def decide(version: int) -> None:
        barrier.wait()
        try:
            with database.write() as session:
                assign(session, version, expected=0)
            outcomes.append("won")
        except AssignmentStale:
            outcomes.append("stale")

    threads = [threading.Thread(target=decide, args=(n + 1,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["stale"] * (writers - 1) + ["won"]
    with database.read() as session:
        assert len(assignments.history(session, "north", "brain")) == 1


def test_assignments_of_an_unregistered_hospital_are_rejected(database: Database) -> None:
    with database.read() as session:
        for ask in (assigned, assignments.history, assignments.before):
            with pytest.raises(HospitalUnknown, match="'west'"):
                ask(session, "west", "brain")
