"""Search, fetch and store in one PACS by DICOMweb (PS3.18), within limits.

    with PacsClient("main", server, keep_on) as pacs:
        series = pacs.fetch_series(study_uid, series_uid, limits)
        pacs.store(segmentation)

No message of an error has a UID, a URL or a text of the PACS: messages become reasons of jobs.
"""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.message import Message
from types import TracebackType
from typing import Any

import requests
from celery.exceptions import SoftTimeLimitExceeded
from dicomweb_client import DICOMwebClient
from pydicom import dcmread
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from model_store.digest import sha256
from model_store.errors import DamagedScan, LocumStoreError, ScanTooLarge
from model_store.scan import MOST_FILES, ElementCount, Limits, read_dataset
from service.errors import PacsRefused, PacsUnavailable, SeriesMismatched, SeriesMissing, ServiceError
from service.pacs.configuration import PacsServer
from service.runtime.spool import pack_into
from service.validation import DICOM_UID

# They write URLs, hence UIDs, into the log.
for _name in ("dicomweb_client", "retrying", "urllib3"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)
warnings.filterwarnings("ignore", module=r"(dicomweb_client|urllib3)(\.|$)")

# As stored: no transcoding by the server.
_ANY_SYNTAX = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_PAGE = 500
# Pages of one list: MOST_FILES results of a server that sends a hundred at a time.
_MOST_PAGES = 256
_ANSWER_BYTES = 64 * 2**20
_PART_OVERHEAD = 1024
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESULT_STEP = 2**20
# The end of a multipart answer: its closing delimiter (RFC 2046 5.1.1) with some epilogue.
_TAIL_BYTES = 1024
_WATCH_SECONDS = 0.5

KeepOn = Callable[[], None]
Found = Mapping[str, Any]


