"""Acceptance of a version at a hospital: measure, report, decide, demand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from locum.answers import write_whole
from locum.client import Client
from locum.commands.batch import channels_of, described, find, group
from locum.commands.deciding import actor_of
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.fitting import scans_sent, split
from locum.commands.following import follow
from locum.commands.terminal import Terminal, aligned
from locum.errors import JobFailed, ScanInvalid

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_aside = Terminal(stderr=True, highlight=False, soft_wrap=True, markup=False)
_USUAL = Path("acceptance.yaml")
_WORDS = {
    "met": "the thresholds are met",
    "not-met": "the thresholds are NOT met",
    "too-few": "too few masks for a verdict",
    "no-thresholds": "no thresholds were given, so there is no verdict",
}
_HEADER = (
    "label",
    "n",
    "Dice",
    "at least",
    "surface Dice",
    "HD95",
    "missed",
    "bias, mL",
    "limits of agreement",
)


def accept(
    asked: tuple[str, Path | None, str | None],
    pacs: tuple[str, str, str] | None,
    hospital: str,
    paths: Sequence[str],
    masks: Path | None,
    cohort: str | None,
    out: Path | None,
    as_json: bool,
    actor: str | None,
    jobs: int,
) -> int:
    """Send scans and masks, measure to the end, and print the report; return the exit code.

    `asked` is the model, the file of thresholds and the precision; `pacs` a PACS, and the UIDs of a study and
    a series there. Raises LocumError.
    """
    model, file, precision = asked
    thresholds = read_thresholds(file)
    if not paths and cohort is None:
        raise ScanInvalid("expected scans (--scans DIR --masks DIR), or a cohort that has them (--cohort)")
    with Client() as client:
        who = actor_of(client, actor)
        if paths:
            scans, drawn = split(group(find(paths), channels_of(described(client, model))), masks)
            if not drawn and cohort is None:
                raise ScanInvalid(
                    "expected masks of some scans, found none: give --masks FOLDER, with the mask of "
                    "NAME.nii.gz as NAME.nii.gz or NAME-mask.nii.gz"
                )
            said = (f"acceptance of {model}", None) if cohort is None else (None, None)
            cohort = scans_sent(client, hospital, model, scans, drawn, cohort, said, jobs, _aside)
        assert cohort is not None
        content = json.dumps([cohort, model, precision, thresholds, who, pacs], sort_keys=True)
        key = str(uuid.uuid5(uuid.NAMESPACE_OID, content))
        job = client.measure_acceptance(
            hospital, model, cohort, thresholds, precision=precision, pacs=pacs, actor=who, key=key
        )
        if job.state in ("failed", "cancelled"):
            job = client.measure_acceptance(
                hospital, model, cohort, thresholds, precision=precision, pacs=pacs, actor=who
            )
        _aside.print(f"job {job.id}")
        follow(_aside, ((event.type, event.data) for event in client.events(job.id)))
        ended = client.job(job.id)
        if ended.state != "succeeded":
            raise JobFailed(f"job {job.id}: expected a report, found state {ended.state}: {ended.reason}")
        document = client.acceptance(job.id)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / "acceptance.json", json.dumps(document, indent=1).encode())
            write_whole(out / "acceptance.html", client.acceptance_page(job.id))
            _aside.print(f"{out / 'acceptance.html'}, {out / 'acceptance.json'}")
    report = document["report"]
    if as_json:
        own = {name: document[name] for name in ("digest", "signature", "decision")}
        _say_json({**report, **own})
    else:
        for line in lines_of(report):
            _console.print(line)
    return DONE if report["verdict"] in ("met", "no-thresholds") else FAILED


def decide(job: str, accepted: bool, reason: str, override: bool, actor: str | None) -> None:
    """Accept or reject by the report of a job. Raises LocumError."""
    with Client() as client:
        who = actor_of(client, actor)
        _console.print(
            _decided(client.decide_acceptance(job, accepted, reason, actor=who, override=override))
        )


def set_demand(hospital: str, demanded: bool, reason: str, actor: str | None) -> None:
    """Demand acceptances before assignments, or no longer. Raises LocumError."""
    with Client() as client:
        client.demand_acceptances(hospital, demanded, reason, actor=actor_of(client, actor))


def show(hospital: str, as_json: bool) -> None:
    """Print what was decided at a hospital, newest first. Raises LocumError."""
    with Client() as client:
        found = client.acceptances(hospital)
    if as_json:
        _say_json(found)
        return
    demanded = f"demanded by {found['demanded_by']}" if found["demanded"] else "not demanded"
    _console.print(f"{hospital}: an acceptance before an assignment is {demanded}")
    for each in found["decisions"]:
        _console.print(_decided(each))


def read_thresholds(file: Path | None) -> dict[str, Any] | None:
    """The content of a file of thresholds, YAML or JSON; None without one. Raises ScanInvalid."""
    if file is None:
        if not _USUAL.is_file():
            return None
        file = _USUAL
        _aside.print(f"thresholds: {file}")
    return read_settings(file, "`labels` with the thresholds of each: `labels: {liver: {least_dice: 0.9}}`")


def read_settings(file: Path, expected: str) -> dict[str, Any]:
    """The content of a file of names with values, YAML or JSON. Raises ScanInvalid, which says `expected`."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else _yaml(text)
    except (OSError, ValueError) as error:
        raise ScanInvalid(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ScanInvalid(f"{file}: expected {expected}; found {type(found).__name__}")
    return found


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ValueError("PyYAML is not installed: `pip install pyyaml`, or write it as .json") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """What a person reads of a report."""
    yield (
        f"{report['version']} ({report['precision']}) at {report['hospital']}: {_WORDS[report['verdict']]}; "
        f"{report['n']} patients with masks, {report['without_masks']} without"
    )
    yield from aligned([_HEADER, *(_row(label, own) for label, own in report["labels"].items())])
    for check in report["checks"]:
        mark = {"passed": "✓", "failed": "✗"}.get(check["outcome"], "·")
        found = _figure(check["found"])
        yield f"  {mark} {check['label']}: {check['words']} {found} ({check['bound']} {check['limit']:g})"
    for label, own in report["labels"].items():
        if more := own["prediction_powered"]:
            yield (
                f"  {label} with {more['others']} patients without masks: Dice {_figure(more['mean'])}, at "
                f"least {_figure(more['lower_bound'])}; worth {more['as_many_as']:.1f} masks"
            )
    rollback = report["rollback"]
    if rollback["rehearsed"]:
        same = "the same mask as before" if rollback["same"] else "ANOTHER mask than before"
        yield f"  rollback to {rollback['returns_to']} rehearsed: {same}"
    else:
        yield f"  no rollback rehearsed: {rollback['why']}"
    geometry = report["geometry"]
    if geometry["tested"]:
        said = "equal" if geometry["equal"] else f"NOT EQUAL: {geometry['why']}"
        yield f"  geometry through PACS {geometry['pacs']}: {said}"
    else:
        yield f"  geometry not tested through a PACS: {geometry['why']}"
    yield f"  guard warns of {report['unlike']} of {len(report['scans'])} scans"
    yield f"another person than {report['measured_by']} decides: locum approve {report['job']} --reason WHY"


def _row(label: str, own: Mapping[str, Any]) -> tuple[str, ...]:
    missed, limits = own["missed"], own["limits"]
    return (
        label,
        str(own["n"]),
        _figure(own["dice"]),
        _figure(own["lower_bound"]),
        _figure(own["surface_dice"]),
        _figure(own["hd95"]),
        "-" if missed is None else f"{100 * missed:.0f} %",
        _figure(own["bias_ml"]),
        "-" if limits is None else f"{limits[0]:.3g} to {limits[1]:.3g}",
    )


def _say_json(found: Mapping[str, Any]) -> None:
    # ASCII alone: no name moves the cursor.
    _console.out(json.dumps(found, indent=2), highlight=False)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _decided(decision: Mapping[str, Any]) -> str:
    said = "accepted" if decision["accepted"] else "rejected"
    against = " AGAINST the verdict" if decision["override"] else ""
    return (
        f"{decision['at'][:16]}  {decision['model']} {decision['version'][:19]}… ({decision['precision']}) "
        f"{said}{against} by {decision['actor']}, measured by {decision['measured_by']}: {decision['reason']}"
    )
