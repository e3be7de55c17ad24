"""The audit trail in a real database, on SQLite and PostgreSQL; verified and then damaged."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import service
from service.audit import trail
from service.audit.dicom import audit_message
from service.audit.lines import line
from service.database import AuditRow, Caller, Database, upgrade
from service.database.digest_chain import FIRST_PREVIOUS, digest_of
from service.database.migrations.append_only import missing_guards
from service.errors import AuditBroken, AuditNotComparable
from service.http.audit import Audited
from service.serving import assignments
from tests.helpers.service.routes import every_route

ADA = Caller("key:ada", frozenset({"approver"}), frozenset({"north"}))
DIGEST, SCAN = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def write(database: Database, count: int = 1, **given: Any) -> None:
    for number in range(count):
        with database.for_caller(ADA).write() as session:
            content = {"hospital": "north", "scan": SCAN, "details": {"number": number}, **given}
            trail.append(session, "scan.segmented", **content)


def assign(database: Database, version: int = 1, expected: int = 0) -> None:
    with database.for_caller(ADA).write() as session:
        assignments.assign(
            session,
            "north",
            "brain",
            version=version,
            digest=DIGEST,
            expected=expected,
            actor="key:ada",
            reason="looked at it",
        )


def verified(database: Database, expected: trail.Head | None = None) -> trail.Verified:
    with database.snapshot() as session:
        return trail.verify(session, expected)


def exported(database: Database) -> list[dict[str, Any]]:
    with database.snapshot() as session:
        return [json.loads(line(row)) for row in trail.rows(session)]


TABLES = ("audit", "assignment", "audit_checkpoint", "observation", "observed_label")


def behind_its_back(database: Database, *statements: str) -> None:
    """Change tables as a person with the database's password would: with the triggers off meanwhile."""
    triggers: list[str] = []
    with database.engine.begin() as connection:
        if database.is_sqlite:
            for name, table, definition in connection.execute(
                text("SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'trigger'")
            ).all():
                assert table in TABLES
                connection.execute(text(f"DROP TRIGGER {name}"))
                triggers.append(definition)
        else:
            for table in TABLES:
                connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER ALL"))
                triggers.append(f"ALTER TABLE {table} ENABLE TRIGGER ALL")
        for statement in (*statements, *triggers):
            connection.execute(text(statement))


def test_new_trail_has_its_first_row_and_verifies(database: Database) -> None:
    found = verified(database)
    assert (found.rows, found.removed, found.head.number) == (1, 0, 1)


def test_row_has_who_what_and_the_digest_before_it(database: Database) -> None:
    write(database, 2)
    _, first, second = exported(database)
    assert (first["actor"], first["action"], first["hospital"]) == ("key:ada", "scan.segmented", "north")
    assert (first["scan"], first["details"], first["id"]) == (SCAN, {"number": 0}, 2)
    assert second["previous"] == first["digest"]


def test_digest_equals_one_computed_from_the_export_alone(database: Database) -> None:
    write(database, 3, details={"reason": "Größe, «ok»\n", "value": 0.1, "list": [1, None, True]})
    before = "0" * 64
    for row in exported(database):
        digest = row.pop("digest")
        assert row["previous"] == before
        plain = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert hashlib.sha256(plain.encode()).hexdigest() == digest
        before = digest


def test_concurrent_writers_make_one_chain(database: Database) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write(database, 10), range(8)))
    assert verified(database).rows == 81


def test_row_of_a_rolled_back_transaction_is_absent(database: Database) -> None:
    def fail() -> None:
        with database.write() as session:
            trail.append(session, "scan.segmented")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    write(database)
    assert verified(database).rows == 2


CHANGES = {
    "at": "at = '2020-01-01 00:00:00'",
    "actor": "actor = 'key:eve'",
    "action": "action = 'scan.deleted'",
    "hospital": "hospital = NULL",
    "version": "version = 'sha256:0'",
    "scan": "scan = 'c'",
    "outcome": "outcome = 403",
    "request": "request = 'x'",
    "details": "details = '{}'",
    "previous": "previous = 'd'",
    "digest": "digest = 'e'",
}


def test_changes_cover_every_column() -> None:
    assert {"id", *CHANGES} == {column.name for column in AuditRow.__table__.columns}


