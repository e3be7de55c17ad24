"""Oversee: what the page lists is what the service answers."""

from __future__ import annotations

from typing import Any

from tests.e2e.page.conftest import Service


def test_view_shows_health_serving_lineage_and_jobs(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/#/oversee")
    health = page.get_by_role("region", name="Health")
    health.get_by_text("well").first.wait_for()
    parts = service.client.get("/health/ready").json()["parts"]
    assert health.get_by_role("listitem").count() == len(parts)

    serving = service.client.get("/hospitals/dune/serving/organ").json()["artefact"]
    row = page.get_by_role("region", name="Hospitals").get_by_role("row").filter(has_text="Dune")
    row.get_by_role("link", name=serving).wait_for()

    models = page.get_by_role("region", name="Models")
    drawn = models.get_by_role("group", name="Lineage").get_by_role("button")
    drawn.first.wait_for()
    listed = service.client.get("/lineage").json()["versions"]
    offered = {f"{each['name']}@{each['version']}": each for each in listed if each["part_of"] is None}
    assert drawn.count() == len(offered)
    edges = sum(parent in offered for each in offered.values() for parent in each["parents"])
    assert models.locator("path.edge").count() == edges
    assert "Dune" in models.get_by_role("button", name=serving).get_attribute("aria-label")
    # By keyboard.
    models.get_by_role("button", name="organ@1").press("Enter")
    models.get_by_text(offered["organ@1"]["digest"]).wait_for()
    models.get_by_text("The same as a table").click()
    assert models.get_by_role("row").count() == 1 + len(offered)

    row.get_by_role("link", name=serving).click()
    page.get_by_role("heading", name="Adapt a model to a hospital").wait_for()
