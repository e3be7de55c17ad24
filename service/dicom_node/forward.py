"""Send complete series to the API, their SEGs or RTSTRUCTs to the destination; retry, and set failures aside.

No answer is kept for a later delivery, since its version may be withdrawn by then: a retry asks the API
again, once the destination answers. Its UIDs are a function of the series, the version, the options and the
API's software and device: a series that is sent again, because the node was killed between two steps, makes
the same instance, of which a PACS keeps one.
"""

from __future__ import annotations

import io
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import httpx
from pydicom import dcmread
from pydicom.uid import (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    RTStructureSetStorage,
    SegmentationStorage,
)
from pynetdicom import AE
from pynetdicom.association import Association

from service.dicom_node.configuration import Destination, NodeConfiguration, Route
from service.dicom_node.spool import Entry, Spool

_log = logging.getLogger("locum.node")

_CONNECT_SECONDS, _ANSWER_SECONDS = 30.0, 1800.0
_LONGEST_PAUSE_SECONDS = 600.0
_LOOK_SECONDS = 0.5
_SWEEP_SECONDS = 3600.0
# The operator mends a key, a role, a hospital, a model or LOCUM_ALLOWED_HOSTS (421), or answers an alarm of
# the watch (409); the others are about the scan.
_MENDED = frozenset({401, 403, 404, 408, 409, 410, 421, 425, 429})
# Out of resources (PS3.4 B.2.3) and a peer that is shutting down.
_TRANSIENT_STATUSES = range(0xA700, 0xA800)
_WARNINGS = range(0xB000, 0xC000)
# By output: its name, SOP class and the transfer syntax in which the API writes it.
_STORED = {
    "dicom-seg": ("SEG", SegmentationStorage, ExplicitVRLittleEndian),
    "dicom-rtstruct": ("RTSTRUCT", RTStructureSetStorage, ImplicitVRLittleEndian),
}


class NotNow(Exception):
    """It may succeed later."""


class Never(Exception):
    """It will not."""


@dataclass
class _Waiting:
    pause: float
    until: float


@dataclass
class Forwarder:
    """Works off the spool, one series at a time."""

    node: NodeConfiguration
    spool: Spool
    stopping: threading.Event
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def run(self, open_series: Callable[[], set[str]]) -> None:
        """Look until `stopping` is set; the series that is sent is finished first."""
        swept = float("-inf")
        while not self.stopping.is_set():
            pause = _LOOK_SECONDS
            try:
                # What frees space comes before what needs some.
                if time.monotonic() - swept > _SWEEP_SECONDS:
                    swept = time.monotonic()
                    self.spool.sweep(self.node.failed_days * 24 * 3600)
                if self.look():
                    pause = 0
                self.complete(open_series())
            except OSError as error:
                # The disk is full, say. The node still answers its senders.
                _log.error("the queue cannot be worked off: %s", _brief(error))
                pause = self.node.retry_seconds
            self.stopping.wait(pause)

    def complete(self, open_series: set[str]) -> None:
        """Make every series ready of which no object has come for long enough."""
        for key, idle in self.spool.receiving():
            enough = self.node.silence_seconds if key in open_series else self.node.settle_seconds
            if idle >= enough:
                entry = self.spool.complete(key)
                _log.info("series %s for %s is complete", entry.id, entry.hospital)

    def look(self) -> bool:
        """Work on the oldest series that is due; return whether there was one."""
        due = (entry for entry in self.spool.ready() if self._is_due(entry))
        entry = next(due, None)
        if entry is None:
            return False
        try:
            self._work(entry)
        except NotNow as error:
            self._postpone(entry, str(error))
        except Never as error:
            self._fail(entry, str(error))
        except OSError as error:
            self._postpone(entry, _brief(error))
        except Exception as error:
            # A bug: keep the series, and the others going.
            _log.exception("series %s", entry.id)
            self._postpone(entry, f"an unexpected {type(error).__name__}")
        else:
            self._waiting.pop(entry.id, None)
        return True

    def _is_due(self, entry: Entry) -> bool:
        return entry.id not in self._waiting or self._waiting[entry.id].until <= time.monotonic()

    def _work(self, entry: Entry) -> None:
        route = self.node.hospitals.get(entry.hospital)
        if route is None:
            raise NotNow(f"hospital '{entry.hospital}' is not configured any more")
        destination = self.node.destinations[route.destination]
        # Before the API computes a mask that cannot be delivered.
        reach(self.node.ae_title, route, destination)
        segmentation = segment(self.node, route, entry)
        deliver(self.node.ae_title, route, destination, segmentation)
        self.spool.finish(entry)
        _log.info("series %s: its segmentation is at %s", entry.id, route.destination)

    def _postpone(self, entry: Entry, why: str) -> None:
        if time.time() - entry.completed_at > self.node.give_up_hours * 3600:
            self._fail(entry, f"{why}, {self.node.give_up_hours:.3g} h after it was complete")
        else:
            self._pause(entry, why)

    def _pause(self, entry: Entry, why: str) -> None:
        before = self._waiting.get(entry.id)
        pause = self.node.retry_seconds if before is None else 2 * before.pause
        pause = min(pause, max(_LONGEST_PAUSE_SECONDS, self.node.retry_seconds))
        self._waiting[entry.id] = _Waiting(pause, time.monotonic() + pause)
        _log.warning("series %s waits %.3g s: %s", entry.id, pause, why)

    def _fail(self, entry: Entry, why: str) -> None:
        try:
            self.spool.fail(entry, why)
        except OSError as error:
            # It fails later, and until then delays no other series.
            self._pause(entry, f"it cannot be moved to failed/ ({_brief(error)}): {why}")
            return
        self._waiting.pop(entry.id, None)
        _log.error("series %s failed, and is kept in failed/: %s", entry.id, why)


