"""Oversee: what the page lists is what the service answers."""

from __future__ import annotations

import re
from typing import Any

from tests.e2e.page.conftest import Service, opened_page


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
    card = service.client.get("/models/organ/versions/1/card").json()
    opened = models.get_by_role("link", name="Card of organ@1").get_attribute("href")
    assert card["artefact"] in service.client.get(f"/{opened}").text
    # A composite is described by its global model.
    described = service.client.get("/models/organ.global/versions/1").json()["manifest"]
    assert card["training"]["scans"] == described["statistics"]["count"]
    assert card["training"]["metrics"].items() >= described["metrics"].items()
    models.get_by_text("The same as a table").click()
    assert models.get_by_role("row").count() == 1 + len(offered)

    row.get_by_role("link", name=serving).click()
    page.get_by_role("heading", name="Adapt a model to a hospital").wait_for()


def test_scores_of_a_version_have_the_patients_that_they_rest_on(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/#/oversee")
    models = page.get_by_role("region", name="Models")
    models.get_by_role("button", name="retina@1").press("Enter")
    models.get_by_text("Dice on the members' patients").click()
    rows = models.get_by_role("table").get_by_role("row")
    assert [rows.nth(number).inner_text().split() for number in (1, 2)] == [
        ["this", "version", "all", "0.750", "5", "0.625", "1", "few"],
        ["this", "version", "cup", "0.500", "2", "few", "–", "–"],
    ]
    assert rows.count() == 3
    # A version without scores shows none.
    models.get_by_role("button", name="organ@1").press("Enter")
    models.get_by_text("Dice on the members' patients").wait_for(state="detached")


def test_row_that_cannot_be_read_is_unknown_and_six_are_asked_for_at_once(
    browser: Any, service: Service
) -> None:
    hospitals = [
        {"id": f"h{number}", "name": f"House {number}", "site": None, "created_at": "", "updated_at": ""}
        for number in range(4)
    ]
    held: list[Any] = []
    # Three, and what other tests have published.
    offered = [each for each in service.client.get("/models").json()["models"] if each["hospital"] is None]
    rows = len(hospitals) * len(offered)
    with opened_page(browser, service.address, expected=("status of 404", "status of 500")) as page:
        # Another document: the first view's catalogue, when it arrives late, would begin all requests again.
        page.goto("about:blank")
        page.route("**/hospitals", lambda route: route.fulfill(json={"hospitals": hospitals, "next": None}))
        page.route(re.compile(r"/hospitals/h\d/serving/"), lambda route: held.append(route))
        page.goto(f"{service.address}/#/oversee")
        models = page.get_by_role("region", name="Models")
        models.get_by_role("button", name="organ@1, ").wait_for()
        page.wait_for_timeout(500)
        assert len(held) == 6
        assert "serves: unknown" in models.get_by_role("button", name="organ@1").get_attribute("aria-label")
        assert "–" not in page.get_by_role("region", name="Hospitals").inner_text()
        for answered in range(rows):
            while len(held) <= answered:
                page.wait_for_timeout(20)
            status = 500 if answered == 0 else 404
            held[answered].fulfill(status=status, json={"title": "It broke" if status == 500 else "No such"})
        table = page.get_by_role("region", name="Hospitals")
        table.get_by_role("alert").get_by_text("It broke").wait_for()
        page.wait_for_function(
            "rows => document.querySelectorAll('[aria-label=Hospitals] td').length === rows", arg=rows
        )
        cells = table.get_by_role("cell")
        page.wait_for_timeout(200)
        assert cells.all_inner_texts() == ["unknown", *["–"] * (rows - 1)]
        assert "serves: unknown" in models.get_by_role("button", name="organ@1").get_attribute("aria-label")


def test_drift_is_asked_for_once_for_each_hospital_and_six_at_once(browser: Any, service: Service) -> None:
    hospitals = [
        {"id": f"h{number}", "name": f"House {number}", "site": None, "created_at": "", "updated_at": ""}
        for number in range(8)
    ]
    models = service.client.get("/models").json()
    models["models"] = [{**models["models"][0], "name": "pool", "kind": "ssf-pool", "hospital": None}]
    usage = {
        **{"artefact": "pool@1", "digest": "sha256:0", "recent_scans": 5, "drift": 0.25},
        **{"federation": [0.5, 0.5]},
        "days": [{"day": "2026-01-02", "scans": 5, "drift": 0.25, "shares": [0.25, 0.75]}],
    }
    held: list[Any] = []
    with opened_page(browser, service.address, expected=("status of 404",)) as page:
        page.goto("about:blank")
        page.route("**/hospitals", lambda route: route.fulfill(json={"hospitals": hospitals, "next": None}))
        page.route(re.compile(r"/models($|\?)"), lambda route: route.fulfill(json=models))
        # Each row that is read draws the view again.
        page.route(
            re.compile(r"/hospitals/h\d/serving/pool$"), lambda route: route.fulfill(status=404, json={})
        )
        page.route(re.compile(r"/serving/pool/key-usage$"), lambda route: held.append(route))
        page.goto(f"{service.address}/#/oversee")
        drift = page.get_by_role("region", name="Drift")
        drift.wait_for()
        page.wait_for_timeout(500)
        assert len(held) == 6
        for answered in range(8):
            while len(held) <= answered:
                page.wait_for_timeout(20)
            held[answered].fulfill(json={"versions": [usage]})
        drift.get_by_role("rowheader", name="House 7").wait_for()
        page.wait_for_timeout(200)
        assert len(held) == 8
        assert drift.get_by_role("row").count() == 9
