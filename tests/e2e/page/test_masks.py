"""From drawn masks to a candidate, and from a candidate to the masks that check it, in Chromium."""

from __future__ import annotations

from typing import Any

from tests.e2e.page.conftest import Service, shows_all_sections
from tests.helpers.service.joining_federation import drawn_scans

SCANS = drawn_scans(6, "heath")
# A job on two busy cores.
PATIENCE_MS = 300_000


def test_drawn_masks_make_a_candidate_that_further_masks_check(page: Any, service: Service) -> None:
    place = service.cohort(**{name: scan for name, (scan, _) in SCANS.items()})
    drawn, last = sorted(SCANS)[:3], sorted(SCANS)[3]
    for name in drawn:
        service.client.put(f"{place}/scans/{name}/mask", content=SCANS[name][1]).raise_for_status()
    cohort = place.rpartition("/")[2]
    page.goto(f"{service.address}#/draw?hospital=dune&model=organ&cohort={cohort}&scan={last}")
    card = page.get_by_role("region", name="Adaptation by masks")
    card.get_by_text("3 masks of 6 scans, 3 with a target.").wait_for()
    # A person's own stroke, saved before the job starts.
    page.get_by_role("button", name="No target here").click()
    card.get_by_text("4 masks of 6 scans, 3 with a target.").wait_for()
    card.get_by_role("button", name="Start the adaptation by masks").click()
    job = page.get_by_role("region", name="Job", exact=True)
    job.get_by_text("Held-out masks").wait_for(timeout=PATIENCE_MS)
    (found,) = service.client.get("/jobs", params={"hospital": "dune", "limit": 1}).json()["jobs"]
    made = service.client.get(f"/jobs/{found['id']}").json()
    assert made["options"]["preset"] == "masks"
    assert (made["result"]["masks"], made["result"]["patients"]) == (4, 4)
    assert "table" in shows_all_sections(page, service, found["id"])
    # The fits differ, and so do the heights of their points.
    points = job.locator("svg polyline").first.get_attribute("points").split()
    assert len({point.split(",")[1] for point in points}) == 3

    check = page.get_by_role("region", name="Check with masks")
    check.get_by_label("Masks", exact=True).fill("2")
    check.get_by_role("button", name="Choose scans to draw").click()
    listed = check.get_by_role("list", name="Scans to draw").get_by_role("link")
    listed.first.wait_for(timeout=PATIENCE_MS)
    names = [text.split("\n")[0].strip() for text in listed.all_inner_texts()]
    # Scans of patients without masks: the candidate has learned from the others.
    assert set(names) <= {*sorted(SCANS)[4:]}
    measure = check.get_by_role("button", name="Measure by these masks")
    assert measure.is_disabled()
    listed.first.click()
    page.get_by_role("heading", name="Draw masks").wait_for()
    for name in names:
        service.client.put(f"{place}/scans/{name}/mask", content=SCANS[name][1]).raise_for_status()
    page.go_back()
    check.get_by_text("2 of 2 scans drawn.").wait_for()
    measure.click()
    job.get_by_text("Masks of 2 scans, drawn where").wait_for(timeout=PATIENCE_MS)
    check.get_by_role("button", name="Take back what the masks decided").click()
    job.get_by_text("Masks of 2 scans, drawn where").wait_for(state="detached")
    assert "masks" not in service.client.get(f"/jobs/{found['id']}").json()["gate"]
