"""A series of a PACS beside the patient's earlier ones, all read by one version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from locum.answers import write_whole
from locum.client import Client
from locum.commands.exit_codes import DONE
from locum.commands.following import follow
from locum.commands.terminal import Terminal, aligned
from locum.errors import JobFailed, ScanInvalid

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_aside = Terminal(stderr=True, highlight=False, soft_wrap=True, markup=False)


def follow_up(
    pacs: str,
    newest: tuple[str, str],
    hospital: str,
    model: str | None,
    earlier: Sequence[str] | None,
    repeats: str | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Start the job, follow it to its end and print what it found; return the exit code.

    `newest` are the UIDs of a study and a series. Raises ScanInvalid, LocumError, OSError.
    """
    named = None if not earlier else [_pair(each) for each in earlier]
    with Client() as client:
        job = client.follow_up(hospital, pacs, *newest, model=model, earlier=named, repeats=repeats)
        _aside.print(f"job {job.id}")
        follow(_aside, ((event.type, event.data) for event in client.events(job.id)))
        ended = client.job(job.id)
        if ended.state != "succeeded":
            raise JobFailed(f"job {job.id}: expected volumes, found state {ended.state}: {ended.reason}")
        found = client.followed_up(job.id)
    if out is not None:
        write_whole(out, json.dumps(found, indent=1).encode())
    if as_json:
        # ASCII alone: no name moves the cursor.
        _console.out(json.dumps(found, indent=2), highlight=False)
    else:
        for line in lines_of(found):
            _console.print(line)
    return DONE


def _pair(given: str) -> tuple[str, str]:
    study, found, series = given.partition("/")
    if not (found and study and series):
        raise ScanInvalid(f"--earlier {given}: expected the two UIDs as STUDY/SERIES")
    return study, series


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """What a person reads: a row per series and label, what the PACS has, and the warnings."""
    yield f"read by {found['network']} ({found['personalization']}); {found['notice']}"
    header = ("date", "days", "label", "mL", "change to the newest", "", "in the PACS")
    yield from aligned([header, *(row for each in found["series"] for row in _rows(each, found["labels"]))])
    for each in found["series"]:
        for warning in each["warnings"]:
            yield f"  {_date(each)}: {warning['text']}"
    if found["left_out"]:
        yield f"  {found['left_out']} older series were left out"
    if found["unread_figures"]:
        yield f"  {found['unread_figures']} SEGs or SRs of the patient cannot be read"
    yield from _spread(found["spread"])


def _rows(each: Mapping[str, Any], labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    if each["problem"]:
        yield (_date(each), _text(each["days"]), "-", "-", f"not read: {each['problem']}", "", "")
        return
    for label in labels:
        own = each["labels"][label]
        beyond = {True: "more than the spread", False: "within the spread", None: ""}[own["beyond_spread"]]
        there = [
            f"{figure['volumes'][label]:.1f} ({figure['kind']} by {figure['made_by'] or 'an unknown device'}"
            f"{'' if figure['same_version'] else ', ANOTHER version'})"
            for figure in each["figures"]
            if label in figure["volumes"]
        ]
        yield (
            _date(each),
            _text(each["days"]),
            label,
            f"{own['volume_ml']:.1f}",
            _change(own),
            beyond,
            "; ".join(there),
        )


def _change(own: Mapping[str, Any]) -> str:
    if own["change_ml"] is None:
        return "-"
    share = "" if own["change_share"] is None else f" ({100 * own['change_share']:+.1f} %)"
    return f"{own['change_ml']:+.1f} mL{share}"


def _spread(spread: Mapping[str, Any] | None) -> Iterator[str]:
    if spread is None:
        yield "no cohort of repeated scans was given (--repeats), so the spread of this version is not known"
        return
    yield f"scan to rescan, {spread['patients']} patients with {spread['scans']} scans:"
    for label, own in spread["labels"].items():
        if own is None:
            yield f"  {label}: not known"
            continue
        yield (
            f"  {label}: standard deviation {own['sd_ml']:.2f} mL; 95 % of differences without a change are "
            f"below {own['limit_ml']:.2f} mL (volumes of {own['least_ml']:.1f} to {own['most_ml']:.1f} mL)"
        )


def _date(each: Mapping[str, Any]) -> str:
    day = each["date"] or ""
    return f"{day[:4]}-{day[4:6]}-{day[6:]}" if len(day) == 8 else day or "-"


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
