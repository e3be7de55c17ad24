"""Corrections of answers: send masks that a person changed, and show what was changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from locum.answers import Correction, Report
from locum.client import Client
from locum.commands.batch import channels_of, described, find, group
from locum.commands.deciding import actor_of
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.fitting import show_job, split
from locum.commands.terminal import Terminal, aligned
from locum.errors import LocumError, Problem, ScanInvalid
from locum.reading import read

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_TIME = "%Y-%m-%d %H:%M"


def correct_all(
    paths: Sequence[str], masks: Path, hospital: str | None, request: str | None, note: str | None
) -> int:
    """Send the masks of scans as corrections of their answers; return the exit code.

    NAME-report.json beside a mask, which `locum segment` wrote, says which answer it is of, unless `request`
    does.

    Raises ScanInvalid, LocumError.
    """
    with Client() as client:
        reports = {path: _report(path) for path in sorted(masks.rglob("*-report.json"))}
        model = next((each.receipt.model.name for each in reports.values() if each is not None), None)
        channels = channels_of(described(client, model)) if model else ()
        _, drawn = split(group(find(paths), channels), masks)
        if request is not None and len(drawn) > 1:
            raise ScanInvalid(f"--request: it is the id of one answer, and {len(drawn)} scans have masks")
        failed = 0
        for scan, mask in drawn.items():
            report = reports.get(masks / f"{scan.stem}-report.json")
            of = request or (None if report is None else report.receipt.request)
            where = hospital or (None if report is None else report.receipt.options.get("hospital"))
            if of is None or not isinstance(where, str):
                failed += 1
                missing = (
                    "which answer it is of (--request)" if of is None else "of which hospital (--hospital)"
                )
                report_file = masks / f"{scan.stem}-report.json"
                said = (
                    f"{report_file} does not say"
                    if report_file.is_file()
                    else f"there is no {report_file}, as `locum segment` writes it, that says"
                )
                _console.print(f"x {scan.name}: {said} {missing}")
                continue
            try:
                stored = client.correct(where, of, mask, scan.scan, note=note, name=scan.stem)
            except Problem as problem:
                failed += 1
                _console.print(f"x {scan.name}: {problem}")
                continue
            _console.print(f"{scan.name}: {_state(stored)}")
    return FAILED if failed else DONE


def accept_answer(hospital: str, request: str, note: str | None) -> None:
    """Say that an answer is right as it is. Raises LocumError."""
    with Client() as client:
        client.accept_answer(hospital, request, note=note)
    _console.print(f"{request}: accepted")


def show_corrections(hospital: str, model: str | None, limit: int, as_json: bool) -> int:
    """Print the newest of what people changed, and sum up all of it. Raises LocumError."""
    with Client() as client:
        found = client.corrections(hospital, model, limit if as_json else None)
    if as_json:
        rows = [row for each in found for row in _flat(each)]
        # ASCII alone: no name moves the cursor.
        _console.out(json.dumps(rows, indent=2), highlight=False)
        return DONE
    header = ("answered", "model", "scanner", "label", "Dice", "surface", "+ mL", "- mL", "by", "request")
    lines = [line for each in found[:limit] for line in _lines(each)]
    for line in aligned([header, *lines]) if lines else ["no answer of this hospital was corrected yet"]:
        _console.print(line)
    if found:
        if len(found) > limit:
            _console.print(f"the newest {limit} of {len(found)} are shown (--limit); counted are all:")
        _console.print(_summary(found))
    return DONE


def find_edited(hospital: str, pacs: str, query: Sequence[str], follow: bool) -> int:
    """Look in a PACS for masks that a person edited; return the exit code. Raises LocumError."""
    asked = dict(each.partition("=")[::2] for each in query)
    if not asked or not all(asked.values()):
        raise ScanInvalid("--query: expected ATTRIBUTE=VALUE, such as StudyDate=20261101-20261130")
    with Client() as client:
        job = client.find_corrections(hospital, pacs, asked)
    return show_job(job.id, follow)


def save_corrections(hospital: str, model: str, out: Path) -> int:
    """Save scans and masks of corrections as a folder that a federation's site reads; return the exit code.

    Raises LocumError, OSError.
    """
    with Client() as client:
        found = [each for each in client.corrections(hospital, model) if each.cohort and each.scan]
        cohorts = {each.cohort for each in found if each.cohort}
        refused = [name for name in sorted(cohorts) if not client.cohort(hospital, name).raw["may_train"]]
        if refused:
            raise ScanInvalid(
                f"{hospital} has not agreed that a model learns from its corrections (cohort "
                f"{', '.join(refused)}): `locum corrections --hospital {hospital} --may-train` says so"
            )
        for each in found:
            assert each.cohort is not None
            assert each.scan is not None
            for kind, part in (("images", ""), ("labels", "/mask")):
                content = client.cohort_file(hospital, each.cohort, f"{each.scan}{part}")
                path = out / kind / f"{each.scan.replace('/', '_')}{_suffix(content)}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    _console.print(f"{out}: {len(found)} scans with masks")
    return DONE


def _suffix(content: bytes) -> str:
    kinds = {b"\x1f\x8b": ".nii.gz", b"\x89PNG": ".png", b"NRRD": ".nrrd", b"PK": ".zip", b"II": ".tif"}
    kinds |= {b"ObjectType": ".mha", b"NDims": ".mha"}
    return next((suffix for start, suffix in kinds.items() if content.startswith(start)), ".nii")


def set_consent(hospital: str, model: str | None, agreed: bool) -> None:
    """Say whether models may learn from a hospital's corrections. Raises LocumError."""
    with Client() as client:
        own = [each for each in client.cohorts(hospital) if each.raw.get("corrections_of")]
        own = [each for each in own if model is None or each.raw["corrections_of"] == model]
        for each in own:
            client.describe_cohort(hospital, each.id, may_train=agreed)
            may = "may" if agreed else "may not"
            _console.print(
                f"{each.id}: a model {may} learn from the corrections of {each.raw['corrections_of']}"
            )
    if not own:
        _console.print(f"{hospital} has no corrections yet")


