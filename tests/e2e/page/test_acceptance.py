"""Acceptance on the page: one person measures a cohort with masks, another decides, and the list says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from locum.demo.service_process import free_port, running_service
from service.settings import Settings
from service.worker.runner import run_job
from tests.e2e.page.conftest import opened_page
from tests.e2e.page.test_accessibility import assert_accessible
from tests.helpers.service.routing_federation import outside_scans


class Measured:
    """A service with `organ` and the hospital `dune`, and its cohort with masks that `organ` drew."""

    def __init__(self, client: httpx.Client, settings: Settings) -> None:
        self.address, self.client, self.settings = str(client.base_url), client, settings
        client.put("/hospitals/dune", json={"name": "Dune"}).raise_for_status()
        self.cohort = str(client.post("/hospitals/dune/cohorts").headers["location"])
        for name, content in outside_scans(4).items():
            client.put(f"{self.cohort}/scans/{name}", content=content).raise_for_status()
            asked = {"model": "organ", "guard": "warn"}
            mask = client.post("/segment", files={"scan": (name, content)}, data=asked).raise_for_status()
            client.put(f"{self.cohort}/scans/{name}/mask", content=mask.content).raise_for_status()


@pytest.fixture(scope="module")
def measured(routing_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    state = tmp_path_factory.mktemp("accepted") / "state"
    with running_service(routing_store, state, free_port()) as client:
        yield Measured(client, Settings(store=routing_store, state_dir=state))


def test_one_person_measures_and_another_accepts_against_the_verdict(
    browser: Any, measured: Measured
) -> None:
    # The same person is refused, which the browser writes to its console, too.
    with opened_page(browser, measured.address, expected=("403",)) as page:
        page.goto(f"{measured.address}/#/adapt?hospital=dune&model=organ")
        panel = page.get_by_role("region", name="Acceptance")
        panel.get_by_role("button", name="Measure a version").click()
        dialog = page.get_by_role("dialog", name="Measure")
        dialog.get_by_label("Version").select_option("organ@1")
        dialog.get_by_label("Cohort").select_option(measured.cohort[-32:])
        dialog.get_by_label("organ: least Dice").fill("0.9")
        dialog.get_by_label("Your name").fill("mara")
        assert_accessible(page, "measure")
        dialog.get_by_role("button", name="Measure").click()
        page.wait_for_url(re.compile("job="))
        panel.get_by_role("button", name="organ").wait_for()
        job = page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('job')")
        assert measured.client.get(f"/jobs/{job}").json()["kind"] == "acceptance"
        run_job(job, measured.settings)
        shown = page.get_by_role("region", name="Job", exact=True)
        shown.get_by_text("Acceptance of organ").wait_for()
        shown.get_by_text("Too few masks for a verdict").wait_for(timeout=20_000)
        shown.get_by_text("No one has decided yet.").wait_for()
        assert_accessible(page, "measured")
        report = measured.client.get(f"/jobs/{job}/acceptance").json()["report"]
        (check,) = report["checks"]
        assert (check["label"], check["limit"], report["measured_by"]) == ("organ", 0.9, "mara")

        accept = shown.get_by_role("button", name="Accept against the verdict")
        decision = page.get_by_role("dialog", name="Accept against the verdict")
        accept.click()
        decision.get_by_label("Reason").fill("four masks are what there is")
        decision.get_by_label("Your name").fill("mara")
        send = decision.get_by_role("button", name="Accept against the verdict")
        send.click()
        decision.get_by_text("two persons stand behind an acceptance").wait_for()
        decision.get_by_label("Your name").fill("ines")
        send.click()
        shown.get_by_text("Accepted against the verdict by ines").wait_for()
        panel.get_by_text("accepted", exact=True).wait_for()
        assert panel.get_by_text("by ines").count() == 1
    (found,) = measured.client.get("/hospitals/dune/acceptances").json()["decisions"]
    assert (found["measured_by"], found["actor"], found["override"]) == ("mara", "ines", True)


def test_demand_is_said_and_taken_back(browser: Any, measured: Measured) -> None:
    with opened_page(browser, measured.address, expected=()) as page:
        page.goto(f"{measured.address}/#/adapt?hospital=dune&model=organ")
        panel = page.get_by_role("region", name="Acceptance")
        for title, said in (
            ("Demand it before an assignment", "Dune demands one before any assignment, by ines"),
            ("Demand it no longer", "A version is scored on the hospital's own scans with masks"),
        ):
            panel.get_by_role("button", name=title).click()
            dialog = page.get_by_role("dialog", name=title)
            dialog.get_by_label("Reason").fill("our manual")
            dialog.get_by_label("Your name").fill("ines")
            dialog.get_by_role("button", name=title).click()
            panel.get_by_text(said).wait_for()
    assert not measured.client.get("/hospitals/dune/acceptances").json()["demanded"]