@pytest.mark.parametrize("column", CHANGES)
def test_changed_row_is_found_and_named(database: Database, column: str) -> None:
    write(database, 4)
    behind_its_back(database, f"UPDATE audit SET {CHANGES[column]} WHERE id = 3")
    with pytest.raises(AuditBroken, match=r"row [34]\b"):
        verified(database)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (["DELETE FROM audit WHERE id = 3"], "row 3 is missing: row 4 follows row 2"),
        (["DELETE FROM audit WHERE id = 1"], "row 1 is missing"),
        (
            [
                "UPDATE audit SET id = 99 WHERE id = 3",
                "UPDATE audit SET id = 3 WHERE id = 4",
                "UPDATE audit SET id = 4 WHERE id = 99",
            ],
            "row 3 has another digest before it than row 2",
        ),
    ],
    ids=["removed", "first removed", "reordered"],
)
def test_removed_or_reordered_row_is_found_and_named(
    database: Database, statements: list[str], message: str
) -> None:
    write(database, 4)
    behind_its_back(database, *statements)
    with pytest.raises(AuditBroken, match=message):
        verified(database)


def test_noted_head_shows_removed_last_rows_and_a_rewritten_trail(database: Database) -> None:
    write(database, 3)
    noted = verified(database).head
    assert verified(database, noted).head == noted
    behind_its_back(database, "DELETE FROM audit WHERE id = 4")
    verified(database)
    with pytest.raises(AuditBroken, match="rows 4 to 4 are missing at the end"):
        verified(database, noted)
    write(database)
    with pytest.raises(AuditBroken, match="row 4 has another digest than was noted"):
        verified(database, noted)


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'x'", "DELETE FROM audit"])
def test_database_refuses_to_change_the_trail(database: Database, statement: str) -> None:
    write(database)
    with pytest.raises(DBAPIError, match="append-only"), database.write() as session:
        session.execute(text(statement))
    assert verified(database).rows == 2


def test_assignment_is_a_row_of_the_trail(database: Database) -> None:
    assign(database)
    assign(database, version=2, expected=1)
    with database.for_caller(ADA).write() as session:
        assignments.roll_back(session, "north", "brain", expected=2, actor="key:ada", reason="worse")
    rows = exported(database)[1:]
    assert [row["action"] for row in rows] == ["version.assigned"] * 2 + ["version.rolled-back"]
    assert {row["version"] for row in rows} == {DIGEST}
    assert rows[2]["details"]["restores"] == 1
    assert rows[0]["details"]["reason"] == "looked at it"
    verified(database)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE assignment SET reason = 'other'", "is another than row 2 says"),
        ("UPDATE assignment SET actor = 'key:eve'", "is another than row 2 says"),
        ("UPDATE assignment SET digest = 'sha256:0'", "is another than row 2 says"),
        ("DELETE FROM assignment", "the assignment of row 2 is not in the serving log"),
        (
            "INSERT INTO assignment (id, hospital, model, sequence, version, digest, actor, reason, at) "
            "SELECT 77, hospital, model, 2, 3, digest, actor, reason, at FROM assignment",
            "entry 2 of the serving log of north for brain has no row",
        ),
    ],
)
def test_serving_log_that_differs_from_the_trail_is_found(
    database: Database, statement: str, message: str
) -> None:
    assign(database)
    behind_its_back(database, statement)
    with pytest.raises(AuditBroken, match=message):
        verified(database)


@pytest.fixture
def aged(database: Database) -> Callable[[int], datetime]:
    """`aged(n)`: n rows, then the instant after which the others are written."""

    def make(count: int) -> datetime:
        write(database, count)
        return datetime.now(UTC)

    return make


def test_removed_rows_leave_a_checkpoint_from_which_the_chain_goes_on(
    database: Database, aged: Callable[[int], datetime]
) -> None:
    assign(database)
    before = aged(3)
    write(database, 2)
    found = trail.remove_before(database, before)
    # The first row, the assignment and three; then two, and the row on the removal.
    assert found is not None
    assert (found.removed, found.rows, found.head.number) == (5, 3, 8)
    assert verified(database, found.head) == found
    second = aged(2)
    write(database)
    again = trail.remove_before(database, second)
    assert again is not None
    assert again.removed == 10
    assert trail.remove_before(database, before) is None
    write(database)
    verified(database)


def test_whole_trail_is_never_removed(database: Database) -> None:
    write(database, 3)
    found = trail.remove_before(database, datetime.now(UTC) + timedelta(days=1))
    assert found is not None
    assert (found.removed, found.rows) == (3, 2)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE audit_checkpoint SET upto = 2", "the checkpoint at row 2 was changed"),
        ("UPDATE audit_checkpoint SET actor = 'x'", "the checkpoint at row 3 was changed"),
        ("DELETE FROM audit_checkpoint", "row 1 is missing"),
        ("DELETE FROM audit WHERE id = 4", "row 4 is missing"),
    ],
)
def test_changed_checkpoint_is_found(database: Database, statement: str, message: str) -> None:
    write(database, 3)
    trail.remove_before(database, datetime.now(UTC) + timedelta(days=1))
    behind_its_back(database, statement)
    with pytest.raises(AuditBroken, match=message):
        verified(database)


