"""Adapt: files reach the cohort that they were dropped for, and a job that is gone is not asked for again."""

from __future__ import annotations

from typing import Any

from tests.e2e.page.conftest import Service, opened_page


def test_scans_of_two_hospitals_reach_their_own_cohorts(browser: Any, service: Service) -> None:
    with opened_page(browser, service.address, expected=("net::ERR_",)) as page:
        drop_for_two_hospitals(page, service)


def drop_for_two_hospitals(page: Any, service: Service) -> None:
    paths = list(service.scans.values())
    made = {
        name: service.client.post(f"/hospitals/{name}/cohorts").headers["location"]
        for name in ("dune", "aster")
    }
    held: list[Any] = []
    page.route("**/scans/*", lambda request: held.append(request))

    def wait_for(count: int) -> None:
        while len(held) < count:
            page.wait_for_timeout(20)

    def drop(hospital: str, path: Any) -> None:
        page.goto(f"{service.address}/#/adapt?hospital={hospital}&model=organ&cohort={made[hospital][-32:]}")
        page.get_by_label("Drop scans here").set_input_files(path)

    uploads = page.get_by_role("list", name="Uploads")
    start = page.get_by_role("button", name="Start the adaptation")
    drop("dune", paths[0])
    wait_for(1)
    # The second hospital's file waits for the first one's, and the first view was closed meanwhile.
    drop("aster", paths[1])
    uploads.get_by_text("waiting").wait_for()
    page.get_by_label("Hospital").select_option("dune")
    page.get_by_label("Cohort").select_option(made["dune"][-32:])
    assert start.is_disabled()
    held[0].continue_()
    uploads.get_by_text("done").wait_for()
    page.wait_for_function("button => !button.disabled", arg=start.element_handle())
    wait_for(2)
    held[1].abort()
    page.get_by_label("Hospital").select_option("aster")
    page.get_by_label("Cohort").select_option(made["aster"][-32:])
    uploads.get_by_text("failed").wait_for()
    page.unroute("**/scans/*")
    page.get_by_role("button", name="Send the failed ones again").click()
    uploads.get_by_text("done").wait_for()
    for (hospital, cohort), path in zip(made.items(), paths, strict=False):
        listed = service.client.get(f"{cohort}/scans").json()["scans"]
        assert [each["name"] for each in listed] == [path.name], hospital


def test_file_dropped_again_while_it_is_sent_is_sent_too(browser: Any, service: Service) -> None:
    path = next(iter(service.scans.values()))
    cohort = service.client.post("/hospitals/dune/cohorts").headers["location"]
    held: list[Any] = []
    with opened_page(browser, service.address, expected=()) as page:
        page.route("**/scans/*", lambda request: held.append(request))
        page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&cohort={cohort[-32:]}")
        uploads = page.get_by_role("list", name="Uploads")
        for state in ("sending", "waiting"):
            page.get_by_label("Drop scans here").set_input_files(path)
            uploads.get_by_text(state).wait_for()
        assert uploads.get_by_role("listitem").count() == 1
        for sent in (1, 2):
            while len(held) < sent:
                page.wait_for_timeout(20)
            assert uploads.get_by_text("done").count() == 0
            held[-1].continue_()
        uploads.get_by_text("done").wait_for()


def test_job_that_is_gone_is_asked_for_once(browser: Any, service: Service) -> None:
    with opened_page(browser, service.address, expected=("status of 404",)) as page:
        page.clock.install()
        asked: list[str] = []
        page.on("request", lambda sent: asked.append(sent.url) if "/jobs/" in sent.url else None)
        page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&job={32 * '0'}")
        page.get_by_text("No such job").wait_for()
        # Far beyond every pause before another attempt.
        for _ in range(3):
            page.clock.run_for(10_000)
            page.evaluate("fetch('health/live')")
        assert asked == [f"{service.address}/jobs/{32 * '0'}"]
