"""What the page shows while the service does not answer, and how it goes on."""

from __future__ import annotations

from typing import Any

from tests.e2e.page.conftest import Service, opened_page

LOST = ("ERR_INTERNET_DISCONNECTED", "Failed to fetch", "dynamically imported module")


def test_page_says_that_the_service_is_away_and_goes_on_by_itself(browser: Any, service: Service) -> None:
    with opened_page(browser, service.address, expected=LOST) as page:
        page.goto(f"{service.address}/#/oversee")
        page.get_by_role("button", name="Register a hospital").click()
        dialog = page.get_by_role("dialog", name="Register a hospital")
        dialog.get_by_label("Name").fill("Elm")
        away = page.get_by_text("The service does not answer.")

        page.context.set_offline(True)
        away.wait_for()
        page.context.set_offline(False)
        away.wait_for(state="detached")
        assert dialog.get_by_label("Name").input_value() == "Elm"

        # A view of which nothing was loaded before.
        dialog.get_by_role("button", name="Close").click()
        page.context.set_offline(True)
        away.wait_for()
        page.get_by_role("link", name="Adapt", exact=True).click()
        page.get_by_text("It opens when the service answers again.").wait_for()
        page.context.set_offline(False)
        page.get_by_role("heading", name="Adapt a model to a hospital").wait_for()
        assert away.count() == 0


def test_view_that_was_not_read_is_read_when_the_person_tries_again(browser: Any, service: Service) -> None:
    problem = {
        "type": "urn:locum:problem:broken",
        "title": "Not read",
        "detail": "Look again.",
        "status": 500,
    }
    with opened_page(browser, service.address, expected=("status of 500",)) as page:
        page.route("**/models", lambda request: request.fulfill(status=500, json=problem), times=1)
        page.goto(f"{service.address}/#/look")
        page.reload()
        page.get_by_role("alert").get_by_text("Look again.").wait_for()
        page.get_by_role("button", name="Try again").click()
        page.get_by_role("alert").wait_for(state="detached")
