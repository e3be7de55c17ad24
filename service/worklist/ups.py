"""A user agent of one worklist by UPS-RS (PS3.18 chapter 11), and the data sets that a performer writes.

No message has a UID, a URL or a text of the worklist: messages become lines of the log.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Final

import httpx
from pydicom import Dataset
from pydicom.sequence import Sequence as Items

from service.errors import PacsRefused, PacsUnavailable, ServiceError
from service.pacs.configuration import PacsServer
from service.validation import DICOM_UID

JSON: Final = "application/dicom+json"
_ANSWER_BYTES = 16 * 2**20
_PAGE, _MOST_PAGES = 200, 50
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
# What the item's state or its owner forbids (PS3.18 11.6.3, 11.7.3); gone is what was deleted.
_CONFLICTS, _GONE = frozenset({400, 409}), frozenset({404, 410})
_PRIORITIES = ("HIGH", "MEDIUM", "LOW")


class NotOurs(Exception):
    """The item is another performer's, has ended, or is gone."""


@dataclass(frozen=True)
class Scheduled:
    """A work item: its code, and the series of its input, (study, series) each."""

    uid: str
    state: str
    code: tuple[str, str]
    inputs: tuple[tuple[str, str], ...]
    ready: bool
    order: tuple[int, str]

    @classmethod
    def of(cls, item: Dataset) -> Scheduled:
        """What a performer needs of an item. Raises AttributeError and others for what is no work item."""
        codes = item.get("ScheduledWorkitemCodeSequence") or [Dataset()]
        inputs = [
            (str(each.get("StudyInstanceUID", "")), str(each.get("SeriesInstanceUID", "")))
            for each in item.get("InputInformationSequence") or ()
        ]
        priority = str(item.get("ScheduledProcedureStepPriority") or "LOW")
        place = _PRIORITIES.index(priority) if priority in _PRIORITIES else len(_PRIORITIES)
        return cls(
            str(item.SOPInstanceUID),
            str(item.get("ProcedureStepState") or ""),
            (str(codes[0].get("CodeValue") or ""), str(codes[0].get("CodingSchemeDesignator") or "")),
            tuple(dict.fromkeys(inputs)),
            item.get("InputReadinessState", "READY") == "READY",
            (place, str(item.get("ScheduledProcedureStepStartDateTime") or "")),
        )


class WorklistClient:
    """A client of the worklist that belongs to a PACS."""

    def __init__(self, name: str, server: PacsServer) -> None:
        """Connect nothing yet. Raises PacsRefused if a secret or a certificate cannot be read."""
        self.name = name
        try:
            verify = ssl.create_default_context(cafile=server.ca)
            if server.client_certificate is not None:
                verify.load_cert_chain(server.client_certificate, server.client_key)
        except OSError as error:
            raise PacsRefused(f"worklist '{name}': a certificate cannot be read") from error
        headers, token = {"Accept": JSON}, server.token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        basic = None if server.username is None else (server.username, server.password() or "")
        self._http = httpx.Client(
            base_url=str(server.ups_url),
            auth=basic,
            headers=headers,
            verify=verify,
            timeout=server.timeout_seconds,
            trust_env=False,
        )

    def __enter__(self) -> WorklistClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def scheduled(self) -> list[Scheduled]:
        """The items in state SCHEDULED, the most urgent first. Raises PacsUnavailable, PacsRefused."""
        found: dict[str, Scheduled] = {}
        for page in range(_MOST_PAGES):
            asked = {"ProcedureStepState": "SCHEDULED", "limit": str(_PAGE), "offset": str(page * _PAGE)}
            items = self._read(self._send("GET", "/workitems", params={**asked, "includefield": "all"}))
            new = {each.uid: each for each in items if each.state == "SCHEDULED"}
            if not new.keys() - found.keys():
                break
            found |= new
        return sorted(found.values(), key=lambda each: each.order)

    def item(self, uid: str) -> Scheduled:
        """An item as it is now. Raises NotOurs where it is gone, PacsUnavailable, PacsRefused."""
        found = self._read(self._send("GET", f"/workitems/{uid}"))
        if not found:
            raise NotOurs
        return found[0]

    def change_state(self, uid: str, transaction: str, state: str) -> None:
        """Claim an item, or end one's own. Raises NotOurs, PacsUnavailable, PacsRefused."""
        asked = Dataset()
        asked.TransactionUID, asked.ProcedureStepState = transaction, state
        self._send("PUT", f"/workitems/{uid}/state", content=_body(asked))

    def update(self, uid: str, transaction: str, changes: Dataset) -> None:
        """Change attributes of one's own item. Raises as `change_state`."""
        # The query is the UID alone (PS3.18 11.6.1).
        self._send("POST", f"/workitems/{uid}?{transaction}", content=_body(changes))

    def _send(self, method: str, path: str, **what: Any) -> bytes:
        headers = {"Content-Type": JSON} if "content" in what else {}
        try:
            with self._http.stream(method, path, headers=headers, **what) as answer:
                body = b""
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > _ANSWER_BYTES:
                        raise PacsRefused(f"worklist '{self.name}' answers more than {_ANSWER_BYTES} bytes")
        except httpx.HTTPError as error:
            raise PacsUnavailable(
                f"worklist '{self.name}' does not answer ({type(error).__name__})"
            ) from None
        status = answer.status_code
        if answer.is_success:
            return body
        if status in _TRANSIENT:
            raise PacsUnavailable(f"worklist '{self.name}' answers {status}")
        if status in _GONE or (method != "GET" and status in _CONFLICTS):
            raise NotOurs
        raise self._refused(status)

    def _refused(self, status: int) -> ServiceError:
        if status in (401, 403):
            return PacsRefused(f"worklist '{self.name}' rejects Locum's credentials ({status}): correct them")
        return PacsRefused(f"worklist '{self.name}' rejects the request ({status}): its log says why")

    def _read(self, body: bytes) -> list[Scheduled]:
        if not body:
            return []
        try:
            said = json.loads(body)
            items = [Dataset.from_json(each) for each in (said if isinstance(said, list) else [said])]
            found = [Scheduled.of(each) for each in items]
        except Exception as error:  # pydicom raises many types for what is no DICOM JSON
            raise PacsRefused(f"worklist '{self.name}' answers what is no list of work items") from error
        return [each for each in found if re.fullmatch(DICOM_UID, each.uid)]


