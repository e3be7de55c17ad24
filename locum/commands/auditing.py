"""An auditor's question of one answer, the report of a hospital's period, and the card of a version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from locum.answers import write_whole
from locum.client import Client
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.terminal import Terminal, aligned

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_CHUNK = 2**20


def show_answers(
    hospital: str, series: str | None, request: str | None, scan: Path | None, day: date | None, as_json: bool
) -> int:
    """Print which version answered, and by which decision; return 1 without an answer.

    Raises LocumError, OSError.
    """
    digest = None if scan is None else _digest(scan)
    with Client() as client:
        found = client.answers(hospital, series=series, scan=digest, request=request, day=day)
    if as_json:
        # ASCII alone: no name moves the cursor.
        _console.out(json.dumps(found, indent=2), highlight=False)
    elif not found:
        when = f" on {day}" if day else ""
        _console.print(
            f"{hospital} has no answer to it{when}; observations are deleted after LOCUM_OBSERVATION_DAYS"
        )
    for each in [] if as_json else found:
        for line in aligned([*_lines(each), ("", "")]):
            _console.print(line)
    return DONE if found else FAILED


def save_report(hospital: str, first: date, last: date, out: Path) -> None:
    """Save the report of a period as HTML and JSON. Raises LocumError, OSError."""
    with Client() as client:
        found = client.report(hospital, first, last)
        page = client.report_page(hospital, first, last)
    stem = f"{hospital}-{first}-{last}"
    write_whole(out / f"{stem}.json", json.dumps(found, indent=1).encode())
    write_whole(out / f"{stem}.html", page)
    answers = sum(each["answers"] for each in found["arrivals"])
    decisions = sum(not each["by_default"] for each in found["decisions"])
    _console.print(f"{out / stem}.html and .json: {answers} answers, {decisions} decisions")


def save_card(model: str, version: int, hospital: str | None, out: Path) -> None:
    """Save a version's card as HTML and JSON. Raises LocumError, OSError."""
    with Client() as client:
        found = client.version_card(model, version, hospital)
        page = client.version_card_page(model, version, hospital)
    stem = f"{model}-{version}"
    write_whole(out / f"{stem}.json", json.dumps(found, indent=1).encode())
    write_whole(out / f"{stem}.html", page)
    hospitals = len(found["hospitals"])
    _console.print(f"{out / stem}.html and .json: {hospitals} hospital{'' if hospitals == 1 else 's'}")


def _digest(path: Path) -> str:
    """The digest of a file's bytes, as the service knows scans."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _lines(each: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "answered", f"{each['at']}  request {each['request']}, {each['way']}, for {each['actor']}"
    yield "version", f"{each['artefact'] or 'no longer in the store'}  {each['version']}"
    inside = each["personalization"] or "not known"
    yield "network", f"{inside}  {each['network'] or ''}"
    yield "graph", f"{each['graph']}  {each['precision']}, {each['provider']}, Locum {each['locum']}"
    decision = each["decision"]
    if decision is None:
        yield "decision", "none was in force"
    else:
        how = "by default" if decision["by_default"] else f"by {decision['actor']}: {decision['reason']}"
        over = "; the gate was overridden" if decision["override"] else ""
        yield (
            "decision",
            f"entry {decision['sequence']} of {decision['at']}, {decision['artefact']}, {how}{over}",
        )
        if not each["decided"]:
            yield "", "another version answered: the request named it, or an alarm put it there"
    if each["withdrawn"]:
        yield "withdrawn", each["withdrawn"]
    yield "evidence", _job(each["made_by"])
    for found in each["acceptances"]:
        what = "accepted" if found["accepted"] else "rejected"
        against = ", against the verdict" if found["override"] else ""
        later = ", after this answer" if found["at"] > each["at"] else ""
        yield (
            "acceptance",
            f"{what}{against} on {found['at']}{later} by {found['actor']}: {found['reason']} (job "
            f"{found['job']})",
        )
    shift = "not measured" if each["shift"] is None else f"{each['shift']:.2f} ({each['shift_at']})"
    yield "scanner", f"{each['scanner'] or 'not known'}, shift {shift}"
    yield "warnings", ", ".join(each["warnings"]) or "none"
    for label, found in each["labels"].items():
        volume = "" if found["volume_ml"] is None else f", {found['volume_ml']:.1f} mL"
        yield "label", f"{label}: confidence {found['confidence']:.2f}{volume}"
    if each["looked_by"]:
        yield "looked at", f"{each['looked_at']} by {each['looked_by']}"
    yield "correction", _correction(each["correction"])


def _job(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no job made the version: it was published by training or import"
    verdict = {True: "its gate passed", False: "its gate refused"}.get(
        found["passed"], "no verdict of a gate"
    )
    return f"job {found['id']} ({found['kind']}) of {found['created_at']}, for {found['actor']}: {verdict}"


def _correction(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    what = "accepted as it was" if found["accepted"] else found["state"]
    dice = [f"{k} Dice {v['dice']:.3f}" for k, v in (found["labels"] or {}).items() if v["dice"] is not None]
    return f"{what}, {found['at']} by {found['actor']}" + (f": {', '.join(dice)}" if dice else "")
