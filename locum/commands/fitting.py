"""Fit a model to a hospital: register it, send a cohort, start the job, follow it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import track

from locum.answers import Check, Job, Model
from locum.client import Client
from locum.commands.batch import Found, channels_of, described, find, group
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.following import follow as follow_events
from locum.commands.terminal import Terminal, in_flags
from locum.errors import ScanInvalid

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_NEWEST = 10


def split(scans: Sequence[Found], folder: Path | None) -> tuple[list[Found], dict[Found, Path]]:
    """Tell scans and masks apart: masks are in `folder`, named as their scans or NAME-mask, else beside the
    scans as NAME-mask or NAME_mask.

    Raises ScanInvalid where no scan has a mask in the folder, or two files have the name of one.
    """
    if folder is None:
        by_stem = {scan.stem: scan for scan in scans}
        of = {mark: by_stem.get(stem) for stem in by_stem for mark in (f"{stem}-mask", f"{stem}_mask")}
        masks = {owner: by_stem[stem].path for stem, owner in of.items() if owner and stem in by_stem}
        return [scan for scan in scans if scan.path not in masks.values()], masks
    there = {found.stem: found.path for found in find([str(folder)])}
    # A DICOM mask (SEG, RTSTRUCT) is one file, which `find` takes for one of a series.
    for path in sorted(folder.rglob("*.dcm")):
        stem = str(path.relative_to(folder).with_suffix(""))
        other = there.get(stem, path)
        if other != path and other.is_file():
            raise ScanInvalid(f"{other} and {path}: both are the mask {stem}; leave one of them there")
        there[stem] = path
    masks = {
        scan: there[stem]
        for scan in scans
        for stem in (f"{scan.stem}_mask", f"{scan.stem}-mask", scan.stem)
        if stem in there
    }
    if not masks:
        raise ScanInvalid(
            f"expected masks in {folder}, found none: a scan NAME.nii.gz has the mask NAME-mask.nii.gz"
        )
    return list(scans), masks


def check(model: Model, masks: int, options: Mapping[str, Any]) -> None:
    """Reject what the service would reject once everything is sent. Raises ScanInvalid."""
    if model.hospital is not None:
        # What it was adapted from is adapted again, of which this says nothing.
        return
    preset = options.get("preset", "auto")
    if not model.adaptable:
        raise ScanInvalid(f"model {model.name} {model.summary}: no job adapts it")
    if model.presets and preset not in model.presets:
        raise ScanInvalid(
            f"--option preset={preset}: model {model.name} can be adapted by {', '.join(model.presets)}; it "
            f"{model.summary}"
        )
    if not masks and (preset == "masks" or (model.masks == "required" and preset == "auto")):
        raise ScanInvalid(
            f"model {model.name} {model.summary}: expected masks of some scans, found none: give "
            "--masks FOLDER, with the mask of NAME.nii.gz as NAME.nii.gz or NAME-mask.nii.gz"
        )


def register(hospital: str, name: str | None, site: str | None, shares_model: bool | None) -> None:
    """Register a hospital. Raises LocumError."""
    with Client() as client:
        made = client.register(hospital, name, site, shares_model)
    others = ", the model of which answers other hospitals too" if made.shares_model else ""
    member = f", a member: site {made.site}{others}" if made.site else ""
    _console.print(f"{made.id}: {made.name}{member}")


def fit(
    paths: Sequence[str],
    masks: Path | None,
    hospital: str,
    model: str | None,
    options: Sequence[str],
    said: tuple[str | None, str | None],
    cohort: str | None,
    follow: bool,
    jobs: int,
) -> int:
    """Send scans and masks, start the job; return the exit code. Raises LocumError.

    `masks` is their folder; without it they are beside the scans, where there are any. `said` is the cohort's
    name and a note on it; a cohort that is there already gets them, too.
    """
    settings = dict(map(_option, options))
    with Client() as client:
        known = described(client, model)
        scans, drawn = split(group(find(paths), channels_of(known)), masks)
        if known is None:
            offered = ", ".join(each.name for each in client.models() if each.adaptable) or "none"
            raise ScanInvalid(f"--model: expected one that the service offers, {offered}; found {model}")
        # A cohort that is there already may have masks.
        if cohort is None:
            check(known, len(drawn), settings)
        place = scans_sent(client, hospital, model, scans, drawn, cohort, said, jobs, _console)
        # A command that is repeated after an interruption finds the job that the first one made.
        asked = json.dumps([place, model, settings], sort_keys=True)
        job = client.adapt(hospital, model, place, settings, key=str(uuid.uuid5(uuid.NAMESPACE_OID, asked)))
        if job.state in ("failed", "cancelled"):
            job = client.adapt(hospital, model, place, settings)
        _console.print(f"job {job.id}")
        if not follow:
            _console.print(f"locum status {job.id} --follow    shows how it goes")
            return DONE
        return _to_the_end(client, job.id)


def scans_sent(
    client: Client,
    hospital: str,
    model: str | None,
    scans: Sequence[Found],
    drawn: Mapping[Found, Path],
    cohort: str | None,
    said: tuple[str | None, str | None],
    jobs: int,
    console: Terminal,
) -> str:
    """Send scans and masks to a new cohort, or to one that is there; return its id. Raises LocumError.

    `said` is its name and a note on it.
    """
    # Before anything is sent.
    sent_as = {scan: scan.scan for scan in scans}
    name, note = said
    if cohort is None:
        place = client.create_cohort(hospital, note, name).id
    elif name or note:
        place = client.describe_cohort(hospital, cohort, name=name, note=note).id
    else:
        place = cohort
    count = f"{len(scans)} scan{'' if len(scans) == 1 else 's'}"
    console.print(f"cohort {place}: {count}, {len(drawn)} masks")

    def send(scan: Found) -> None:
        client.add_scan(hospital, place, scan.name, sent_as[scan])
        if scan in drawn:
            client.add_mask(hospital, place, scan.name, drawn[scan], model=model)

    pool = ThreadPoolExecutor(jobs)
    try:
        sent = pool.map(send, scans)
        for _ in track(sent, "sending", len(scans), console=console, disable=not console.is_terminal):
            continue
    except BaseException:
        console.print(f"--cohort {place} with the same command goes on")
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return place


def show_job(job: str, follow: bool) -> int:
    """Show a job; return the exit code. Raises LocumError."""
    with Client() as client:
        return _to_the_end(client, job) if follow else _show(client.job(job))


def show_service(hospital: str | None) -> int:
    """Show the service, its models and newest jobs; return the exit code. Raises LocumError."""
    with Client() as client:
        ready, who = client.ready(), client.session()
        _console.print(
            f"{client.connection.url}: {ready.status}; you are {who.actor} ({', '.join(who.roles)})"
        )
        for name, part in ready.parts.items():
            if not part.ok:
                _console.print(f"  {name}: {part.detail or 'not ready'}")
        for model in client.models():
            _console.print(model_line(model))
        for job in client.jobs(hospital, limit=_NEWEST):
            reason = f": {job.reason}" if job.reason else ""
            said = job.state if job.status is None else job.status.words
            _console.print(
                f"job {job.id}  {job.kind}, {job.hospital or '-'}, {job.model or '-'}: {said}{reason}"
            )
    return DONE if ready.status != "not-ready" else FAILED


def model_line(model: Model) -> str:
    """What a person reads of a model in a list."""
    if model.latest is None:
        why = "not signed by a trusted key" if model.untrusted else "withdrawn"
        return f"model {model.name}  {why}: no version of it answers"
    newer = " (no trusted key signed its newest version)" if model.untrusted else ""
    return f"model {model.name}@{model.latest.version}  {model.kind}, {model.answers}: {model.summary}{newer}"


def _option(given: str) -> tuple[str, Any]:
    name, found, value = given.partition("=")
    if not found or not name:
        raise ScanInvalid(f"--option {given}: expected NAME=VALUE, such as epochs=5")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _to_the_end(client: Client, job: str) -> int:
    follow_events(_console, ((event.type, event.data) for event in client.events(job)))
    return _show(client.job(job))


def _show(job: Job) -> int:
    """Show a job and what follows from it; return the exit code."""
    for line in lines_of(job):
        _console.print(line)
    return FAILED if job.state in ("failed", "cancelled") else DONE


def lines_of(job: Job) -> Iterator[str]:
    """What a person reads of a job: the service's verdict in sentences, warnings, figures, what to do."""
    said = job.state if job.status is None else job.status.words
    yield f"job {job.id} ({job.kind}, {job.model or '-'}, {job.hospital or '-'}): {said}"
    if job.status is not None and job.status.doing:
        yield f"  {job.status.doing}"
    if job.reason:
        yield f"  {in_flags(job.reason)}"
    if job.no_worker:
        yield f"  {job.no_worker}"
    verdict = job.verdict
    if verdict is not None:
        yield f"  {verdict.title}."
        yield from (f"  {in_flags(sentence)}" for sentence in verdict.sentences)
        yield from (f"  - {reason}" for reason in verdict.reasons)
    for warning in job.warnings:
        yield f"  warning: {in_flags(warning)}"
    for check in () if job.gate is None else job.gate.checks:
        mark = "✗" if not check.passed else "·" if check.value is None else "✓"
        yield f"  {mark} {check.name}  {_measured(check)}"
        # A service of an earlier version sends no sections.
        if verdict is None and check.failure and not check.passed:
            yield f"    {check.failure}"
    if job.candidate is not None:
        passed = job.gate is not None and job.gate.passed
        yield f"candidate {job.candidate.reference} {'passed' if passed else 'did not pass'} its gate"
        yield f"  try it:    locum segment SCANS --model {job.candidate.reference}"
        if passed:
            yield f"  assign it: locum assign {job.candidate.reference} --reason WHY"


def _measured(check: Check) -> str:
    """A check's value with its limit: Dice in percent, and changes of it in points, as in the sentences."""
    if check.value is None or check.limit is None:
        return "not measured"
    if check.meaning.startswith("Dice"):
        return f"{100 * check.value:.1f} % ({check.bound} {100 * check.limit:g} %)"
    if check.meaning.startswith("change of Dice"):
        return f"{100 * check.value:+.1f} points ({check.bound} {100 * check.limit:+g})"
    return f"{check.value:.3f} ({check.bound} {check.limit:g})"
