"""Transmitted bytes in the report of a FedOAP run, next to the paper's table."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.helpers.training.run_records import make_record
from training.engine.history import RoundEntry, SiteEntry
from training.report import write_report
from training.report.transmission import content

WEIGHTS = 4 * 34_181_441
ENTRY = 4 * 2 * 64 * 1024


def entry(sent: dict[str, int], received: dict[str, int]) -> SiteEntry:
    return SiteEntry(1.0, {}, sent, received, (), 0.5)


def rounds() -> tuple[RoundEntry, ...]:
    """North and south send tokens, east withholds its own; the bank is empty in the first round."""
    up, down = {"weights": WEIGHTS, "tokens": ENTRY, "metrics": 16}, {"weights": WEIGHTS}
    first = {name: entry(up, {**down, "bank": 0}) for name in ("north", "south")}
    second = {
        "north": entry(up, {**down, "bank": ENTRY}),
        "east": entry({"weights": WEIGHTS}, {**down, "bank": 2 * ENTRY}),
    }
    exported = {"north": entry({"personal": 9 * WEIGHTS}, {})}
    return (
        RoundEntry("train", 0, 2, 1.0, first),
        RoundEntry("train", 1, 2, 1.0, second),
        RoundEntry("export", 0, 1, 1.0, exported),
    )


def rows(page: Path) -> dict[str, tuple[str, str]]:
    section = page.read_text(encoding="utf-8").split("beside the paper</h3>")[1].split("</table>")[0]
    cells = re.findall(r'<tr><td>(.*?)</td><td class="n">(.*?)</td><td class="n">(.*?)</td></tr>', section)
    return {html.unescape(name): (sent, received) for name, sent, received in cells}


def test_fedoap_report_shows_bytes_per_round_next_to_the_paper(tmp_path: Path) -> None:
    record = make_record(method="fedoap", rounds=rounds(), config={"width": 64})
    page = write_report(record, tmp_path / "report.html")
    assert rows(page) == {
        "weights": ("130.39", "130.39"),
        "tokens": ("0.50", "–"),
        "metrics": ("0.00", "–"),
        "bank": ("–", "1.00"),
        "FedAvg, in the paper": ("118.37", "118.37"),
        "FedPer and FedRep, in the paper": ("71.88", "71.88"),
        "FedDP and FedOAP, in the paper": ("130.44", "130.44"),
    }
    assert "cannot be compared with them" not in page.read_text()


@pytest.mark.parametrize("config", [{"width": 16}, {"width": 128}])
def test_fedoap_report_of_another_width_warns_against_comparison(
    config: dict[str, int], tmp_path: Path
) -> None:
    record = make_record(method="fedoap", rounds=rounds(), config=config)
    said = write_report(record, tmp_path / "report.html").read_text()
    assert f"this run's has width {config['width']} and cannot be compared with them" in said


def test_transmission_is_absent_for_other_methods_and_empty_runs(tmp_path: Path) -> None:
    assert content(make_record(method="fedoap", rounds=()), None) is None
    for record in (make_record(rounds=rounds()), make_record(method="fedoap", rounds=())):
        assert "beside the paper" not in write_report(record, tmp_path / "report.html").read_text()
