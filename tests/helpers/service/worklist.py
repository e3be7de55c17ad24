"""An origin server of work items that keeps PS3.4's state table, and an API of scripted jobs beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydicom import Dataset
from pydicom.sequence import Sequence as Items

ALLOWED = {("SCHEDULED", "IN PROGRESS"), ("IN PROGRESS", "COMPLETED"), ("IN PROGRESS", "CANCELED")}
"""Changes of state that a performer may ask for (PS3.4 table CC.1.1-2)."""

Script = Callable[[str, str, Any], tuple[int, Any]]


def workitem(uid: str, inputs: list[tuple[str, str]], code: str = "LIVER", **values: Any) -> Dataset:
    made, named = Dataset(), Dataset()
    named.CodeValue, named.CodingSchemeDesignator, named.CodeMeaning = code, "99NORTH", code
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.34.6.1", uid
    made.ProcedureStepState, made.InputReadinessState = "SCHEDULED", "READY"
    made.ScheduledProcedureStepPriority = "MEDIUM"
    made.ScheduledWorkitemCodeSequence = Items([named])
    made.PatientName, made.PatientID = "Planted^Patient", "PLANTED-ID"
    found = []
    for study, series in inputs:
        one = Dataset()
        one.TypeOfInstances, one.StudyInstanceUID, one.SeriesInstanceUID = "DICOM", study, series
        found.append(one)
    made.InputInformationSequence = Items(found)
    for keyword, value in values.items():
        setattr(made, keyword, value)
    return made


@dataclass
class Origin:
    """`items` by UID, `owners` the Transaction UIDs. `api` answers what is no work item."""

    port: int
    items: dict[str, Dataset] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    api: Script = lambda method, path, body: (404, {})
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    down: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, item: Dataset) -> None:
        self.items[item.SOPInstanceUID] = item

    def state(self, uid: str) -> str:
        return str(self.items[uid].ProcedureStepState)

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(target)
        _, what, *rest = parts.path.split("/")
        if what != "workitems":
            return self.api(method, parts.path, body)
        if self.down:
            return 503, None
        if not rest:
            return self._search(parse_qs(parts.query))
        uid = rest[0]
        if uid not in self.items:
            return 404, None
        if method == "GET":
            return 200, [self._shown(self.items[uid])]
        asked = Dataset.from_json(body[0])
        if rest[1:] == ["state"]:
            return self._change(uid, str(asked.TransactionUID), str(asked.ProcedureStepState))
        if self.state(uid) != "IN PROGRESS" or self.owners.get(uid) != parts.query:
            return 409, None
        self.items[uid].update(asked)
        return 200, None

    def _search(self, query: dict[str, list[str]]) -> tuple[int, Any]:
        wanted, first = query.get("ProcedureStepState", [""])[0], int(query["offset"][0])
        found = [each for each in self.items.values() if each.ProcedureStepState == wanted]
        shown = [self._shown(each) for each in found[first : first + int(query["limit"][0])]]
        return (200, shown) if shown else (204, None)

    def _shown(self, item: Dataset) -> Any:
        # The Transaction UID is never shown (PS3.4 CC.2.7.3).
        return item.to_json_dict()

    def _change(self, uid: str, transaction: str, state: str) -> tuple[int, Any]:
        item = self.items[uid]
        if (item.ProcedureStepState, state) not in ALLOWED:
            return 409, None
        if state == "IN PROGRESS":
            self.owners[uid] = transaction
        elif self.owners.get(uid) != transaction or not _is_final(item, state):
            return 409, None
        item.ProcedureStepState = state
        return 200, None


def _is_final(item: Dataset, state: str) -> bool:
    """The requirements on a final state (PS3.4 table CC.2.5-3)."""
    (step,) = item.get("UnifiedProcedureStepPerformedProcedureSequence") or [Dataset()]
    named = all(
        step.get(keyword)
        for keyword in (
            "PerformedStationNameCodeSequence",
            "PerformedProcedureStepStartDateTime",
            "PerformedProcedureStepEndDateTime",
            "PerformedWorkitemCodeSequence",
        )
    )
    if state == "COMPLETED":
        return named and "OutputInformationSequence" in step
    (progress,) = item.get("ProcedureStepProgressInformationSequence") or [Dataset()]
    return bool(progress.get("ProcedureStepCancellationDateTime"))


@contextmanager
def running_origin() -> Iterator[Origin]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(size)
            body = json.loads(content) if content else None
            with lock:
                origin.seen.append((self.command, self.path, body))
                status, said = origin.answer(self.command, self.path, body)
            sent = b"" if said is None else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_PUT = do_POST = do_DELETE = _any

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origin = Origin(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield origin
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
