"""WCAG 2.2 AA by the rules of axe-core, for every view in both themes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.page.conftest import Service, opened_page

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.mark.parametrize("view", ["look", "adapt", "draw", "watch", "oversee"])
def test_view_has_no_violation(page: Any, service: Service, view: str) -> None:
    page.goto(f"{service.address}/#/{view}")
    page.get_by_role("heading", level=1).wait_for()
    if view == "draw":
        cohort = service.cohort(a=service.scans["patient-500.nii.gz"].read_bytes())
        page.goto(f"{service.address}/#/draw?hospital=dune&model=tumour&cohort={cohort[-32:]}&scan=a")
        page.get_by_role("toolbar").wait_for()
    if view == "look":
        page.get_by_text("A scan of a cohort").click()
    page.locator("select:visible, table:visible, .watch .empty").first.wait_for()
    assert_accessible(page, view)


def test_no_state_has_a_violation(browser: Any, service: Service) -> None:
    nothing = {"models": [], "unreadable": [], "hospitals": [], "jobs": [], "versions": [], "next": None}
    broken = {"type": "urn:locum:problem:broken", "title": "Not read", "detail": "Look again.", "status": 500}
    # What answers for the lists, and what the page shows then; None never answers.
    states: dict[str, tuple[dict[str, Any] | None, str]] = {
        "loading": (None, "Loading the versions|Loading models and hospitals"),
        "broken": ({"status": 500, "json": broken}, "Look again."),
        "empty": ({"json": nothing}, "Train one"),
    }
    with opened_page(browser, service.address, expected=("status of 500", "ERR_INTERNET")) as page:
        for name, views in (
            ("loading", "adapt oversee"),
            ("broken", "adapt"),
            ("empty", "look"),
        ):
            answer, words = states[name]
            page.unroute_all()
            page.route(
                re.compile(r"/(models|hospitals|jobs|lineage)(\?.*)?$"),
                lambda request, _, answer=answer: answer and request.fulfill(**answer),
            )
            for view in views.split():
                page.goto("about:blank")
                page.goto(f"{service.address}/#/{view}")
                page.get_by_text(re.compile(words)).first.wait_for()
                assert_accessible(page, f"{view}, {name}")
        page.keyboard.press("?")
        page.get_by_role("button", name="Take the tour").click()
        assert_accessible(page, "tour")
        page.keyboard.press("Escape")
        page.context.set_offline(True)
        page.get_by_text("The service does not answer.").wait_for()
        assert_accessible(page, "offline")


def assert_accessible(page: Any, state: str) -> None:
    """Run axe in both themes, and expect no finding."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-playwright-python")
    for theme in ("light", "dark"):
        # The page has the system's theme until a person chooses another.
        page.emulate_media(color_scheme=theme)
        page.locator(f"html[data-theme={theme}]").wait_for()
        # What fades in has its colours at the end alone.
        page.evaluate(
            "Promise.all(document.getAnimations()"
            ".filter((each) => each.effect.getComputedTiming().iterations !== Infinity)"
            ".map((each) => each.finished.catch(() => null)))"
        )
        found = axe.Axe().run(page, options=RULES)
        violations = [
            (each["id"], [node["html"][:160] for node in each["nodes"]])
            for each in found.response["violations"]
        ]
        assert violations == [], f"{state}, {theme}"
