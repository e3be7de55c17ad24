"""What the card of an acceptance says: the verdict by what was asked, and the figures of every label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from service.acceptance.report import WORDS
from service.jobs.sections import CheckRow, Checks, Outcome, Row, Section, Table, Tone, figure, number

_TONES: Final[Mapping[str, Tone]] = {
    "met": "good",
    "not-met": "bad",
    "too-few": "warn",
    "no-thresholds": "plain",
}
_OUTCOMES: Final[Mapping[str, Outcome]] = {"passed": "passed", "failed": "failed"}
_SIGNS: Final = {"at least": "≥", "at most": "≤"}
COLUMNS: Final = (
    "label",
    "n",
    "Dice",
    "at least",
    "surface Dice",
    "at least",
    "HD95",
    "at most",
    "missed",
    "volume bias, mL",
    "limits of agreement",
)


def acceptance_sections(report: Mapping[str, Any] | None) -> tuple[Section, ...]:
    """The verdict and the figures; before the end of the job what it will say."""
    if report is None:
        return (Section(title="The report", sentences=("It is made once every scan is answered.",)),)
    verdict = str(report.get("verdict"))
    return (
        Section(
            title=WORDS.get(verdict, verdict),
            tone=_TONES.get(verdict, "plain"),
            sentences=sentences(report),
            reasons=tuple(map(_failure, failed(report))),
            body=Checks(rows=tuple(map(_check, report.get("checks", ())))) if report.get("checks") else None,
        ),
        Section(
            title="Figures by label",
            sentences=(
                f"Bounds are one-sided and 95 % sure; below {report.get('fewest')} patients there are none. "
                f"HD95 is in {report.get('distance_unit')}.",
            ),
            body=Table(columns=COLUMNS, figures=len(COLUMNS) - 1, rows=tuple(rows(report))),
        ),
    )


def sentences(report: Mapping[str, Any]) -> tuple[str, ...]:
    """How many patients and scans, how unlike, how fast, and what follows."""
    rollback, seconds = report.get("rollback") or {}, report.get("seconds") or {}
    said = [
        f"{report.get('n')} patients with masks and {report.get('without_masks')} without, answered by "
        f"{report.get('version')} in {report.get('precision')} as it answers this hospital.",
        f"The guard warns of {report.get('unlike')} of {len(report.get('scans', ()))} scans. A scan took "
        f"{figure(number(seconds.get('median')))} s in the median.",
    ]
    if rollback.get("rehearsed"):
        same = "gave the same mask as before" if rollback.get("same") else "gave ANOTHER mask than before"
        said.append(f"A rollback to {rollback.get('returns_to')} was rehearsed: it {same}.")
    elif rollback.get("why"):
        said.append(f"No rollback was rehearsed: {rollback['why']}.")
    if geometry := report.get("geometry"):
        said.append(through_pacs(geometry))
    if report.get("acceptances_before"):
        said.append(
            f"{report['acceptances_before']} acceptances of this version were started here before this one: "
            "enough tries meet any threshold."
        )
    return (*said, "The verdict is computed. A person decides, who is not the one that measured.")


def through_pacs(geometry: Mapping[str, Any]) -> str:
    """What the way of an answer through the PACS showed."""
    if not geometry.get("tested"):
        return f"The geometry was not tested through a PACS: {geometry.get('why')}."
    if geometry.get("equal"):
        return f"An answer came back from PACS {geometry.get('pacs')} equal, voxel by voxel."
    return f"An answer came back from PACS {geometry.get('pacs')} NOT equal: {geometry.get('why')}."


def failed(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The comparisons that failed."""
    return [check for check in report.get("checks", ()) if check.get("outcome") == "failed"]


def rows(report: Mapping[str, Any]) -> list[Row]:
    """A row for each label, of `COLUMNS`."""
    found = []
    for label, own in report.get("labels", {}).items():
        limits = own.get("limits")
        cells = (
            str(own.get("n")),
            *(
                figure(number(own.get(name)))
                for name in (
                    "dice",
                    "lower_bound",
                    "surface_dice",
                    "surface_dice_lower_bound",
                    "hd95",
                    "hd95_upper_bound",
                )
            ),
            "–" if own.get("missed") is None else f"{100 * own['missed']:.0f} %",
            figure(number(own.get("bias_ml"))),
            "–" if not limits else f"{limits[0]:.4g} to {limits[1]:.4g}",
        )
        found.append(Row(name=str(label), cells=cells))
    return found


def _failure(check: Mapping[str, Any]) -> str:
    return (
        f"{check['label']}: {check['words']} is {figure(number(check['found']))}, expected "
        f"{check['bound']} {figure(number(check['limit']))}"
    )


def _check(check: Mapping[str, Any]) -> CheckRow:
    return CheckRow(
        name=f"{check['label']}: {check['threshold']}",
        meaning=str(check["words"]),
        found=figure(number(check["found"])),
        limit=f"{_SIGNS[check['bound']]} {figure(number(check['limit']))}",
        outcome=_OUTCOMES.get(check["outcome"], "not measured"),
    )
