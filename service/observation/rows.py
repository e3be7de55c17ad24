"""Store observations, read them in pages, and delete them when they expire.

They are written in the transaction of the answer's audit row, or of the end of its job: without a row there
is no answer, and no answer has two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Table, delete, insert, select
from sqlalchemy.orm import Session

from service.database import LookedAt, Observation, ObservedLabel, Secret, in_turn
from service.observation.observed import Observed

Way = Literal["http", "viewer", "pacs", "job"]
"""How an answer left: by a request, to a viewer, to a PACS, or as the result of a job."""

_ROWS, _LABELS = cast(Table, Observation.__table__), cast(Table, ObservedLabel.__table__)
_LOOKED = cast(Table, LookedAt.__table__)
_WITH_LOOKS = select(_ROWS, _LOOKED.c.at.label("looked_at"), _LOOKED.c.actor.label("looked_by")).outerjoin(
    _LOOKED, _LOOKED.c.observation == _ROWS.c.id
)
_INSERT, _INSERT_LABELS = insert(_ROWS), insert(_LABELS)
_SECRET = select(Secret.value).where(Secret.name == "observation")
_LOCK = "the observations"
# The longest name of a label.
_LABEL = 200
_secrets: WeakKeyDictionary[Engine, bytes] = WeakKeyDictionary()
# Rows that one transaction deletes: others write in between.
_AT_ONCE = 5000
_PAGE = 1000


@dataclass(frozen=True)
class Answer:
    """An answer that left: what was observed, for which hospital, to whom, how, and when (None: now)."""

    observed: Observed
    hospital: str | None
    actor: str
    request: str
    way: Way
    at: datetime | None = None


@dataclass(frozen=True)
class Stored:
    """A stored row and those of its labels, by label.

    A row that a caller asked for has `looked_at` and `looked_by`, too.
    """

    row: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def append(session: Session, answers: Sequence[Answer]) -> None:
    """Append the rows of answers. They are there when the transaction commits.

    Writers take turns from here to the end of their transactions. Where an audit row is appended, too, it
    comes first.
    """
    if not answers:
        return
    # So that numbers are in the order of the commits, and who reads those after the last misses none.
    in_turn(session, _LOCK)
    connection = session.connection()
    secret = _secret_of(connection)
    for answer in answers:
        observed = answer.observed
        row = {
            "at": answer.at or datetime.now(UTC),
            "hospital": answer.hospital,
            "model": observed.model,
            "version": observed.version,
            "graph": observed.graph,
            "request": answer.request,
            "way": answer.way,
            "actor": answer.actor,
            "series": None if observed.series is None else keyed(secret, observed.series),
            "scan": keyed(secret, observed.scan),
            "scanner": observed.scanner,
            "acquisition": None if observed.acquisition is None else dict(observed.acquisition),
            "shift": observed.shift,
            "shift_at": observed.shift_at,
            "size": list(observed.size),
            "spacing": None if observed.spacing is None else list(observed.spacing),
            "unlike": observed.unlike,
            "seconds": observed.seconds,
            "warnings": list(observed.warnings),
            "precision": observed.precision,
            "provider": observed.provider,
            "locum": observed.locum,
            "usual": observed.usual,
            "mask": None if observed.mask is None else keyed(secret, observed.mask),
            "choice": None if observed.choice is None else dict(observed.choice),
        }
        (number,) = connection.execute(_INSERT, row).inserted_primary_key or (None,)
        # A model file names them, at any length; none may cost the answer its row.
        by_name = {each.label[:_LABEL]: each for each in observed.labels}
        labels = [
            {
                "observation": number,
                "label": name,
                "confidence": each.confidence,
                "voxels": each.voxels,
                "volume_ml": each.volume_ml,
                "parts": each.parts,
                "at_border": each.at_border,
            }
            for name, each in by_name.items()
        ]
        if labels:
            connection.execute(_INSERT_LABELS, labels)


def _secret_of(connection: Connection) -> bytes:
    """The installation's secret, which never changes: a look-up costs a third of a row."""
    if (found := _secrets.get(connection.engine)) is None:
        found = _secrets[connection.engine] = connection.execute(_SECRET).scalar_one()
    return found


