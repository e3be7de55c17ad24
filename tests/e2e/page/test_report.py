"""The report of a run, which is a file, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training.run_records import make_record
from training.report import write_report

# What would have to be scrolled to.
CUT_OFF = """() => [document.documentElement, ...document.querySelectorAll('.sheet, figure, pre, td, th')]
    .filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.tagName + ' ' + each.innerText.slice(0, 60))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_of_the_report_is_cut_off_in_either_theme(browser: Any, tmp_path: Path, theme: str) -> None:
    path = write_report(make_record(), tmp_path / "report.html")
    for width in (820, 1280):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        page = context.new_page()
        page.goto(path.as_uri())
        assert page.get_by_text("sha256:" + "ab" * 32).is_visible()
        assert page.evaluate(CUT_OFF) == [], width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        axis = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert (paper, axis) == {
            "light": ("rgb(246, 247, 248)", "rgb(60, 64, 67)"),
            "dark": ("rgb(21, 24, 27)", "rgb(230, 232, 234)"),
        }[theme]
        context.close()