class PacsClient:
    """A client of one PACS.

    `keep_on` is called between pieces of an answer, and from a thread of the client while one is awaited. It
    raises to stop. It is not called any more from the first instance on that `store` sends or finds: the
    caller records it, and stores what belongs to it.
    """

    def __init__(self, name: str, server: PacsServer, keep_on: KeepOn = lambda: None) -> None:
        """Connect nothing yet. Raises PacsRefused if a secret or a certificate cannot be read."""
        self.name = name
        self._timeout = server.timeout_seconds
        self._limit = _Limit(name, server.answer_seconds, keep_on)
        self._session = session = requests.Session()
        # The environment has no say: neither a proxy nor a .netrc of the account.
        session.trust_env = False
        # A redirect would be a URL that no operator configured.
        session.max_redirects = 0
        session.verify = True if server.ca is None else str(server.ca)
        if server.client_certificate is not None:
            certificate, key = str(server.client_certificate), server.client_key
            session.cert = certificate if key is None else (certificate, str(key))
        if (token := server.token()) is not None:
            session.headers["Authorization"] = f"Bearer {token}"
        elif server.username is not None:
            session.auth = (server.username, server.password() or "")
        adapter = _BoundedAdapter(self._limit)
        session.mount("https://", adapter)
        session.mount("http://", adapter)

        def client(url: str | None) -> DICOMwebClient:
            made = DICOMwebClient(str(url), session=session, permissive_uid=True, timeout=self._timeout)
            # A job that waits goes back to the queue; a worker does not sleep.
            made.set_http_retry_params(retry=False)
            return made

        self._qido, self._wado, self._stow = (
            client(url or server.wado_url) for url in (server.qido_url, server.wado_url, server.stow_url)
        )

    def __enter__(self) -> PacsClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()
        self._limit.close()

    # ------------------------------------------------------------------ QIDO-RS

    def search_series(self, filters: Mapping[str, str], most: int) -> list[Found]:
        """Find series by attributes of study and series: DICOM JSON, at most `most` + 1 of them.

        Raises PacsUnavailable, PacsRefused.
        """

        def page(offset: int) -> Sequence[Found]:
            found: Sequence[Found] = self._qido.search_for_series(
                search_filters=dict(filters),
                fields=["PatientID", "StudyDate", "StudyTime", "Modality", "NumberOfSeriesRelatedInstances"],
                limit=min(_PAGE, most + 1),
                offset=offset,
            )
            return found

        return self._pages(page, "SeriesInstanceUID", most + 1)

    def _instances(self, study: str, series: str) -> list[Found]:
        def page(offset: int) -> Sequence[Found]:
            found: Sequence[Found] = self._qido.search_for_instances(
                study, series, fields=["NumberOfFrames"], limit=_PAGE, offset=offset
            )
            return found

        return self._pages(page, "SOPInstanceUID", MOST_FILES + 1)

    def _pages(self, page: Callable[[int], Sequence[Found]], keyword: str, most: int) -> list[Found]:
        """Every result once: a server may cut its pages, or ignore the offset and repeat them."""
        found: dict[str, Found] = {}
        # Identifiers of every result, so that a page of no valid UIDs ends the search where it is repeated.
        seen: set[str] = set()
        offset = 0
        with self._answered(_ANSWER_BYTES):
            for _ in range(_MOST_PAGES):
                self._limit.begin(_ANSWER_BYTES)
                results = page(offset)
                new = {text_of(item, keyword): item for item in results}
                offset += len(results)
                found |= {uid: item for uid, item in new.items() if re.fullmatch(DICOM_UID, uid)}
                if seen.issuperset(new) or len(found) >= most:
                    return list(found.values())[:most]
                seen.update(new)
        raise PacsUnavailable(f"PACS '{self.name}' answers a search with more than {_MOST_PAGES} pages")

    # ------------------------------------------------------------------ WADO-RS

    def fetch_series(self, study: str, series: str, limits: Limits) -> bytes:
        """Fetch every instance of a series, in the transfer syntax in which it is stored.

        Returns:
            The file of one instance, or a stored zip of several. The same instances give the same bytes, and
            those that a client uploads as parts give them too.

        Raises:
            SeriesMissing: the PACS has no such series in this study.
            SeriesMismatched: it sends an instance of another study or series.
            ScanTooLarge: more files, frames or bytes than `limits` allow; found out before decoding.
            PacsUnavailable: it does not send the instances that it lists, each of them and no other.
            PacsRefused.
        """
        if not (re.fullmatch(DICOM_UID, study) and re.fullmatch(DICOM_UID, series)):
            raise self._missing()
        listed = self._instances(study, series)
        if not listed:
            raise self._missing()
        self._check_size(listed, limits)
        wanted = {text_of(item, "SOPInstanceUID") for item in listed}
        files: dict[str, bytes] = {}
        received, elements = 0, ElementCount()
        most = limits.max_bytes + _PART_OVERHEAD * (len(listed) + 1)
        with self._answered(most):
            for content in self._parts(study, series):
                received += len(content)
                if received > limits.max_bytes:
                    raise _too_many("bytes", limits.max_bytes)
                where = f"instance {len(files) + 1}"
                header = read_dataset(content, limits, where, pixels=False, elements=elements)
                self._check_series(header, study, series)
                instance = str(header.get("SOPInstanceUID", ""))
                if instance not in wanted:
                    raise PacsUnavailable(f"PACS '{self.name}' sends an instance that it does not list")
                files[instance] = content
        if len(files) < len(wanted):
            raise PacsUnavailable(
                f"PACS '{self.name}' lists {len(wanted)} instances of the series and sent {len(files)}"
            )
        return _packed(list(files.values()))

    def _check_series(self, header: Any, study: str, series: str) -> None:
        for keyword, expected in (("StudyInstanceUID", study), ("SeriesInstanceUID", series)):
            if str(header.get(keyword, "")) != expected:
                raise SeriesMismatched(
                    f"PACS '{self.name}' sends an instance with another {keyword} than the requested one, "
                    "which may be of another patient; nothing of it is used: its log says why"
                )

    def _parts(self, study: str, series: str) -> Iterator[bytes]:
        """Fetch the files of a series as they are stored.

        `iter_series` would have pydicom parse each, which inflates the deflated transfer syntax without a
        limit and keeps the inflated bytes in place of the file.
        """
        url = f"{self._wado.base_url}/studies/{study}/series/{series}"
        with self._session.get(
            url, headers={"Accept": _ANY_SYNTAX}, stream=True, timeout=self._timeout
        ) as answer:
            answer.raise_for_status()
            # Some servers send a single instance as it is, against PS3.18 8.7.2.
            if answer.headers["Content-Type"].startswith("application/dicom"):
                yield answer.content
                return
            for part in self._wado._decode_multipart_message(answer, stream=True):
                yield bytes(part)
            # Without its closing delimiter the last part may have been cut.
            boundary = _boundary(answer.headers["Content-Type"])
            if boundary and f"--{boundary}--".encode() not in self._limit.tail:
                raise PacsUnavailable(f"PACS '{self.name}' breaks off in the middle of an answer")

    def _check_size(self, listed: list[Found], limits: Limits) -> None:
        if len(listed) > MOST_FILES:
            raise _too_many("files", MOST_FILES)
        with self._answered(_ANSWER_BYTES):
            frames = sum(int(text_of(item, "NumberOfFrames") or 1) for item in listed)
            # Enhanced files have many frames; each has at least one voxel.
            pixels = [int(text_of(item, "Rows") or 1) * int(text_of(item, "Columns") or 1) for item in listed]
        if frames > limits.max_voxels or frames * max(pixels) > limits.max_voxels:
            raise _too_many("voxels", limits.max_voxels)

    # ------------------------------------------------------------------ STOW-RS

    def has(self, study: str, series: str, instance: str) -> bool:
        """Whether the PACS has this instance. Raises PacsUnavailable, PacsRefused."""
        try:
            found = self._instances(study, series)
        except SeriesMissing:
            return False
        return any(text_of(item, "SOPInstanceUID") == instance for item in found)

    def store(self, content: bytes, admit: Callable[[], None] | None = None) -> bool:
        """Store an instance, unless the PACS has it already; return whether it was stored now.

        `admit` is called before an instance is sent. If it raises, nothing is stored and the error is raised.

        Raises PacsUnavailable, PacsRefused.
        """
        made = dcmread(io.BytesIO(content))
        study, series, instance = map(
            str, (made.StudyInstanceUID, made.SeriesInstanceUID, made.SOPInstanceUID)
        )
        is_there = self.has(study, series, instance)
        self._limit.stop_asking()
        if is_there:
            return False
        if admit is not None:
            admit()
        with self._answered(_ANSWER_BYTES):
            answer = self._stow.store_instances([made], study)
            failed = list(answer.get("FailedSOPSequence") or ())
        if failed:
            code = failed[0].get("FailureReason")
            raise PacsRefused(
                f"PACS '{self.name}' does not store the segmentation"
                + (f" (failure reason {int(code):04X}H)" if isinstance(code, int) else "")
                + ": its log says why"
            )
        if not self.has(study, series, instance):
            raise PacsUnavailable(f"PACS '{self.name}' accepted the segmentation and does not list it yet")
        return True

    # ------------------------------------------------------------------ errors

    @contextmanager
    def _answered(self, most: int) -> Iterator[None]:
        """Bound one answer, and turn what requests, pydicom and the parsers raise into PacsError."""
        try:
            with self._limit.answering(most):
                yield
        except DamagedScan as error:
            raise PacsUnavailable(f"PACS '{self.name}' sends what cannot be read: {error}") from None
        except (ServiceError, LocumStoreError, MemoryError, SoftTimeLimitExceeded):
            raise
        except requests.HTTPError as error:
            raise self._rejection(0 if error.response is None else error.response.status_code) from None
        except requests.TooManyRedirects:
            raise PacsRefused(
                f"PACS '{self.name}' redirects to another URL: configure the URL that answers"
            ) from None
        except requests.exceptions.SSLError:
            raise PacsRefused(
                f"PACS '{self.name}': its certificate is not trusted, or Locum's is not; set `ca`, or "
                " `client_certificate` and `client_key`"
            ) from None
        except OSError as error:
            if not isinstance(error, requests.RequestException):
                raise PacsRefused(f"PACS '{self.name}': a configured certificate cannot be read") from None
            raise PacsUnavailable(f"PACS '{self.name}' does not answer ({type(error).__name__})") from None
        except Exception as error:  # a dozen unrelated types for an answer that is no DICOM
            raise PacsUnavailable(
                f"PACS '{self.name}' answers what cannot be read ({type(error).__name__})"
            ) from None

    def _rejection(self, status: int) -> ServiceError:
        if status in _TRANSIENT:
            return PacsUnavailable(f"PACS '{self.name}' answers {status}")
        if status in (401, 403):
            return PacsRefused(f"PACS '{self.name}' rejects Locum's credentials ({status}): correct them")
        if status in (404, 410):
            return self._missing()
        return PacsRefused(f"PACS '{self.name}' rejects the request ({status}): its log says why")

    def _missing(self) -> SeriesMissing:
        return SeriesMissing(
            f"PACS '{self.name}' has no such series in this study, or Locum may not see it: check both UIDs"
        )


