"""What a store and a database of ten thousand hospitals cost each request, over those of ten.

Every hospital has an adapted version of its own under its own name, with one before it. Figures are processor
time: of this process for calls of the store, of the server's process for requests over HTTP. The two sizes
alternate, call by call or batch by batch.

Versions are written as the store writes them, without waiting for the disk; they share their files.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from sqlalchemy import insert

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import publish, scan_bytes, server
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.measuring import processor_seconds
from benchmarks.harness.nodes import nodes
from benchmarks.harness.tables import table
from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact
from model_store.digest import sha256
from model_store.manifest import Lineage, ModelManifest
from model_store.scan import decode
from model_store.store import Store
from service.catalog.network import resolve_network
from service.database import Assignment, Cohort, CohortScan, Database, Hospital, Job, upgrade

_EACH = 2
_MODEL = "cost"
_COHORT = "0" * 32


@dataclass(frozen=True)
class Profile:
    """Hospitals of the large side and of the small one; calls of each step; versions of the one deep name;
    jobs, and scans of a cohort; starts of each side.
    """

    hospitals: int = 10_000
    few: int = 10
    calls: int = 400
    requests: int = 30
    deep: int = 20_000
    jobs: int = 10_000
    scans: int = 5_000
    starts: int = 5


PROFILES = {"smoke": Profile(12, 3, 3, 2, 15, 20, 20, 1), "cpu": Profile()}


class Scale(CostExperiment[Profile]):
    """The cost of size."""

    name = "scale"
    title = "What ten thousand hospitals cost a request"
    question = "What do a request and a publication cost at 10,000 hospitals over 10 of them?"
    profiles = PROFILES
    by = "measured"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "calls": Kind(_calls, _calls_section),
            "first": Kind(_first, _first_section),
            "start": Kind(_start, _start_section),
            "pages": Kind(_pages, _pages_section),
        }

    def measured(self) -> Sequence[Cell]:
        """Calls of the store by shape; what a new process does first; pages by database."""
        profile = self.profile
        wide = {"hospitals": profile.hospitals, "few": profile.few, "deep": 0}
        deep = {"hospitals": profile.few, "few": profile.few, "deep": profile.deep}
        rows = {"jobs": profile.jobs, "scans": profile.scans}
        requests = {"requests": profile.requests}
        return [
            {"measured": "calls", **wide, "calls": profile.calls},
            {"measured": "calls", **deep, "calls": profile.calls},
            {"measured": "first", **wide},
            {"measured": "first", **deep},
            {"measured": "start", "database": "SQLite", **wide, **rows, "starts": profile.starts},
            {"measured": "start", "database": "PostgreSQL", **wide, **rows, "starts": profile.starts},
            {"measured": "pages", "database": "SQLite", **wide, **rows, **requests},
            {"measured": "pages", "database": "PostgreSQL", **wide, **rows, **requests},
        ]


# ---------------------------------------------------------------------- what is measured


def _calls(cell: Cell, work: Path) -> dict[str, Any]:
    """Milliseconds of each call of the store, few and many hospitals in turn."""
    steps: dict[str, dict[str, Callable[[], object]]] = {}
    with ExitStack() as stack:
        for size in ("few", "many"):
            root = _filled(cell, work, size)
            database = stack.enter_context(_database(cell, work / size, size))
            steps[size] = _store_steps(root, database)
        found = {
            name: _alternated({size: steps[size][name] for size in steps}, cell["calls"])
            for name in steps["few"]
        }
    return {"milliseconds": found}


def _store_steps(root: Path, database: Database) -> dict[str, Callable[[], object]]:
    store = Store(root)
    own = store.open(f"{_MODEL}.at-{_hospital(0)}", verify=False)

    def resolve(**parameters: str) -> object:
        return resolve_network(store.as_of_now(), database, **parameters)  # type: ignore[arg-type]

    return {
        "resolve the adapted version of a hospital": lambda: resolve(model=_MODEL, hospital=_hospital(0)),
        "resolve the newest of a name": lambda: resolve(model=_MODEL),
        "resolve without a name": lambda: resolve(),
        "open a version by its digest": lambda: store.by_digest(own.digest),
        "find its withdrawn ancestors": lambda: store.lineage.flagged(own),
    }


def _first(cell: Cell, work: Path) -> dict[str, Any]:
    """Milliseconds of what is asked first of a store that was just opened, and of publishing."""
    roots = {size: _filled(cell, work, size) for size in ("few", "many")}
    name = _MODEL if cell["deep"] else f"{_MODEL}.at-{_hospital(0)}"
    for root in roots.values():
        Store(root).lineage.records()
    found: dict[str, dict[str, float]] = {}
    for what in (_first_resolution, _first_digest, _first_list, _publication):
        found[what.__doc__ or ""] = {
            size: round(median(what(root, name) for _ in range(9)), 3) for size, root in roots.items()
        }
    return {"milliseconds": found}


def _first_resolution(root: Path, name: str) -> float:
    """open the newest version of a name"""
    return _milliseconds(lambda: Store(root).open(name, verify=False))


def _first_digest(root: Path, name: str) -> float:
    """open a version by its digest"""
    digest = Store(root).open(name, verify=False).digest
    return _milliseconds(lambda: Store(root).by_digest(digest))


def _first_list(root: Path, name: str) -> float:  # noqa: ARG001
    """list every version"""
    return _milliseconds(lambda: Store(root).lineage.records())


def _publication(root: Path, name: str) -> float:
    """publish a version"""
    store = Store(root)
    before = store.open(name, verify=False)
    files = {file: before.read(file) for file in before.manifest.files}
    lineage = before.manifest.lineage.model_copy(update={"run": f"published {time.time_ns()}"})
    manifest = before.manifest.model_copy(update={"lineage": lineage})
    return _milliseconds(lambda: Store(root).publish(manifest, files))


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1e3 * (time.process_time() - began)


def _alternated(steps: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Mean milliseconds of each step: a listing that is made again now and then counts, too."""
    total = dict.fromkeys(steps, 0.0)
    for step in steps.values():
        step()
    for number in range(calls):
        for size, step in [*steps.items()][:: -1 if number % 2 else 1]:
            total[size] += _milliseconds(step)
    return {size: round(spent / calls, 3) for size, spent in total.items()}