def keep_answers_for(hospital: str, days: int, reason: str, actor: str | None) -> None:
    """Keep the masks of a hospital's answers for so many days, 0 for none. Raises LocumError."""
    with Client() as client:
        found = client.keep_answers(hospital, days or None, reason, actor=actor_of(client, actor))
    if found["days"] is None:
        _console.print(f"{hospital} keeps no answered masks")
    else:
        _console.print(
            f"{hospital} keeps answered masks for {found['days']} days, in at most "
            f"{found['quota_bytes'] / 2**20:.0f} MiB; {found['count']} are kept now"
        )


def _report(path: Path) -> Report | None:
    try:
        return read(Report, json.loads(path.read_bytes()))
    except (OSError, ValueError, LocumError):
        return None


def _state(stored: Correction) -> str:
    if stored.accepted:
        return "accepted as it was"
    return "stored; a worker compares it with the answer" if stored.state == "waiting" else stored.state


def _flat(each: Correction) -> list[dict[str, Any]]:
    """An object per label, or one of null figures where nothing was measured."""
    own = {name: value for name, value in each.raw.items() if name != "labels"}
    nothing = {"label": None, "dice": None, "surface_dice": None, "added_ml": None, "removed_ml": None}
    labels: dict[str, Any] = each.raw.get("labels") or {}
    return [{**own, "label": label, **change} for label, change in labels.items()] or [{**own, **nothing}]


def _lines(each: Correction) -> list[tuple[str, ...]]:
    known = (f"{each.answered_at:{_TIME}}", each.model, each.scanner or "-")
    by = (each.actor, each.request)
    if each.labels is None:
        return [(*known, each.reason or each.state, "-", "-", "-", "-", *by)]
    return [
        (
            *known,
            label,
            _number(change.dice, 3),
            _number(change.surface_dice, 3),
            _number(change.added_ml, 1),
            _number(change.removed_ml, 1),
            *by,
        )
        for label, change in each.labels.items()
    ]


def _summary(found: Sequence[Correction]) -> str:
    changed = [each for each in found if not each.accepted]
    surfaces = [
        change.surface_dice
        for each in changed
        for change in (each.labels or {}).values()
        if change.surface_dice is not None
    ]
    right = f"{len(found) - len(changed)} answers were right as they were, {len(changed)} were corrected"
    return right + (f": median surface Dice {median(surfaces):.2f}" if surfaces else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
