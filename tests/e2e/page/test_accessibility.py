"""WCAG 2.2 AA by the rules of axe-core, for every view in both themes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.page.conftest import Service

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.mark.parametrize("view", ["look", "adapt", "draw", "oversee"])
def test_view_has_no_serious_violation(page: Any, service: Service, view: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-playwright-python")
    page.goto(f"{service.address}/#/{view}")
    page.get_by_role("heading", level=1).wait_for()
    if view == "draw":
        cohort = service.cohort(a=service.scans["patient-500.nii.gz"].read_bytes())
        page.goto(f"{service.address}/#/draw?hospital=dune&model=tumour&cohort={cohort[-32:]}&scan=a")
        page.get_by_role("toolbar").wait_for()
    if view == "look":
        page.get_by_text("A scan of a cohort").click()
    page.locator("select:visible, table:visible").first.wait_for()
    for theme in ("Light", "Dark"):
        page.get_by_role("button", name=theme, exact=True).click()
        found = axe.Axe().run(page, options=RULES)
        serious = [
            (each["id"], [node["html"][:160] for node in each["nodes"]])
            for each in found.response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], f"{view}, {theme}"
