"""The verdict on a report, and its canonical JSON: what is digested, signed and noted in the audit trail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from model_store.digest import sha256
from model_store.signing import Signer
from service.acceptance.thresholds import Thresholds, compared

Verdict = Literal["met", "not-met", "too-few", "no-thresholds"]
KIND = "acceptance"
"""What a signature is of, in its message."""

WORDS: Mapping[str, str] = {
    "met": "The thresholds are met",
    "not-met": "The thresholds are not met",
    "too-few": "Too few masks for a verdict",
    "no-thresholds": "Nothing was asked before, so there is no verdict",
}


def judged(
    labels: Mapping[str, Mapping[str, Any]], thresholds: Thresholds | None
) -> tuple[Verdict, list[Any]]:
    """The verdict by the figures of the labels, and each comparison as JSON.

    A comparison that fails decides, whatever else is unknown.
    """
    if thresholds is None:
        return "no-thresholds", []
    checks = [
        check for label, asked in thresholds.labels.items() for check in compared(label, asked, labels[label])
    ]
    outcomes = {check["outcome"] for check in checks}
    if "failed" in outcomes:
        return "not-met", checks
    return ("too-few" if "too few" in outcomes else "met"), checks


def canonical(report: Mapping[str, Any]) -> bytes:
    """The bytes that a report's digest is of: JSON with sorted keys, without blanks, in UTF-8."""
    return json.dumps(report, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sealed(report: Mapping[str, Any], signer: Signer | None) -> dict[str, Any]:
    """The report with its digest, and the signature of that where the service has a key to sign with."""
    digest = sha256(canonical(report))
    signature = None if signer is None else signer.sign_document(KIND, digest)
    return {"report": dict(report), "digest": digest, "signature": signature}


def is_whole(document: Mapping[str, Any]) -> bool:
    """Whether the report is the one that was digested."""
    return sha256(canonical(document["report"])) == str(document["digest"])
