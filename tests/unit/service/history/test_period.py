"""A period's sums, on SQLite and on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

from model_store.store import Store
from service.database import Database, LookedAt, Observation
from service.history import Sought, answers, report
from service.observation.rows import keyed_with


def observed(day: int, scan: str, *, series: str | None = None, **more: object) -> Observation:
    return Observation(
        at=datetime(2026, 11, day, 23, 59, 59, tzinfo=UTC),
        model="organ",
        version="sha256:" + "1" * 64,
        graph="sha256:" + "2" * 64,
        request=f"r-{day}-{scan[:4]}",
        way="http",
        actor="anonymous",
        scan=scan,
        series=series,
        size=[32, 32],
        seconds=0.1,
        warnings=[],
        precision="float32",
        provider="CPU",
        locum="0.2.0",
        usual=True,
        **{"hospital": "north", "unlike": 0, **more},
    )


def test_arrivals_of_the_days_are_counted_by_scanner(database: Database, tmp_path: Path) -> None:
    with database.write() as session:
        keyed = keyed_with(session)
        first = observed(1, keyed("a"), series=keyed("1.2"), scanner="CT 1", shift=1.0, unlike=2)
        session.add_all(
            [
                first,
                observed(30, keyed("a"), series=keyed("1.2"), scanner="CT 1", shift=2.0),
                observed(30, keyed("b"), series=keyed("1.3")),
                observed(30, keyed("c"), hospital="south"),
            ]
        )
        session.flush()
        session.add(LookedAt(observation=first.id, actor="ada", at=datetime.now(UTC)))
    store = Store(tmp_path / "store")
    with database.read() as session:
        whole = report(session, store, "north", date(2026, 11, 1), date(2026, 11, 30))
        part = report(session, store, "north", date(2026, 11, 2), date(2026, 11, 29))
        of_series = answers(session, store, "north", Sought(series="1.2", day=date(2026, 11, 30)))
    found = {each.scanner: each for each in whole.arrivals}
    ct = found["CT 1"]
    assert (ct.answers, ct.series, ct.scans, ct.shift, ct.unlike, ct.looked_at) == (2, 1, 1, 1.5, 1, 1)
    assert (found[None].answers, found[None].shift) == (1, None)
    assert [each.answers for each in whole.software] == [3]
    assert (part.arrivals, part.software) == ([], [])
    assert [each.at.day for each in of_series] == [30]