def forged_removal(database: Database, upto: int) -> None:
    """Change a row, compute every digest after it again, and hide that beneath a checkpoint."""
    chain: list[dict[str, Any]] = []
    with database.snapshot() as session:
        for row in trail.rows(session):
            forged = {**row, "previous": chain[-1]["digest"] if chain else FIRST_PREVIOUS}
            forged["actor"] = "key:eve" if row["id"] == 2 else row["actor"]
            del forged["digest"]
            chain.append({**forged, "digest": digest_of(forged)})
    updates = [
        f"UPDATE audit SET actor = '{row['actor']}', previous = '{row['previous']}', "
        f"digest = '{row['digest']}' WHERE id = {row['id']}"
        for row in chain
    ]
    behind_its_back(database, *updates)
    assert trail.remove_before(database, chain[upto]["at"]) is not None


def test_noted_head_of_the_row_at_a_checkpoint_shows_a_forged_one(database: Database) -> None:
    write(database, 6)
    with database.snapshot() as session:
        noted = {row["id"]: trail.Head(row["id"], row["digest"]) for row in trail.rows(session)}
    forged_removal(database, upto=4)
    verified(database)
    with pytest.raises(AuditBroken, match="the checkpoint at row 4 has another digest than was noted"):
        verified(database, noted[4])
    with pytest.raises(AuditBroken, match="row 6 has another digest than was noted"):
        verified(database, noted[6])
    # Nothing of the trail is left to compare these with.
    for number in (1, 3):
        with pytest.raises(AuditNotComparable, match=f"row {number} was removed"):
            verified(database, noted[number])


def test_heads_of_every_removal_are_compared_later(
    database: Database, aged: Callable[[int], datetime]
) -> None:
    noted = []
    for _ in range(3):
        before = aged(2)
        write(database)
        found = trail.remove_before(database, before)
        assert found is not None
        noted.append(found.start)
    for head in noted:
        assert verified(database, head).head.number > head.number
        with pytest.raises(AuditBroken, match="another digest than was noted"):
            verified(database, trail.Head(head.number, "a" * 64))


def statements_against_guards(database: Database) -> list[tuple[str, str]]:
    """What removes a guard, and the guard's name."""
    if database.is_sqlite:
        weaker = "CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit WHEN 0 BEGIN SELECT 1; END"
        return [
            ("DROP TRIGGER assignment_no_replace", "assignment_no_replace"),
            (f"DROP TRIGGER audit_no_update; {weaker}", "audit_no_update"),
            ("DROP TRIGGER audit_checkpoint_no_delete", "audit_checkpoint_no_delete"),
        ]
    weaker = "CREATE OR REPLACE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS"
    return [
        ("ALTER TABLE assignment DISABLE TRIGGER ALL", "assignment_append_only"),
        (f"{weaker} $$ BEGIN RETURN NULL; END $$", "audit_append_only"),
        ("DROP TRIGGER audit_no_delete ON audit", "audit_no_delete"),
    ]


@pytest.mark.parametrize("which", range(3))
def test_guard_that_is_gone_is_reported(database: Database, which: int) -> None:
    write(database)
    statements, name = statements_against_guards(database)[which]
    with database.engine.begin() as connection:
        for statement in re.split(r"; (?=CREATE)", statements):
            connection.execute(text(statement))
    with pytest.raises(AuditBroken, match=rf"the triggers {name}, which keep them"):
        verified(database)
    with pytest.raises(AuditBroken, match=name):
        trail.remove_before(database, datetime.now(UTC) + timedelta(days=1))