def _start(cell: Cell, work: Path) -> dict[str, Any]:
    """Milliseconds of the server's process until it answers, few and many hospitals in turn."""
    found: dict[str, list[float]] = {"few": [], "many": []}
    with ExitStack() as stack:
        settings = {size: _prepared(cell, work, size, stack) for size in found}
        for size in [*found] * cell["starts"]:
            with server(work / size, 1, settings[size]) as process:
                found[size].append(1e3 * processor_seconds([psutil.Process(process.pid)]))
    return {"milliseconds": {"start of the API": {size: round(median(ms), 1) for size, ms in found.items()}}}


def _pages(cell: Cell, work: Path) -> dict[str, Any]:
    """Milliseconds of the server's process for each page, the first and a later one."""
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        running = {
            size: stack.enter_context(server(work / size, 1, _prepared(cell, work, size, stack)))
            for size in ("few", "many")
        }
        for path in _paths(running["few"].connection, running["many"].connection):
            for process in running.values():
                _get(process.connection, path)
            total = dict.fromkeys(running, 0.0)
            for _ in range(3):
                for size, process in running.items():
                    handle = psutil.Process(process.pid)
                    before = processor_seconds([handle])
                    for _ in range(cell["requests"]):
                        _get(process.connection, path)
                    total[size] += processor_seconds([handle]) - before
            found[f"GET {path}"] = {
                size: round(1e3 * spent / (3 * cell["requests"]), 1) for size, spent in total.items()
            }
    return {"milliseconds": found}


def _prepared(cell: Cell, work: Path, size: str, stack: ExitStack) -> dict[str, str]:
    """Fill a store and a database, and return the settings of a server on them."""
    _filled(cell, work, size)
    url = stack.enter_context(_database_url(cell, work / size))
    with _database(cell, work / size, size, url):
        pass
    return {"LOCUM_DATABASE_URL": url}


def _paths(few: http.client.HTTPConnection, many: http.client.HTTPConnection) -> Iterator[str]:
    cohort = f"/hospitals/{_hospital(0)}/cohorts/{_COHORT}/scans"
    yield from ("/models", "/models?adapted=false", f"/models/{_MODEL}.at-{_hospital(0)}", "/lineage")
    yield from ("/lineage?limit=1000", "/hospitals", "/jobs", f"/jobs?hospital={_hospital(0)}")
    yield from (cohort, f"/hospitals/{_hospital(0)}/serving/{_MODEL}")
    # A page in the middle, by a cursor that both have.
    yield f"/models?after={_MODEL}.at-{_hospital(1)}"
    for connection in (few, many):
        assert _get(connection, "/health/live")


def _get(connection: http.client.HTTPConnection, path: str) -> Any:
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status}: {content.decode(errors='replace')}")
    return json.loads(content)


# ---------------------------------------------------------------------- stores and databases


def _hospital(number: int) -> str:
    return f"h{number:05}"


def _filled(cell: Cell, work: Path, size: str) -> Path:
    """A store with the adapted versions of few or many hospitals, or with many versions of the model."""
    root = work / size / "store"
    if root.exists():
        return root
    aside = root.with_name("making")
    publish(aside, 2, decode(scan_bytes("png")))
    base = Store(aside).open(_MODEL)
    for number in range(cell["few" if size == "few" else "hospitals"]):
        name = f"{_MODEL}.at-{_hospital(number)}"
        for version in range(1, _EACH + 1):
            _put(aside, base, name, version, hospital=_hospital(number))
    if cell["deep"]:
        for version in range(2, 1 + (3 if size == "few" else cell["deep"])):
            _put(aside, base, _MODEL, version, hospital=None)
    aside.rename(root)
    return root