def keyed(secret: bytes, of: str) -> str:
    """The keyed digest, 64 hex digits, under which a series or a scan is found again.

    BLAKE2b (RFC 7693), which takes its key without HMAC's second pass: a twentieth of its time.
    """
    return hashlib.blake2b(of.encode(), key=secret, digest_size=32).hexdigest()


def keyed_with(session: Session) -> Callable[[str], str]:
    """`keyed` with the installation's secret."""
    secret = _secret_of(session.connection())
    return lambda of: keyed(secret, of)


def keyed_all(session: Session, digests: Collection[str]) -> dict[str, str]:
    """The keyed digests of scans, each with the digest that it is of."""
    secret = _secret_of(session.connection())
    return {keyed(secret, digest): digest for digest in digests}


def page(
    session: Session,
    hospital: str,
    model: str | None = None,
    *,
    before: int | None = None,
    limit: int = 100,
) -> list[Stored]:
    """The newest observations of a hospital, newest first, older than number `before`.

    The caller's right to see the hospital is the route's to check.
    """
    query = _WITH_LOOKS.where(_ROWS.c.hospital == hospital)
    if model is not None:
        query = query.where(_ROWS.c.model == model)
    if before is not None:
        query = query.where(_ROWS.c.id < before)
    found = session.execute(query.order_by(_ROWS.c.id.desc()).limit(limit)).all()
    return _with_labels(session, [dict(each._mapping) for each in found])


def of_numbers(session: Session, hospital: str, numbers: Sequence[int]) -> list[Stored]:
    """Observations of a hospital by their numbers, in this order; those that are not there are left out."""
    query = _WITH_LOOKS.where(_ROWS.c.hospital == hospital, _ROWS.c.id.in_(numbers))
    rows = {each.id: dict(each._mapping) for each in session.execute(query)}
    return _with_labels(session, [rows[number] for number in numbers if number in rows])


def look_at(session: Session, hospital: str, number: int, actor: str) -> Stored | None:
    """Note that `actor` looked at the mask of an answer, unless somebody did before.

    None without such an answer.
    """
    in_turn(session, _LOCK)
    found = of_numbers(session, hospital, [number])
    if not found or found[0].row["looked_at"] is not None:
        return found[0] if found else None
    session.execute(insert(_LOOKED), {"observation": number, "actor": actor, "at": datetime.now(UTC)})
    return of_numbers(session, hospital, [number])[0]


def newer(session: Session, than: int, limit: int) -> list[Stored]:
    """Observations of all hospitals after number `than`, oldest first. For the service itself."""
    found = session.execute(select(_ROWS).where(_ROWS.c.id > than).order_by(_ROWS.c.id).limit(limit)).all()
    return _with_labels(session, [dict(each._mapping) for each in found])


def _with_labels(session: Session, rows: Sequence[Mapping[str, Any]]) -> list[Stored]:
    numbers = [row["id"] for row in rows]
    labels: dict[int, dict[str, Mapping[str, Any]]] = {number: {} for number in numbers}
    # SQLite takes some thousands of values in a statement.
    for start in range(0, len(numbers), _PAGE):
        some = numbers[start : start + _PAGE]
        for each in session.execute(select(_LABELS).where(_LABELS.c.observation.in_(some))):
            labels[each.observation][each.label] = dict(each._mapping)
    return [Stored(row, labels[row["id"]]) for row in rows]


def delete_before(session: Session, instant: datetime) -> int:
    """Delete the oldest observations from before an instant, some at once. Returns how many went."""
    return _delete(session, select(_ROWS.c.id).where(_ROWS.c.at < instant))


def delete_of(session: Session, hospital: str) -> int:
    """Delete observations of a hospital, some at once. Returns how many went."""
    return _delete(session, select(_ROWS.c.id).where(_ROWS.c.hospital == hospital))


def _delete(session: Session, query: Any) -> int:
    numbers = list(session.scalars(query.order_by(_ROWS.c.id).limit(_AT_ONCE)))
    if numbers:
        of = ((_LOOKED, _LOOKED.c.observation), (_LABELS, _LABELS.c.observation), (_ROWS, _ROWS.c.id))
        for table, column in of:
            session.execute(delete(table).where(column.in_(numbers)))
    return len(numbers)