def _brief(error: OSError) -> str:
    """Not the error's whole text, which has a path."""
    return f"{type(error).__name__}: {error.strerror}"


def segment(node: NodeConfiguration, route: Route, entry: Entry) -> bytes:
    """The SEG or RTSTRUCT of a series, by the API. Raises NotNow, Never."""
    key = _key(route, entry.hospital)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = {
        "hospital": entry.hospital,
        "model": route.model,
        "personalization": route.personalization,
        "guard": route.guard,
        "output": route.output,
    }
    timeout = httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
    verify = ssl.create_default_context(cafile=node.ca)
    parts = [("scan", ("object", cast(BinaryIO, _ObjectFile(path)))) for path in entry.objects]
    try:
        with httpx.Client(timeout=timeout, verify=verify, trust_env=False, headers=headers) as client:
            answer = client.post(f"{node.service.rstrip('/')}/segment", files=parts, data=data)
    except httpx.HTTPError as error:
        raise NotNow(f"the API does not answer ({type(error).__name__})") from None
    if answer.status_code == httpx.codes.OK:
        return answer.content
    said = f"the API answers {answer.status_code}: {_detail(answer)}"
    if answer.status_code in _MENDED or answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise NotNow(said)
    raise Never(said)


class _ObjectFile(io.RawIOBase):
    """A file that is open only while a piece is read: a series can have more than a process may open."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As httpx uses it: to the end, for the length, and back."""
        self._at = offset + (self._path.stat().st_size if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._at)
            piece = file.read(size)
        self._at += len(piece)
        return piece


def _key(route: Route, hospital: str) -> str | None:
    """The hospital's API key; None if none is configured. Raises NotNow."""
    if route.key_file is not None:
        try:
            return route.key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NotNow(f"the API key of '{hospital}' cannot be read ({type(error).__name__})") from None
    if route.key_env is not None:
        if not (key := os.environ.get(route.key_env, "").strip()):
            raise NotNow(f"the API key of '{hospital}' is missing: set {route.key_env}")
        return key
    return None


def reach(ae_title: str, route: Route, destination: Destination) -> None:
    """Check that a destination accepts the route's output now. Raises NotNow, Never."""
    with _association(ae_title, route, destination):
        pass


def deliver(ae_title: str, route: Route, destination: Destination, segmentation: bytes) -> None:
    """Send a SEG or RTSTRUCT by C-STORE. Raises NotNow, Never."""
    dataset, name = dcmread(io.BytesIO(segmentation)), route.destination
    with _association(ae_title, route, destination) as association:
        try:
            answer = association.send_c_store(dataset)
        except (RuntimeError, ValueError) as error:
            raise NotNow(f"destination '{name}' ended the association ({type(error).__name__})") from None
    status = answer.get("Status")
    if status is None or status in _TRANSIENT_STATUSES:
        raise NotNow(
            f"destination '{name}' " + ("breaks off" if status is None else f"answers {status:04X}H")
        )
    if status != 0 and status not in _WARNINGS:
        raise Never(f"destination '{name}' answers {status:04X}H")


@contextmanager
def _association(ae_title: str, route: Route, destination: Destination) -> Iterator[Association]:
    """An association for the route's output, released at the end. Raises NotNow, Never."""
    ae, name = AE(ae_title), route.destination
    ae.acse_timeout = ae.connection_timeout = _CONNECT_SECONDS
    ae.network_timeout = ae.dimse_timeout = _ANSWER_SECONDS
    what, sop_class, syntax = _STORED[route.output]
    ae.add_requested_context(sop_class, [syntax])
    tls = None if destination.tls is None else (destination.tls.client_context(), destination.host)
    association = ae.associate(
        destination.host, destination.port, ae_title=destination.ae_title, tls_args=tls
    )
    # pynetdicom aborts an association without an accepted context.
    if association.rejected_contexts and not association.accepted_contexts:
        raise Never(f"destination '{name}' accepts no {what}")
    if not association.is_established:
        refused = "rejects the association" if association.is_rejected else "does not answer"
        raise NotNow(f"destination '{name}' {refused}")
    try:
        yield association
    finally:
        association.release()


def _detail(answer: httpx.Response) -> str:
    """The API's own reason, which says nothing of the patient; another server's answer is left out."""
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        return str(answer.json().get("detail", ""))[:500]
    return "no problem document"
