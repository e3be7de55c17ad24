"""What authentication and the audit trail cost, and how long a trail of 100,000 rows takes to verify.

Three server processes answer the same image in turn: without authentication, by API key, and by an access
token of an issuer on loopback. The latter two count requests against a limit, in an embedded Redis. A row of
the trail is timed as the transaction that appends it beside one that inserts into a table of its own: both
wait for the disk.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from joserfc import jwt
from joserfc.jwk import RSAKey
from sqlalchemy import text

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import WARM_UP, form, post, publish, scan_bytes, server, wake
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.measuring import alternated, milliseconds, quartiles
from benchmarks.harness.tables import table
from model_store.scan import decode
from service.audit import trail
from service.database import Database, upgrade
from service.identity import keys

AUDIENCE = "locum"


@dataclass(frozen=True)
class Profile:
    """Requests to each server, rows appended, and rows verified."""

    requests: int = 300
    rows: int = 500
    verified: int = 100_000
    width: int = 4


PROFILES = {"smoke": Profile(3, 3, 100, 2), "cpu": Profile()}


class SecurityCost(CostExperiment[Profile]):
    """The cost of knowing the caller and of keeping the trail."""

    name = "security_cost"
    title = "What authentication and the audit trail cost"
    question = "What do authentication and a row of the audit trail cost a request?"
    profiles = PROFILES
    by = "measured"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "requests": Kind(_requests, _requests_section),
            "row": Kind(_on_database(_row), _row_section),
            "verification": Kind(_on_database(_verification), _verification_section),
        }

    def measured(self) -> Sequence[Cell]:
        """The requests, a row, and the verification of many."""
        profile = self.profile
        return [
            {"measured": "requests", "number": profile.requests, "width": profile.width},
            {"measured": "row", "number": profile.rows},
            {"measured": "verification", "number": profile.verified},
        ]


def _requests(cell: Cell, work: Path) -> dict[str, Any]:
    data = scan_bytes("png")
    with ExitStack() as stack:
        issuer, token = stack.enter_context(_issuer(work / "issuer"))
        asking: dict[str, Callable[[], object]] = {}
        for auth in ("none", "keys", "oidc"):
            folder = work / auth
            folder.mkdir(exist_ok=True)
            if not (folder / "store").exists():
                publish(folder / "store", cell["width"], decode(data))
            credential = {"none": "", "keys": _key(folder), "oidc": token}[auth]
            settings = {"LOCUM_AUTH": auth, "LOCUM_REDIS_URL": "", "LOCUM_RATE_LIMIT": "1000000/minute"}
            if auth == "oidc":
                settings |= {"LOCUM_OIDC_ISSUER": issuer, "LOCUM_OIDC_AUDIENCE": AUDIENCE}
            connection = stack.enter_context(server(folder, 1, settings)).connection
            headers = {"Authorization": f"Bearer {credential}"} if credential else {}
            wake(connection)
            asking[auth] = partial(post, connection, form(data), headers)
        seconds = alternated(asking, cell["number"], WARM_UP)
    more = {
        name: round(median(a - b for a, b in zip(seconds[name], seconds["none"], strict=True)), 6)
        for name in ("keys", "oidc")
    }
    return {**{name: quartiles(values) for name, values in seconds.items()}, "more": more}


def _key(folder: Path) -> str:
    database = Database(f"sqlite:///{folder / 'state' / 'locum.db'}")
    upgrade(database)
    with database.write() as session:
        key = keys.create(session, f"benchmark {time.time_ns()}", "reader", None)[1]
    database.dispose()
    return key


@contextmanager
def _issuer(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve an issuer's description and keys; gives its URL, and a token of a reader."""
    folder.mkdir(exist_ok=True)
    (folder / ".well-known").mkdir(exist_ok=True)
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    url = f"http://127.0.0.1:{listening.server_port}"
    key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
    description = {"issuer": url, "jwks_uri": f"{url}/jwks"}
    (folder / ".well-known" / "openid-configuration").write_text(json.dumps(description))
    (folder / "jwks").write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
    claims: Mapping[str, Any] = {
        "iss": url,
        "aud": AUDIENCE,
        "sub": "ada",
        "iat": int(time.time()),
        "exp": int(time.time()) + 24 * 3600,
        "locum_roles": ["reader"],
        "locum_hospitals": ["*"],
    }
    token = jwt.encode({"alg": "RS256", "kid": "one", "typ": "at+jwt"}, dict(claims), key)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield url, token
    finally:
        listening.shutdown()
        listening.server_close()


def _on_database(
    measure: Callable[[Database, int], dict[str, Any]],
) -> Callable[[Cell, Path], dict[str, Any]]:
    """The measurement on a new database."""

    def measured(cell: Cell, work: Path) -> dict[str, Any]:
        database = Database(f"sqlite:///{work / 'trail.db'}")
        upgrade(database)
        try:
            return measure(database, cell["number"])
        finally:
            database.dispose()

    return measured


def _row(database: Database, number: int) -> dict[str, Any]:
    with database.write() as session:
        session.execute(text("CREATE TABLE IF NOT EXISTS other (content TEXT)"))

    def append() -> None:
        with database.write() as session:
            trail.append(session, "scan.segmented", scan="sha256:" + "0" * 64, details={"artefact": "cost@1"})

    def insert() -> None:
        with database.write() as session:
            session.execute(text("INSERT INTO other VALUES (:content)"), {"content": "0" * 300})

    seconds = alternated({"a row of the trail": append, "another insert": insert}, number, WARM_UP)
    return {name: quartiles(values) for name, values in seconds.items()}


def _verification(database: Database, number: int) -> dict[str, Any]:
    written = 0
    while written < number:
        # A longer transaction costs more per row.
        with database.write() as session:
            written = trail.head(session).number
            for _ in range(min(500, number - written)):
                trail.append(session, "scan.segmented", scan="sha256:" + "0" * 64)
            written = trail.head(session).number
    with database.snapshot() as session:
        began = time.perf_counter()
        verified = trail.verify(session)
        seconds = time.perf_counter() - began
    if verified.rows != number:
        raise RuntimeError(f"expected {number} rows, found {verified.rows}")
    return {"seconds": round(seconds, 3)}


def _requests_section(rows: Sequence[Row]) -> list[str]:
    result = rows[0]["result"]
    lines = [
        [name, milliseconds(result[name], 2), f"{1e3 * result['more'].get(name, 0):+.2f}"]
        for name in ("none", "keys", "oidc")
    ]
    return [
        "## A request",
        "Median with quartiles over requests that take turns; *more* is the median of the differences within "
        "a turn.",
        table(("LOCUM_AUTH", "milliseconds of POST /segment", "more than none"), lines),
        "Asked for: at most 1 ms more.",
    ]


def _row_section(rows: Sequence[Row]) -> list[str]:
    result = rows[0]["result"]
    ours, other = "a row of the trail", "another insert"
    more = 1e3 * (result[ours]["median"] - result[other]["median"])
    lines = [[name, milliseconds(result[name], 2)] for name in (ours, other)]
    return [
        "## A row",
        table(("transaction", "milliseconds"), lines),
        f"The row's own part: {more:.2f} ms. Asked for: at most 2 ms.",
    ]


def _verification_section(rows: Sequence[Row]) -> list[str]:
    number, seconds = rows[0]["cell"]["number"], rows[0]["result"]["seconds"]
    return [
        "## Verification",
        f"{number:,} rows in {seconds:.1f} s ({number / seconds:,.0f} rows per second).",
    ]
