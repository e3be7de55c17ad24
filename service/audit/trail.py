"""Append to the audit trail, verify it, and remove its oldest rows beneath a sealed checkpoint.

    row 1 ──digest──> row 2 ──digest──> row 3 ...      digest = SHA-256 of the row's content and of the digest
                                                       before it

A row that is changed, removed or moved breaks the chain at its place. Rows are numbered from 1 without a gap.
Removed rows leave a checkpoint with the digest of the last of them, so that the chain goes on from there.

A person who may write to the database can compute every digest again. `verify` prints the number and digest
of the last row: noted outside the database, they show such a change, and the removal of the newest rows. A
removal prints those of the last row that it removed too, since rows beneath it cannot be compared any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Table, delete, func, insert, select
from sqlalchemy.orm import Session

from service.database import Assignment, AuditCheckpoint, AuditRow, Database, caller_of, in_turn
from service.database.digest_chain import FIRST_PREVIOUS, digest_of
from service.database.migrations.append_only import missing_guards
from service.errors import AuditBroken, AuditNotComparable
from service.tracing import current_request

ASSIGNED = {
    "kept": "version.kept",
    "assigned": "version.assigned",
    "rolled-back": "version.rolled-back",
}
"""Actions of an entry of the serving log; `details` have its id and content."""

_LOCK = "the audit trail"
_PAGE = 1000
_TABLE = cast(Table, AuditRow.__table__)
_INSERT = insert(_TABLE)
_NEWEST = select(_TABLE.c.id, _TABLE.c.digest).order_by(_TABLE.c.id.desc()).limit(1)


@dataclass(frozen=True)
class Head:
    """The last row: its number and its digest. Written `7:3f0c...`."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


@dataclass(frozen=True)
class Verified:
    """What `verify` found in order: rows that are there, the last row removed before them, the last row."""

    rows: int
    start: Head
    head: Head

    @property
    def removed(self) -> int:
        """Rows removed before those that are there."""
        return self.start.number


