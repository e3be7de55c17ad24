"""Draw the picture of docs/how-to/page.md: what `make demo` leaves, the answer beside the true mask.

    python -m tests.helpers.page_picture ADDRESS docs/images/page.png

ADDRESS is the last one that the demo prints. Needs Chromium, or LOCUM_CHROMIUM with its path.
"""

from __future__ import annotations

import sys

from playwright.sync_api import sync_playwright

from benchmarks.harness.chromium import launch


def main(address: str, picture: str) -> None:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="dark")
        page.goto(address)
        page.get_by_label("Drawn mask").wait_for()
        page.get_by_role("button", name="Segment").click()
        page.get_by_role("heading", name="Answer").wait_for(timeout=60_000)
        page.get_by_role("button", name="Show organ").click()
        page.wait_for_timeout(1000)  # the viewer draws its next frame
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
