"""People who sign in: what the page shows to each role, and how it follows a job over a bad connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.database import Hospital, Role
from service.identity import keys
from service.settings import Settings
from tests.e2e.page.conftest import Service, opened_page
from tests.helpers.service.api import NO_REDIS, Api, running
from tests.helpers.service.asking import note, take
from tests.helpers.service.queued import queued


@pytest.fixture(scope="module")
def api(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The models of `service` behind API keys, with two hospitals and no worker."""
    with behind_keys(service, tmp_path_factory.mktemp("state"), redis_url=NO_REDIS) as found:
        yield found


@contextmanager
def behind_keys(service: Service, state: Path, **settings: Any) -> Iterator[Api]:
    with running(
        Settings(store=service.store, state_dir=state, device="cpu", auth="keys", **settings)
    ) as found:
        now = datetime.now(UTC)
        with found.context.database.write() as session:
            for name in ("dune", "ridge"):
                session.add(
                    Hospital(id=name, name=name.capitalize(), site=None, created_at=now, updated_at=now)
                )
        yield found


def key(api: Api, name: str, role: Role, hospital: str | None = "dune") -> str:
    with api.context.database.write() as session:
        return keys.create(session, name, role, hospital)[1]


@contextmanager
def visitor(browser: Any, api: Api, *expected: str) -> Iterator[Any]:
    """A page of the API. Who is not signed in is rejected with 401."""
    with opened_page(browser, str(api.client.base_url), expected=("status of 401", *expected)) as opened:
        yield opened


def sign_in(page: Any, secret: str) -> None:
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()


def views(page: Any) -> list[str]:
    page.get_by_role("button", name="Sign out").wait_for()
    found: list[str] = page.get_by_role("navigation", name="Views").get_by_role("link").all_inner_texts()
    return found


def test_reader_sees_only_its_hospital_and_what_a_reader_may_do(browser: Any, api: Api) -> None:
    secret = key(api, "rita", "reader")
    with visitor(browser, api) as page:
        sign_in(page, "locum_000000000000_" + 43 * "A")
        assert "no such API key" in page.get_by_role("alert").inner_text()
        sign_in(page, secret)
        assert views(page) == ["Look", "Adapt", "Watch", "Oversee"]
        assert page.get_by_text("key:rita").is_visible()
        # The key is kept nowhere, and the session is out of reach for a script.
        assert page.evaluate("document.cookie") == ""
        assert secret not in str(page.evaluate("[{...localStorage}, {...sessionStorage}]"))
        hospitals = page.get_by_label("Hospital of the scan").locator("option")
        hospitals.get_by_text("Dune").wait_for(state="attached")
        assert hospitals.all_inner_texts() == ["Not said", "Dune"]
        # The only hospital of the key is that of the scan.
        assert page.get_by_label("Hospital of the scan").input_value() == "dune"
        assert page.get_by_text("A scan of a cohort").count() == 0

        page.get_by_role("link", name="Adapt").click()
        page.get_by_text("An operator uploads scans and starts a job.").wait_for()
        page.get_by_role("region", name="Serving").wait_for()
        # A term of the glossary is a button, too: "assigned" is one.
        for forbidden in ("Start the adaptation", re.compile("^Assign (the|against)"), "Roll back"):
            assert page.get_by_role("button", name=forbidden).count() == 0
        page.goto(f"{api.client.base_url}/#/draw")
        page.get_by_text("Your roles do not include this view").wait_for()

        # Signed out here or elsewhere, the page asks for the key again.
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
        assert page.request.get(f"{api.client.base_url}/hospitals").status == 401


def test_key_that_no_header_can_carry_is_rejected_before_it_is_sent(browser: Any, api: Api) -> None:
    with visitor(browser, api) as page:
        sign_in(page, "locum_ключ")
        assert "Copy the key again" in page.get_by_role("alert").inner_text()
        sign_in(page, key(api, "rosa", "reader"))
        assert views(page) == ["Look", "Adapt", "Watch", "Oversee"]


