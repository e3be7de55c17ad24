"""API keys in a real database, on SQLite and PostgreSQL."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest

from service.database import ApiKey, Caller, Database
from service.errors import (
    GrantRefused,
    HospitalUnknown,
    KeyNameTaken,
    KeyNotValid,
    KeyOver,
    KeyUnknown,
)
from service.identity import keys

NORTH = Caller("key:north", frozenset({"admin"}), frozenset({"north"}))
SOON = timedelta(minutes=5)


def make(database: Database, name: str = "pacs", hospital: str | None = "north", **given: object) -> str:
    with database.write() as session:
        return keys.create(session, name, "reader", hospital, **given)[1]  # type: ignore[arg-type]


def found(database: Database, key: str) -> Caller:
    with database.read() as session:
        return keys.caller_with(keys.find(session, key))


def test_key_identifies_its_caller(database: Database) -> None:
    assert found(database, make(database)) == Caller(
        "key:pacs@north", frozenset({"reader"}), frozenset({"north"})
    )
    assert found(database, make(database, "ops", None)).hospitals is None


def test_caller_with_the_longest_name_writes(database: Database) -> None:
    longest = "n" * 130
    caller = found(database, make(database, longest))
    with database.for_caller(caller).write() as session:
        assert keys.create(session, "pacs", "reader", "north")[0].created_by == f"key:{longest}@north"


def test_database_has_the_hash_and_not_the_key(database: Database) -> None:
    key = make(database)
    secret = key.rpartition("_")[2]
    with database.read() as session:
        row = session.query(ApiKey).one()
    assert row.digest == hashlib.sha256(key.encode()).hexdigest()
    values = [getattr(row, column.name) for column in ApiKey.__table__.columns]
    assert not [value for value in values if secret in str(value)]


@pytest.mark.parametrize("change", ["secret", "id", "short", "empty", "no prefix"])
def test_altered_key_is_rejected(database: Database, change: str) -> None:
    key = make(database)
    altered = {
        "secret": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "id": "locum_000000000000" + key[18:],
        "short": key[:-1],
        "empty": "locum_",
        "no prefix": key.removeprefix("locum_"),
    }[change]
    with database.read() as session, pytest.raises(KeyNotValid, match="no such API key"):
        keys.find(session, altered)


def test_expired_and_revoked_keys_are_rejected_with_the_reason(database: Database) -> None:
    expired = make(database, "old", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    revoked = make(database, "gone")
    with database.write() as session:
        first = keys.revoke(session, revoked[6:18]).revoked_at
    with database.write() as session:
        assert keys.revoke(session, revoked[6:18]).revoked_at == first
    with database.read() as session:
        with pytest.raises(KeyNotValid, match="expired at"):
            keys.find(session, expired)
        with pytest.raises(KeyNotValid, match="was revoked at"):
            keys.find(session, revoked)
    for key in (expired, revoked):
        with database.write() as session, pytest.raises(KeyOver):
            keys.rotate(session, key[6:18], SOON)


def test_rotated_key_overlaps_its_successor_and_then_expires(database: Database) -> None:
    lifetime = timedelta(days=7)
    old = make(database, expires_at=datetime.now(UTC) + lifetime)
    with database.write() as session:
        row, new = keys.rotate(session, old[6:18], SOON)
    assert found(database, old) == found(database, new)
    assert row.expires_at is not None
    assert abs(row.expires_at - row.created_at - lifetime) < timedelta(seconds=10)
    with database.read() as session:
        before = session.get(ApiKey, old[6:18])
        assert before is not None
        assert before.expires_at is not None
        assert keys.refusal(before, before.expires_at - timedelta(seconds=1)) is None
        assert "expired" in str(keys.refusal(before, datetime.now(UTC) + SOON))


def test_second_rotation_of_a_key_is_rejected_and_of_its_successor_keeps_the_lifetime(
    database: Database,
) -> None:
    lifetime = timedelta(days=7)
    old = make(database, expires_at=datetime.now(UTC) + lifetime)
    with database.write() as session:
        successor = keys.rotate(session, old[6:18], SOON)[0].id
    with database.write() as session, pytest.raises(KeyOver, match=f"by locum_{successor}: rotate that one"):
        keys.rotate(session, old[6:18], SOON)
    with database.write() as session:
        row = keys.rotate(session, successor, SOON)[0]
        assert row.expires_at is not None
        assert abs(row.expires_at - row.created_at - lifetime) < timedelta(seconds=10)


def test_name_of_a_valid_key_is_taken_until_it_is_revoked(database: Database) -> None:
    key = make(database)
    with pytest.raises(KeyNameTaken):
        make(database)
    with database.write() as session:
        keys.revoke(session, key[6:18])
    make(database)


def test_name_is_taken_in_its_own_hospital_alone(database: Database) -> None:
    """Else 409 would tell which programs another hospital has."""
    made = [make(database, hospital=hospital) for hospital in ("north", "south", None)]
    actors = [found(database, key).actor for key in made]
    assert actors == ["key:pacs@north", "key:pacs@south", "key:pacs"]
    for hospital in ("north", "south", None):
        with pytest.raises(KeyNameTaken):
            make(database, hospital=hospital)


def test_no_key_for_all_has_the_actor_of_a_hospital_s_key(database: Database) -> None:
    pairs = [("pacs", "north"), ("pacs@north", None), ("pacs@north@*", None), ("ada@hospital.example", None)]
    actors = [found(database, make(database, name, hospital)).actor for name, hospital in pairs]
    assert len({*actors}) == 4
    assert actors[-1] == "key:ada@hospital.example"


def test_one_of_two_that_choose_a_name_at_once_has_it(database: Database) -> None:
    barrier = Barrier(2)

    def create(_: int) -> bool:
        barrier.wait()
        try:
            make(database)
        except KeyNameTaken:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(create, range(2))) == [False, True]


def test_people_behind_a_key_are_the_first_who_saw_its_secret(database: Database) -> None:
    def people(actor: str) -> set[str]:
        with database.read() as session:
            return {*keys.people_behind(session, actor)}

    with database.write() as session:
        boss = keys.caller_with(keys.create(session, "boss", "admin", "north")[0])
        own = keys.caller_with(keys.create(session, "own", "approver", "north")[0])
    for maker, names in ((boss, ("first", "second")), (Caller("oidc:eve", boss.roles, None), ("third",))):
        for name in names:
            make(database.for_caller(maker), name)
    assert people("key:first@north") == people("key:second@north") == people(boss.actor) == {boss.actor}
    assert people("key:third@north") == people("oidc:eve") == {"oidc:eve"}
    assert people(own.actor) == {own.actor}
    # A rotation shows the secret, too; of a key by itself it changes nothing.
    for maker, key in ((boss, boss.key), (boss, own.key)):
        assert key is not None
        with database.for_caller(maker).write() as session:
            keys.rotate(session, key, SOON)
    assert people(boss.actor) == people(own.actor) == {boss.actor}


def test_key_for_an_unknown_hospital_is_rejected(database: Database) -> None:
    with pytest.raises(HospitalUnknown):
        make(database, hospital="nowhere")


def test_admin_of_a_hospital_manages_the_keys_of_that_hospital_alone(database: Database) -> None:
    of_all, of_south = make(database, "all", None), make(database, "south", "south")
    bound = database.for_caller(NORTH)
    own = make(bound, "own")
    with bound.read() as session:
        assert [row.name for row in keys.listed(session)] == ["own"]
        assert [row.created_by for row in keys.listed(session)] == ["key:north"]
    for key in (of_all, of_south, "locum_" + "0" * 12):
        with bound.write() as session, pytest.raises(KeyUnknown):
            keys.revoke(session, key[6:18])
    with bound.write() as session, pytest.raises(GrantRefused):
        keys.create(session, "more", "admin", None)
    with bound.write() as session, pytest.raises(GrantRefused):
        keys.create(session, "more", "federation", "north")
    with bound.write() as session, pytest.raises(HospitalUnknown):
        keys.create(session, "more", "admin", "south")
    with bound.write() as session:
        assert keys.revoke(session, own[6:18]).revoked_at is not None