def _body(dataset: Dataset) -> bytes:
    return json.dumps([dataset.to_json_dict()]).encode()


# ------------------------------------------------------------------------------------ what a performer writes


def code(value: str, scheme: str, meaning: str) -> Dataset:
    """An item of a code sequence."""
    made = Dataset()
    made.CodeValue, made.CodingSchemeDesignator, made.CodeMeaning = value, scheme, meaning
    return made


def progress(percent: int, said: str) -> Dataset:
    """How far the work is, in percent, and what is being done (PS3.3 C.30.1)."""
    step, made = Dataset(), Dataset()
    step.ProcedureStepProgress, step.ProcedureStepProgressDescription = str(percent), said[:1024]
    made.ProcedureStepProgressInformationSequence = Items([step])
    return made


def performed(
    station: str, item: tuple[str, str], began: datetime, ended: datetime, outputs: Sequence[Dataset]
) -> Dataset:
    """What was done, and references to the results (PS3.3 C.30.3); a final state needs it (PS3.4 CC.2.5)."""
    step, made = Dataset(), Dataset()
    step.PerformedStationNameCodeSequence = Items([code(station, "99LOCUM", station)])
    step.PerformedWorkitemCodeSequence = Items([code(*item, "Work item as scheduled")])
    step.PerformedProcedureStepStartDateTime = _moment(began)
    step.PerformedProcedureStepEndDateTime = _moment(ended)
    step.OutputInformationSequence = Items(outputs)
    made.UnifiedProcedureStepPerformedProcedureSequence = Items([step])
    return made


def output(stored: dict[str, str], wado_url: str) -> Dataset:
    """A reference to a stored instance, and where it is retrieved (PS3.3 table 10-3b)."""
    made, instance, retrieval = Dataset(), Dataset(), Dataset()
    made.TypeOfInstances = "DICOM"
    made.StudyInstanceUID, made.SeriesInstanceUID = stored["StudyInstanceUID"], stored["SeriesInstanceUID"]
    instance.ReferencedSOPClassUID = stored["SOPClassUID"]
    instance.ReferencedSOPInstanceUID = stored["SOPInstanceUID"]
    made.ReferencedSOPSequence = Items([instance])
    retrieval.RetrieveURL = (
        f"{wado_url}/studies/{made.StudyInstanceUID}/series/{made.SeriesInstanceUID}"
        f"/instances/{instance.ReferencedSOPInstanceUID}"
    )
    made.WADORSRetrievalSequence = Items([retrieval])
    return made


def discontinued(at: datetime, why: str) -> Dataset:
    """Why the work ended without a result (PS3.3 C.30.1), which the state CANCELED needs."""
    step, made = Dataset(), Dataset()
    step.ProcedureStepCancellationDateTime = _moment(at)
    step.ReasonForCancellation = why[:1024]
    step.ProcedureStepDiscontinuationReasonCodeSequence = Items(
        [code("110513", "DCM", "Discontinued for unspecified reason")]
    )
    made.ProcedureStepProgressInformationSequence = Items([step])
    return made


def _moment(at: datetime) -> str:
    return at.strftime("%Y%m%d%H%M%S.%f%z")