def _put(root: Path, base: Artefact, name: str, version: int, hospital: str | None) -> None:
    manifest = base.expect(ModelManifest).manifest
    lineage = Lineage(
        method="none", run=f"{name} {version}", sites=(), rounds=0, seed=0, parents=(base.digest,)
    )
    changed = {"name": name, "lineage": lineage, "hospital": hospital}
    content = manifest.model_copy(
        update=changed if hospital is None else {**changed, "role": "hospital"}
    ).to_bytes()
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    for file in base.manifest.files:
        os.link(base.path / file, folder / file)
    (folder / DIGEST_FILE).write_text(sha256(content), encoding="ascii")
    (folder / MANIFEST).write_bytes(content)


@contextmanager
def _database_url(cell: Cell, folder: Path) -> Iterator[str]:
    if cell["database"] == "SQLite":
        yield f"sqlite:///{folder / 'state' / 'locum.db'}"
        return
    with nodes() as found:
        yield found.database


@contextmanager
def _database(cell: Cell, folder: Path, size: str, url: str | None = None) -> Iterator[Database]:
    """A database with the hospitals, each with its adapted version in force; jobs, and a cohort."""
    (folder / "state").mkdir(exist_ok=True, parents=True)
    database = Database(url or f"sqlite:///{folder / 'state' / 'locum.db'}")
    upgrade(database)
    with database.read() as session:
        is_new = session.get(Hospital, _hospital(0)) is None
    if is_new:
        _fill(database, Store(folder / "store"), cell, cell["few" if size == "few" else "hospitals"])
    try:
        yield database
    finally:
        database.dispose()


def _fill(database: Database, store: Store, cell: Cell, hospitals: int) -> None:
    now = datetime.now(UTC)
    ids = [_hospital(number) for number in range(hospitals)]
    share = hospitals / cell["hospitals"]
    jobs, scans = (max(1, round(share * cell.get(name, 0))) for name in ("jobs", "scans"))
    own = {record.name: record for record in store.lineage.records()}
    cohort = {"id": _COHORT, "hospital": ids[0], "created_at": now, "expires_at": now + timedelta(days=1)}
    with database.write() as session:
        session.execute(
            insert(Hospital),
            [{"id": each, "name": each, "site": None, "created_at": now, "updated_at": now} for each in ids],
        )
        for each in ids:
            record = own[f"{_MODEL}.at-{each}"]
            session.add(
                Assignment(
                    hospital=each,
                    model=_MODEL,
                    sequence=1,
                    version=record.number,
                    digest=record.digest,
                    actor="benchmark",
                    reason="measured",
                    at=now,
                    artefact=record.name,
                )
            )
        session.execute(insert(Cohort), [cohort])
        session.execute(
            insert(CohortScan),
            [
                {
                    "cohort": _COHORT,
                    "name": f"scan-{number:05}.png",
                    "sha256": f"{number:064x}",
                    "size": 1000,
                    "format": "png",
                    "created_at": now,
                }
                for number in range(scans)
            ],
        )
        session.execute(insert(Job), [_job(number, ids[number % hospitals], now) for number in range(jobs)])


def _job(number: int, hospital: str, now: datetime) -> dict[str, Any]:
    at = now - timedelta(minutes=number)
    return {
        "id": f"{number:032x}",
        "kind": "adaptation",
        "hospital": hospital,
        "model": _MODEL,
        "parent": "",
        "options": {},
        "state": "succeeded",
        "progress": {},
        "created_at": at,
        "started_at": at,
        "finished_at": at,
        "expires_at": now + timedelta(days=7),
    }


# ---------------------------------------------------------------------- the page


def _calls_section(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        found += [_heading(row, "Calls of the store"), _table(row, 2)]
    return found


def _first_section(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        found += [
            _heading(row, "The first call of a store that was just opened, as by every job"),
            _table(row, 1),
        ]
    return found


def _start_section(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        cell = row["cell"]
        words = f"Start of the API, {cell['database']}, the median of {cell['starts']}"
        found += [_heading(row, words), _table(row, 1)]
    return found


def _pages_section(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        cell = row["cell"]
        words = f"{cell['jobs']:,} jobs and a cohort of {cell['scans']:,} scans on the large side"
        found += [_heading(row, f"Pages over HTTP, {cell['database']}, {words}"), _table(row, 1)]
    return found


def _heading(row: Row, what: str) -> str:
    cell = row["cell"]
    if cell["deep"]:
        return (
            f"**{what}.** {cell['deep']:,} versions of one name over 3. Milliseconds of processor time, "
            "and how much more the large side takes."
        )
    versions = _EACH * cell["hospitals"]
    return (
        f"**{what}.** {cell['hospitals']:,} hospitals with {versions:,} versions over {cell['few']} with "
        f"{_EACH * cell['few']}. Milliseconds of processor time, and how much more the large side takes."
    )


def _table(row: Row, digits: int) -> str:
    body = [
        [
            what,
            f"{each['few']:.{digits}f}",
            f"{each['many']:.{digits}f}",
            f"{each['many'] - each['few']:+.{digits}f}",
        ]
        for what, each in row["result"]["milliseconds"].items()
    ]
    return table(["", "few", "many", "more"], body)
