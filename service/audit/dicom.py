"""A row of the audit trail as a DICOM audit message (PS3.15 A.5), the XML that audit repositories take."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC
from typing import Any
from xml.etree import ElementTree as Xml

# EventID (CID 400) and EventActionCode (Create, Read, Update, Delete, Execute) by the action's first part.
_EVENTS = {
    "scan": ("110106", "Export", "E"),
    "result": ("110106", "Export", "R"),
    "card": ("110106", "Export", "R"),
    "cohort": ("110104", "DICOM Instances Transferred", "R"),
    "mask": ("110104", "DICOM Instances Transferred", "U"),
    "report": ("110104", "DICOM Instances Transferred", "U"),
    "job": ("110100", "Application Activity", "E"),
    "files": ("110105", "DICOM Study Deleted", "D"),
    "session": ("110114", "User Authentication", "E"),
    "key": ("110113", "Security Alert", "E"),
    "hospital": ("110113", "Security Alert", "U"),
    "version": ("110113", "Security Alert", "E"),
    "gate": ("110113", "Security Alert", "U"),
    "plan": ("110113", "Security Alert", "U"),
    "shadow": ("110113", "Security Alert", "U"),
    "watch": ("110113", "Security Alert", "U"),
    "acceptance": ("110113", "Security Alert", "U"),
    "answers": ("110113", "Security Alert", "U"),
    "observation": ("110103", "DICOM Instances Accessed", "R"),
    "correction": ("110103", "DICOM Instances Accessed", "U"),
    "observations": ("110105", "DICOM Study Deleted", "D"),
    "trail": ("110101", "Audit Log Used", "E"),
}
_STORED = ("110104", "DICOM Instances Transferred", "C")
_FETCHED = ("110104", "DICOM Instances Transferred", "R")
_KEPT = ("scan", "mask", "report", "cohort", "correction")
_DELETED = ("110105", "DICOM Study Deleted", "D")
# EventOutcomeIndicator: success, minor failure (the request was rejected), serious failure.
_MINOR, _SERIOUS = "4", "8"
_SERVER_ERROR, _REJECTED = 500, 400
# XML 1.0 2.2.
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def audit_message(row: Mapping[str, Any]) -> str:
    """Return the message on one line, without an XML declaration."""
    thing, _, happened = str(row["action"]).partition(".")
    code, meaning, action = _EVENTS[thing]
    if happened.startswith(("stored", "created")) and thing in _KEPT:
        code, meaning, action = _STORED
    elif happened == "fetched":
        code, meaning, action = _FETCHED
    elif happened.startswith("deleted") and thing not in ("mask", "correction"):
        code, meaning, action = _DELETED
    message = Xml.Element("AuditMessage")
    event = Xml.SubElement(
        message,
        "EventIdentification",
        EventActionCode=action,
        EventDateTime=row["at"].astimezone(UTC).isoformat(timespec="microseconds"),
        EventOutcomeIndicator=_outcome(row["outcome"]),
    )
    _coded(event, "EventID", code, "DCM", meaning)
    _coded(event, "EventTypeCode", str(row["action"]), "LOCUM", str(row["action"]))
    actor = Xml.SubElement(message, "ActiveParticipant", UserID=row["actor"], UserIsRequestor="true")
    if row["request"] is not None:
        actor.set("AlternativeUserID", f"request {row['request']}")
    source = Xml.SubElement(message, "AuditSourceIdentification", AuditSourceID="locum")
    _coded(source, "AuditSourceTypeCode", "4", "DCM", "Application Server Process")
    if row["hospital"] is not None:
        _object(message, row["hospital"], "3", "Hospital")
    if row["scan"] is not None:
        _object(message, row["scan"], "2", "Scan digest")
    if row["version"] is not None:
        _object(message, row["version"], "2", "Model version digest")
    chain = _object(message, str(row["id"]), "2", "Audit row")
    for name, value in (("previous", row["previous"]), ("digest", row["digest"]), *row["details"].items()):
        encoded = b64encode(str(value).encode()).decode()
        Xml.SubElement(chain, "ParticipantObjectDetail", type=name, value=encoded)
    # A rejected path, in the place of a hospital, can have characters that XML cannot express.
    return _NO_XML.sub("\ufffd", Xml.tostring(message, encoding="unicode")).replace("\n", "&#10;")


def _coded(parent: Xml.Element, name: str, code: str, system: str, text: str) -> None:
    Xml.SubElement(parent, name, {"csd-code": code, "codeSystemName": system, "originalText": text})


def _object(message: Xml.Element, name: str, kind: str, meaning: str) -> Xml.Element:
    """`kind`: 2 a system object, 3 an organization."""
    found = Xml.SubElement(
        message, "ParticipantObjectIdentification", ParticipantObjectID=name, ParticipantObjectTypeCode=kind
    )
    _coded(found, "ParticipantObjectIDTypeCode", meaning.lower().replace(" ", "-"), "LOCUM", meaning)
    return found


def _outcome(status: int) -> str:
    if status >= _SERVER_ERROR:
        return _SERIOUS
    return _MINOR if status >= _REJECTED else "0"