def text_of(item: Found, keyword: str) -> str:
    """The first value of an attribute in DICOM JSON, as text without padding; empty if it has none."""
    tag = DICOMwebClient.lookup_tag(keyword)
    values = item.get(tag, {}).get("Value") or [""]
    return str(values[0]).strip(" \0")


def _packed(files: list[bytes]) -> bytes:
    if len(files) == 1:
        return files[0]
    packed = io.BytesIO()
    pack_into(packed.write, sorted(files, key=sha256))
    return packed.getvalue()


def _too_many(what: str, most: int) -> ScanTooLarge:
    return ScanTooLarge(f"DICOM: the series has more than {most} {what}; choose another")


def _boundary(content_type: str) -> str:
    """The parameter of a multipart media type; empty without one."""
    header = Message()
    header["Content-Type"] = content_type
    return str(header.get_boundary(""))


class _Limit:
    """How many bytes the answer that is read may have, after decompression, and how long it may take.

    While an answer is awaited, a thread ends its connection at the deadline, or when the caller wants to
    stop: a server that sends a byte now and then, in headers or a body, meets no timeout of a socket.
    `tail` is the end of what was read.
    """

    def __init__(self, name: str, seconds: float, keep_on: KeepOn) -> None:
        self._name, self._seconds, self._keep_on = name, seconds, keep_on
        self._lines: dict[tuple[str, int | None], socket.socket] = {}
        self._stopped: Exception | None = None
        self.begin(_ANSWER_BYTES)

    @contextmanager
    def answering(self, most: int) -> Iterator[None]:
        """Bound one answer. Raises what `keep_on` does, and PacsUnavailable at the deadline."""
        self.begin(most)
        self._stopped = None
        over, deadline = threading.Event(), time.monotonic() + self._seconds
        watch = threading.Thread(target=self._watch, args=(over, deadline), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            if self._stopped is not None:
                raise self._stopped

    def _watch(self, over: threading.Event, deadline: float) -> None:
        while not over.wait(_WATCH_SECONDS):
            try:
                self._keep_on()
                if time.monotonic() > deadline:
                    raise PacsUnavailable(
                        f"PACS '{self._name}' takes more than {self._seconds:g} s to answer"
                    )
            except Exception as error:  # whatever the caller stops with
                self._stopped = error
                for line in [*self._lines.values()]:
                    with suppress(OSError):  # where it has ended
                        line.shutdown(socket.SHUT_RDWR)
                return

    def connected(self, host: str, port: int | None, line: socket.socket) -> None:
        """Take note of the connection to a host: it is the only one to it that is in use."""
        earlier = self._lines.pop((host, port), None)
        # TLS takes the socket itself over.
        self._lines[host, port] = line.dup()
        if earlier is not None:
            earlier.close()

    def close(self) -> None:
        """Free the sockets."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def begin(self, most: int) -> None:
        self._most = self._left = most
        self.tail = b""

    def stop_asking(self) -> None:
        self._keep_on = lambda: None

    def take(self, piece: bytes) -> None:
        self._keep_on()
        self._left -= len(piece)
        if self._left < 0:
            raise _too_many("bytes", self._most)
        self.tail = (self.tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]


class _BoundedAdapter(HTTPAdapter):
    def __init__(self, limit: _Limit) -> None:
        self._limit = limit
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        limit = self._limit

        class Connection(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                line = super()._new_conn()
                limit.connected(self.host, self.port, line)
                return line

        class TlsConnection(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                line = super()._new_conn()
                limit.connected(self.host, self.port, line)
                return line

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        class TlsPool(HTTPSConnectionPool):
            ConnectionCls = TlsConnection

        self.poolmanager.pool_classes_by_scheme = {"http": Pool, "https": TlsPool}

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        self._limit.take(b"")
        # Both may stand in a query as they are (RFC 3986 3.4), and Orthanc 1.10 does not decode them.
        request.url = str(request.url).replace("%2A", "*").replace("%3F", "?")
        response = super().send(request, *arguments, **options)
        response.raw = _BoundedBody(response.raw, self._limit)
        return response


class _BoundedBody:
    """urllib3's response, of which `requests` reads the body by `stream`."""

    def __init__(self, raw: Any, limit: _Limit) -> None:
        self._raw, self._limit = raw, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, amount: int, decode_content: bool | None = None) -> Iterator[bytes]:
        for piece in self._raw.stream(min(amount, _RESULT_STEP), decode_content=decode_content):
            self._limit.take(piece)
            yield piece
