"""Adapt: scans, a job followed live, the gate's verdict, and which version serves."""

from __future__ import annotations

from typing import Any

from tests.e2e.page.conftest import Service

FINISHED = "[data-state=succeeded], [data-state=fell_back], [data-state=failed]"
PATH = "/hospitals/dune/serving/organ"


def test_candidate_is_assigned_and_rolled_back(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ")
    page.get_by_label("Cohort").select_option("")
    page.get_by_label("Drop scans here").set_input_files(list(service.scans.values()))
    page.get_by_role("list", name="Uploads").get_by_text("done").nth(3).wait_for()
    cohort = service.client.get("/hospitals/dune/cohorts").json()["cohorts"][0]
    assert cohort["scans"] == 4

    page.get_by_role("button", name="Start the adaptation").click()
    page.locator(FINISHED).wait_for(timeout=120_000)
    job = service.client.get("/jobs", params={"hospital": "dune"}).json()["jobs"][0]
    assert page.locator("[data-state]").get_attribute("data-state") == job["state"] == "succeeded"
    found = service.client.get(f"/jobs/{job['id']}").json()
    candidate, passed = found["candidate"]["reference"], found["gate"]["passed"]
    verdict = "The candidate passed its gate" if passed else "The gate rejects the candidate"
    assert page.get_by_text(verdict).is_visible()
    page.get_by_text(f"All {len(found['gate']['checks'])} checks").click()
    failed = sum(not check["passed"] for check in found["gate"]["checks"])
    assert page.get_by_role("table").get_by_text("failed", exact=True).count() == failed
    assert page.locator(".reasons li").count() == failed

    page.get_by_role("button", name="Assign the candidate" if passed else "Assign against the gate").click()
    decide(page, service, candidate, override=not passed)
    serving = service.client.get(PATH).json()
    assert serving["artefact"] == candidate
    assert page.get_by_role("list", name="History").get_by_text("better outlines").is_visible()

    # The version that served before any decision is assigned, then taken back.
    service.client.put(
        PATH,
        json={"version": "organ@1", "actor": "Ida", "reason": "to compare"},
        headers={"If-Match": service.client.get(PATH).headers["ETag"]},
    ).raise_for_status()
    page.reload()
    page.get_by_role("button", name="Roll back").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Your name").fill("Ada")
    dialog.get_by_label("Reason").fill("the comparison is over")
    dialog.get_by_role("button", name="Roll back").click()
    dialog.wait_for(state="detached")
    page.get_by_role("list", name="History").get_by_text("the comparison is over").wait_for()
    assert service.client.get(PATH).json()["artefact"] == candidate
    assert [each["actor"] for each in service.client.get(f"{PATH}/history").json()["entries"]] == [
        *("Ada", "Ida", "Ada")
    ]


def decide(page: Any, service: Service, candidate: str, override: bool) -> None:
    """Fill in the dialog. An override has to be confirmed a second time, by the hospital's name."""
    dialog = page.get_by_role("dialog")
    assert candidate in dialog.inner_text()
    submit = dialog.get_by_role("button", name="Assign")
    dialog.get_by_label("Your name").fill("Ada")
    dialog.get_by_label("Reason").fill("better outlines on both scans")
    if override:
        assert submit.is_disabled()
        dialog.get_by_label("Type dune to confirm").fill("dune")
    submit.click()
    dialog.wait_for(state="detached")
    page.get_by_text("serves now").wait_for()