def test_caller_above_its_limit_reads_so_when_it_signs_in_or_out_or_returns(
    browser: Any, service: Service, tmp_path: Path
) -> None:
    with behind_keys(service, tmp_path, redis_url=None, rate_limit="1/day") as limited:
        secret = key(limited, "lina", "reader")
        alert = "Too many requests"
        with visitor(browser, limited, "status of 429") as page:
            sign_in(page, secret)
            views(page)
            page.get_by_role("button", name="Sign out").click()
            # Beside the view, which is rejected, too.
            page.locator(".frame-notes [role=alert]").get_by_text(alert).wait_for()
            assert page.get_by_role("button", name="Sign out").is_visible()
            page.reload()
            page.get_by_role("button", name="Try again").wait_for()
            assert alert in page.get_by_role("alert").inner_text()
        with visitor(browser, limited, "status of 429") as page:
            sign_in(page, secret)
            page.get_by_role("alert").filter(has_text=alert).wait_for()
            assert page.get_by_label("API key").input_value() == secret


def test_federation_sees_models_and_health_and_no_hospital(browser: Any, api: Api) -> None:
    # The service has no Redis here, so it is not ready.
    with visitor(browser, api, "status of 503") as page:
        sign_in(page, key(api, "fred", "federation", None))
        assert views(page) == ["Oversee"]
        page.get_by_role("region", name="Models").get_by_role("button", name="organ@1").wait_for()
        health = page.get_by_role("region", name="Health").get_by_role("listitem")
        health.filter(has_text="queue").get_by_text("not well").wait_for()
        assert health.filter(has_text="store").get_by_text("well", exact=True).is_visible()
        assert "Dune" not in page.get_by_role("main").inner_text()
        for hidden in ("Hospitals", "Drift", "Jobs"):
            assert page.get_by_role("region", name=hidden).count() == 0


def test_job_on_a_pacs_is_listed_in_words_to_its_hospital_alone(browser: Any, api: Api) -> None:
    with api.context.database.write() as session:
        for hospital, kind in (("dune", "pacs-segment"), ("ridge", "pacs-cohort")):
            queued(
                session,
                api.settings,
                kind=kind,
                hospital=hospital,
                model="",
                parent="",
            )
    with visitor(browser, api, "status of 503") as page:
        sign_in(page, key(api, "remy", "reader"))
        page.get_by_role("link", name="Oversee").click()
        jobs = page.get_by_role("region", name="Jobs")
        jobs.get_by_text("pacs segment").wait_for()
        assert jobs.get_by_text("pacs cohort").count() == 0


def adaptation(api: Api, service: Service, secret: str) -> str:
    """Start a job of the hospital `dune`; returns its id."""
    with httpx.Client(
        base_url=api.client.base_url, headers={"Authorization": f"Bearer {secret}"}, timeout=60
    ) as operator:
        cohort = operator.post("/hospitals/dune/cohorts").raise_for_status().headers["location"]
        for name, path in service.scans.items():
            operator.put(f"{cohort}/scans/{name}", content=path.read_bytes()).raise_for_status()
        body = {"cohort": cohort[-32:], "model": "organ"}
        found = operator.post("/hospitals/dune/adaptations", json=body).raise_for_status().json()
    return str(found["id"])


def test_job_is_followed_on_after_the_connection_was_cut(browser: Any, api: Api, service: Service) -> None:
    secret = key(api, "olga", "operator")
    job = adaptation(api, service, secret)
    lease = take(api, job)
    with visitor(browser, api, "net::ERR_") as page:
        streams: list[Any] = []
        page.on("request", lambda sent: streams.append(sent) if sent.url.endswith("/events") else None)
        sign_in(page, secret)
        views(page)
        page.goto(f"{api.client.base_url}/#/adapt?hospital=dune&model=organ&job={job}")

        def reach(number: int) -> None:
            note(api, lease, "progress", {"stage": "adapting", "epoch": number, "epochs": 9})
            page.get_by_role("status").get_by_text(f"epoch {number} of 9").wait_for()

        # A stream that is cut before its first event has no id to continue from.
        while api.context.followers.count != 1:
            page.wait_for_timeout(20)
        reach(1)
        api.cut_connections()
        # The page looks at once, and the browser opens the stream again seconds later.
        reach(2)
        while len(streams) < 2 or api.context.followers.count != 1:
            page.wait_for_timeout(100)
        assert int(streams[1].all_headers()["last-event-id"]) > 0
        reach(3)
        page.get_by_role("button", name="Cancel the job").click()
        page.get_by_role("region", name="Jobs").get_by_text("Stopping").wait_for()