@dataclass(frozen=True)
class Row:
    """What a row says.

    Attributes:
        action: `thing.happened`.
        actor: who did it.
        hospital: that it concerns.
        version: digest of the artefact version.
        scan: digest of the scan's bytes, `sha256:` and 64 hex digits.
        outcome: status of the HTTP answer, 200 outside HTTP.
        request: id of the request; None outside of one.
        details: JSON, without names of patients or scans.
    """

    action: str
    actor: str
    hospital: str | None = None
    version: str | None = None
    scan: str | None = None
    outcome: int = 200
    request: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def append(
    session: Session,
    action: str,
    *,
    hospital: str | None = None,
    version: str | None = None,
    scan: str | None = None,
    outcome: int = 200,
    actor: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Append a row of this request, and return its number; the arguments are those of `Row`.

    The actor is the session's caller, unless another one is named. Otherwise as `append_all`.
    """
    by = actor or caller_of(session).actor
    row = Row(action, by, hospital, version, scan, outcome, request_of_row(), details or {})
    return append_all(session, [row])


def append_all(session: Session, rows: Sequence[Row]) -> int:
    """Append rows in this order, and return the last one's number.

    They are there when the transaction commits. Writers take turns from here to the end of their
    transactions, so this is the last thing in a transaction that needs a lock.
    """
    in_turn(session, _LOCK)
    # What follows are statements on the table, before which a session flushes nothing by itself.
    session.flush()
    # On the connection: a session's own way to it costs as much as the statements.
    connection = session.connection()
    last = head(session)
    contents = []
    for row in rows:
        content = {
            "id": last.number + 1,
            "at": datetime.now(UTC),
            "actor": row.actor,
            "action": row.action,
            "hospital": row.hospital,
            "version": row.version,
            "scan": row.scan,
            "outcome": row.outcome,
            "request": row.request,
            "details": json.loads(json.dumps(row.details)),
            "previous": last.digest,
        }
        last = Head(last.number + 1, digest_of(content))
        contents.append({**content, "digest": last.digest})
    connection.execute(_INSERT, contents)
    return last.number


def request_of_row() -> str | None:
    """Return the id of the request that is answered, as a row has it; None outside of one."""
    request = current_request.get()
    return None if request == "-" else request


def head(session: Session) -> Head:
    """The last row, or the last that was removed; number 0 in an empty trail."""
    found = session.connection().execute(_NEWEST).first()
    if found is not None:
        return Head(found.id, found.digest)
    checkpoint = _last_checkpoint(session)
    return Head(0, FIRST_PREVIOUS) if checkpoint is None else Head(checkpoint.upto, checkpoint.digest)


def rows(session: Session, since: int = 0) -> Iterator[dict[str, Any]]:
    """The rows from number `since` on, oldest first, as mappings of columns."""
    while page := session.execute(
        select(_TABLE).where(_TABLE.c.id >= since).order_by(_TABLE.c.id).limit(_PAGE)
    ).all():
        yield from (dict(row._mapping) for row in page)
        since = page[-1].id + 1


def verify(session: Session, expected: Head | None = None) -> Verified:
    """Verify the whole chain, the seals of its checkpoints, the serving log against it, and the triggers.

    Args:
        session: of a snapshot, or one that holds the trail's lock.
        expected: a head that an earlier call returned and that was kept outside the database.

    Raises:
        AuditBroken: names the first row, checkpoint or assignment that is wrong, or the triggers that should
            keep them.
        AuditNotComparable: all is in order, but the expected row was removed, and no checkpoint has its
            digest.
    """
    checkpoints = _verified_checkpoints(session)
    checkpoint = checkpoints[-1] if checkpoints else None
    start = Head(0, FIRST_PREVIOUS) if checkpoint is None else Head(checkpoint.upto, checkpoint.digest)
    removed = {each.upto: each.digest for each in checkpoints}
    if expected is not None and removed.get(expected.number, expected.digest) != expected.digest:
        raise AuditBroken(
            f"the checkpoint at row {expected.number} has another digest than was noted: the trail was "
            "rewritten"
        )
    last, count = start, 0
    assigned: dict[int, Mapping[str, Any]] = {}
    sealed: set[str] = set()
    covered = None if checkpoint is None else checkpoint.assignments
    for row in rows(session):
        if row["id"] <= start.number:
            raise AuditBroken(f"row {row['id']} is there, but a checkpoint says that it was removed")
        last, count = _next(last, row), count + 1
        if row["action"] in ASSIGNED.values():
            assigned[row["details"]["assignment"]] = row
        elif row["action"] == "trail.begun":
            covered = row["details"]["assignments"]
        elif row["action"] == "trail.removed":
            sealed.add(row["details"]["seal"])
        if expected is not None and expected.number == last.number and expected != last:
            raise AuditBroken(f"row {last.number} has another digest than was noted: the trail was rewritten")
    if expected is not None and expected.number > last.number:
        raise AuditBroken(f"rows {last.number + 1} to {expected.number} are missing at the end")
    if checkpoint is not None and checkpoint.seal not in sealed:
        raise AuditBroken(f"no row records the checkpoint at row {checkpoint.upto}")
    _compare_assignments(session, assigned, covered or 0)
    if missing := missing_guards(session):
        raise AuditBroken(
            f"the rows are in order, but the triggers {', '.join(missing)}, which keep them from being "
            "changed, are missing or switched off: compare with a head that was noted outside the database, "
            "and restore them from the schema of a new database"
        )
    if expected is not None and expected.number < start.number and expected.number not in removed:
        raise AuditNotComparable(
            f"row {expected.number} was removed, so its noted digest cannot be compared: the trail is in "
            f"order from row {start.number + 1} on; compare with the head of row {start.number}, which the "
            "removal printed"
        )
    return Verified(count, start, last)


def remove_before(database: Database, before: datetime) -> Verified | None:
    """Remove the rows from before an instant, and leave a sealed checkpoint; None where there are none.

    The trail is verified in a snapshot, while others append. Under the trail's lock only the chain of the
    rows is verified that they appended meanwhile.

    Args:
        database: for the caller that removes.
        before: aware.

    Raises:
        AuditBroken: the trail is not in order, so nothing is removed.
    """
    while True:
        with database.snapshot() as session:
            seen = verify(session).head
            checkpoint = _next_checkpoint(session, before, seen)
        if checkpoint is None:
            return None
        with database.write() as session:
            in_turn(session, _LOCK)
            earlier = _last_checkpoint(session)
            if checkpoint["previous"] == (FIRST_PREVIOUS if earlier is None else earlier.seal):
                return _remove(session, checkpoint, seen)
        # Another removal came first.


def _next_checkpoint(session: Session, before: datetime, last: Head) -> dict[str, Any] | None:
    """The columns of a checkpoint that replaces the rows from before an instant; None if there are none."""
    # The last row stays, so that the chain has a beginning.
    upto = session.scalar(select(func.max(AuditRow.id)).where(AuditRow.at < before)) or 0
    upto = min(upto, last.number - 1)
    earlier = _last_checkpoint(session)
    if upto <= (0 if earlier is None else earlier.upto):
        return None
    covered = 0 if earlier is None else earlier.assignments
    going = select(AuditRow.action, AuditRow.details).where(
        AuditRow.id <= upto, AuditRow.action.in_((*ASSIGNED.values(), "trail.begun"))
    )
    for action, details in session.execute(going):
        covered = max(covered, details["assignments" if action == "trail.begun" else "assignment"])
    return {
        "upto": upto,
        "digest": session.execute(select(AuditRow.digest).where(AuditRow.id == upto)).scalar_one(),
        "at": datetime.now(UTC),
        "actor": caller_of(session).actor,
        "assignments": covered,
        "previous": FIRST_PREVIOUS if earlier is None else earlier.seal,
    }


def _remove(session: Session, checkpoint: Mapping[str, Any], seen: Head) -> Verified:
    """Replace rows by this checkpoint, in a trail that was verified up to row `seen`."""
    if session.scalar(select(AuditRow.digest).where(AuditRow.id == seen.number)) != seen.digest:
        raise AuditBroken(f"row {seen.number} was changed since the trail was verified")
    last = seen
    for row in rows(session, seen.number + 1):
        last = _next(last, row)
    upto, seal = checkpoint["upto"], digest_of(checkpoint)
    session.add(AuditCheckpoint(**checkpoint, seal=seal))
    session.flush()
    session.execute(delete(AuditRow).where(AuditRow.id <= upto))
    append(session, "trail.removed", details={"upto": upto, "seal": seal})
    last = head(session)
    return Verified(last.number - upto, Head(upto, checkpoint["digest"]), last)


def _next(last: Head, row: Mapping[str, Any]) -> Head:
    """The head after a row that follows `last`. Raises AuditBroken if it does not, or was changed."""
    if row["id"] != last.number + 1:
        raise AuditBroken(f"row {last.number + 1} is missing: row {row['id']} follows row {last.number}")
    content = {name: value for name, value in row.items() if name != "digest"}
    if row["previous"] != last.digest:
        raise AuditBroken(
            f"row {row['id']} has another digest before it than row {last.number} has: one of them was "
            "changed or moved"
        )
    if digest_of(content) != row["digest"]:
        raise AuditBroken(f"row {row['id']} ({row['action']}, {row['at']}) was changed")
    return Head(row["id"], row["digest"])


def _verified_checkpoints(session: Session) -> list[AuditCheckpoint]:
    """All checkpoints, oldest first, after their seals were verified."""
    before = FIRST_PREVIOUS
    found = list(session.scalars(select(AuditCheckpoint).order_by(AuditCheckpoint.upto)))
    for each in found:
        names = ("upto", "digest", "at", "actor", "assignments", "previous")
        content = {name: getattr(each, name) for name in names}
        if each.previous != before or digest_of(content) != each.seal:
            raise AuditBroken(f"the checkpoint at row {each.upto} was changed")
        before = each.seal
    return found


def _compare_assignments(session: Session, assigned: Mapping[int, Mapping[str, Any]], covered: int) -> None:
    """Every assignment since the trail begins equals its row, and every such row has its assignment."""
    found = {entry.id: entry for entry in session.scalars(select(Assignment))}
    for number, row in assigned.items():
        entry = found.get(number)
        if entry is None:
            raise AuditBroken(f"the assignment of row {row['id']} is not in the serving log any more")
        same = row["details"] == assignment_details(entry)
        if not (same and (row["actor"], row["hospital"]) == (entry.actor, entry.hospital)):
            raise AuditBroken(
                f"entry {entry.sequence} of the serving log of {entry.hospital} for {entry.model} is another "
                f"than row {row['id']} says"
            )
    for entry in found.values():
        if entry.id > covered and entry.id not in assigned:
            raise AuditBroken(
                f"entry {entry.sequence} of the serving log of {entry.hospital} for {entry.model} has no row"
            )


def assignment_details(entry: Assignment) -> dict[str, Any]:
    """The content of an entry of the serving log, as its row has it."""
    details = {
        "assignment": entry.id,
        "model": entry.model,
        "sequence": entry.sequence,
        "artefact": f"{entry.artefact or entry.model}@{entry.version}",
        "digest": entry.digest,
        "reason": entry.reason,
        "restores": entry.restores,
        "previous": entry.previous,
        "override": entry.override,
        "at": entry.at.astimezone(UTC).isoformat(),
    }
    # Rows of entries that were decided, and in float32, have the form that they had before this was recorded.
    if entry.by_default:
        details["by_default"] = True
    if entry.reduced is not None:
        details |= {"precision": entry.precision, "reduced": entry.reduced}
    return details


def _last_checkpoint(session: Session) -> AuditCheckpoint | None:
    return session.scalars(select(AuditCheckpoint).order_by(AuditCheckpoint.upto.desc()).limit(1)).first()
