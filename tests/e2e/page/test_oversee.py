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
    models.get_by_text("organ@1", exact=True).wait_for()
    for child in service.client.get("/models/organ/versions/1").json()["descendants"]:
        assert models.get_by_text(child, exact=True).count() == 1

    row.get_by_role("link", name=serving).click()
    page.get_by_role("heading", name="Adapt a model to a hospital").wait_for()