def test_job_is_followed_where_a_proxy_keeps_its_events_back(
    browser: Any, api: Api, service: Service
) -> None:
    secret = key(api, "petra", "operator")
    job = adaptation(api, service, secret)
    lease = take(api, job)
    with visitor(browser, api) as page:
        page.route("**/events", lambda route: None)
        sign_in(page, secret)
        views(page)
        page.goto(f"{api.client.base_url}/#/adapt?hospital=dune&model=organ&job={job}")
        for number in (1, 2):
            note(api, lease, "progress", {"stage": "adapting", "epoch": number, "epochs": 9})
            page.get_by_role("status").get_by_text(f"epoch {number} of 9").wait_for()
        page.get_by_role("button", name="Cancel the job").click()
        page.get_by_role("region", name="Jobs").get_by_text("Stopping").wait_for()


def test_next_person_at_a_page_finds_nothing_of_the_one_before(
    browser: Any, api: Api, service: Service
) -> None:
    secrets = [key(api, name, "reader") for name in ("nina", "noel")]
    with visitor(browser, api) as page:

        def look(secret: str) -> None:
            """Sign in, and segment a scan."""
            sign_in(page, secret)
            page.get_by_text("No scan", exact=True).wait_for()
            assert page.get_by_role("heading", name="Answer").count() == 0
            assert page.evaluate("localStorage.getItem('locum-hospital')") is None
            page.get_by_label("Model").select_option("organ")
            page.get_by_label("Hospital of the scan").select_option("dune")
            page.set_input_files("input[type=file]", service.scans["patient-500.nii.gz"])
            page.get_by_role("button", name="Segment").click()
            page.get_by_role("heading", name="Answer").wait_for()
            assert "hospital=dune" in page.url

        look(secrets[0])
        page.evaluate("localStorage.setItem('locum-hospital', 'dune')")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("heading", name="Sign in").wait_for()
        assert "hospital" not in page.url
        look(secrets[1])
        # The session ends: the same person finds the answer, another one does not.
        for secret in (secrets[1], secrets[0]):
            page.context.clear_cookies()
            # An event and not a click: the dialog covers the button where another request met the end before.
            page.locator("button", has_text="Segment").dispatch_event("click")
            page.get_by_role("dialog").get_by_text("The session has ended").wait_for()
            page.keyboard.press("Escape")
            if secret is secrets[1]:
                sign_in(page, secret)
                page.get_by_role("dialog").wait_for(state="detached")
                page.get_by_role("heading", name="Answer").wait_for()
        page.evaluate("localStorage.setItem('locum-hospital', 'dune')")
        look(secrets[0])


def test_strokes_of_a_session_that_ended_are_saved_when_it_is_renewed(
    browser: Any, api: Api, service: Service
) -> None:
    secret = key(api, "oona", "operator")
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=api.client.base_url, headers=headers, timeout=60) as operator:
        cohort = operator.post("/hospitals/dune/cohorts").raise_for_status().headers["location"]
        content = service.scans["patient-500.nii.gz"].read_bytes()
        operator.put(f"{cohort}/scans/a", content=content).raise_for_status()
        with visitor(browser, api) as page:
            sign_in(page, secret)
            views(page)
            page.goto(f"{api.client.base_url}/#/draw?hospital=dune&model=tumour&cohort={cohort[-32:]}&scan=a")
            page.get_by_role("toolbar").wait_for()
            page.context.clear_cookies()
            page.locator("canvas").focus()
            page.keyboard.press("Space")
            page.get_by_role("dialog").get_by_text("The session has ended").wait_for()
            sign_in(page, secret)
            page.locator("[data-save=saved]").wait_for()
            assert operator.get(f"{cohort}/scans/a/mask").status_code == 200
            # Another person neither sees the strokes nor becomes their author.
            tag = operator.get(f"{cohort}/scans/a/mask").headers["ETag"]
            page.context.clear_cookies()
            page.locator("canvas").focus()
            for name in ("ArrowRight", "ArrowRight", "Space"):
                page.keyboard.press(name)
            page.get_by_role("dialog").get_by_text("The session has ended").wait_for()
            sign_in(page, key(api, "omar", "operator"))
            page.get_by_role("heading", name="Look at a scan").wait_for()
            assert page.get_by_text("key:omar").is_visible()
            assert operator.get(f"{cohort}/scans/a/mask").headers["ETag"] == tag