def test_every_trigger_of_a_new_database_is_one_that_verification_knows(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")
    upgrade(database)
    with database.engine.begin() as connection:
        query = text("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        names = sorted(connection.execute(query).scalars())
        for name in names:
            connection.execute(text(f"DROP TRIGGER {name}"))
    with database.snapshot() as session:
        assert missing_guards(session) == names
    database.dispose()


def test_broken_trail_is_not_shortened(database: Database) -> None:
    write(database, 3)
    behind_its_back(database, "UPDATE audit SET actor = 'x' WHERE id = 2")
    with pytest.raises(AuditBroken):
        trail.remove_before(database, datetime.now(UTC) + timedelta(days=1))
    assert len(exported(database)) == 4


def paused(monkeypatch: pytest.MonkeyPatch, during: Callable[[], object]) -> None:
    """Let this happen once in another thread, and end, while the next removal verifies the trail."""
    verify = trail.verify

    def pauses(*given: Any) -> trail.Verified:
        monkeypatch.setattr(trail, "verify", verify)
        found = verify(*given)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(during).result(timeout=20)
        return found

    monkeypatch.setattr(trail, "verify", pauses)


def test_row_is_appended_while_a_removal_verifies_the_trail(
    database: Database, aged: Callable[[int], datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = aged(3)
    write(database)
    paused(monkeypatch, lambda: write(database, 2))
    found = trail.remove_before(database, before)
    # The first row and three; then one, the two that were appended meanwhile, and the row on the removal.
    assert found is not None
    assert (found.removed, found.rows, found.head.number) == (4, 4, 8)
    assert verified(database) == found


def test_row_that_is_changed_while_a_removal_verifies_the_trail_is_found(
    database: Database, aged: Callable[[int], datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = aged(3)
    write(database)

    def tamper() -> None:
        write(database, 2)
        behind_its_back(database, "UPDATE audit SET actor = 'key:eve' WHERE id = 6")

    paused(monkeypatch, tamper)
    with pytest.raises(AuditBroken, match=r"row 6 .* was changed"):
        trail.remove_before(database, before)
    assert len(exported(database)) == 7


def test_removal_after_a_concurrent_one_starts_over(
    database: Database, aged: Callable[[int], datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = aged(2)
    second = aged(2)
    write(database)
    paused(monkeypatch, lambda: trail.remove_before(database, first))
    found = trail.remove_before(database, second)
    assert found is not None
    assert found.removed == 5
    assert verified(database) == found


def test_dicom_message_has_who_what_and_when(database: Database) -> None:
    assign(database)
    write(database, outcome=403, version=DIGEST)
    with database.snapshot() as session:
        messages = [Xml.fromstring(audit_message(row)) for row in trail.rows(session)]
    event, actor = messages[2].find("EventIdentification"), messages[2].find("ActiveParticipant")
    assert event is not None
    assert actor is not None
    assert (event.get("EventOutcomeIndicator"), actor.get("UserID")) == ("4", "key:ada")
    assert event.find("EventID[@codeSystemName='DCM']") is not None
    assert event.find("EventTypeCode[@csd-code='scan.segmented']") is not None
    named = [one.get("ParticipantObjectID") for one in messages[2].findall("ParticipantObjectIdentification")]
    assert named == ["north", SCAN, DIGEST, "3"]
    details = {
        one.get("type"): b64decode(one.get("value") or "").decode()
        for one in messages[1].iter("ParticipantObjectDetail")
    }
    assert details["reason"] == "looked at it"


def actions() -> set[str]:
    """Every action that the service writes: over HTTP, and by a call with its name."""
    declared = [found for route in every_route() if (found := Audited.of(route.endpoint)) is not None]
    written = {name for found in declared for name in (found.action, found.refusal)}
    written |= {*trail.ASSIGNED.values()}
    call = re.compile(r'\b(?:append|_?note|_audit)\(\s*(?:session|attempt),\s*"([a-z]+\.[a-z-]+)"')
    for path in Path(service.__file__).parent.rglob("*.py"):
        written |= {*call.findall(path.read_text())}
    assert written >= {"session.begun", "report.stored", "version.adapted", "trail.removed"}
    return written


def test_every_action_has_a_dicom_message(database: Database) -> None:
    with database.for_caller(ADA).write() as session:
        for action in sorted(actions()):
            trail.append(session, action)
    with database.snapshot() as session:
        messages = [Xml.fromstring(audit_message(row)) for row in trail.rows(session)]
    events = {
        one.find(".//EventTypeCode").get("csd-code"): one.find(".//EventID").get("csd-code")  # type: ignore[union-attr]
        for one in messages
    }
    assert {*events} >= actions()
    assert (events["session.begun"], events["report.stored"]) == ("110114", "110104")


def test_dicom_message_of_any_text_is_one_well_formed_line(database: Database) -> None:
    strange = "a\x01\x1b\n\t\x7f\uffff<&\U0001f600"
    write(database, hospital=strange)
    with database.snapshot() as session:
        message = audit_message(list(trail.rows(session))[-1])
    assert "\n" not in message
    found = Xml.fromstring(message).find("ParticipantObjectIdentification")
    assert found is not None
    assert found.get("ParticipantObjectID") == "a\ufffd\ufffd\n\t\x7f\ufffd<&\U0001f600"


def test_appending_to_a_long_trail_reads_no_more_than_to_a_short_one(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'long.db'}")
    upgrade(database)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def cost() -> int:
        nonlocal steps
        with database.write() as session:
            connection = session.connection().connection.driver_connection
            steps = 0
            connection.set_progress_handler(step, 1)  # type: ignore[union-attr]
            trail.append(session, "scan.segmented")
            connection.set_progress_handler(None, 0)  # type: ignore[union-attr]
        return steps

    few = cost()
    with database.write() as session:
        for _ in range(500):
            trail.append(session, "scan.segmented")
    assert cost() < 1.5 * few
    database.dispose()
