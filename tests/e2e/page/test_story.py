"""The whole story: look at a scan, adapt a model, assign it, take it back, draw masks, join with them.

The browser reaches the service at a path of a reverse proxy, which strips it: the page loads nothing beside.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import Any

import nibabel as nib
import numpy as np

from tests.e2e.page.conftest import Service, opened_page, shows_all_sections
from tests.e2e.page.test_draw import saving
from tests.e2e.page.test_look import canonical, drawn_slice, mask_of, middle, picture, segment, shown_slice
from tests.helpers.service.joining_federation import drawn_scans
from tests.helpers.service.prefix_proxy import prefix_proxy

FINISHED = "[data-state=succeeded], [data-state=fell_back], [data-state=failed]"


def test_from_a_scan_to_an_adapted_and_a_joined_model(browser: Any, service: Service) -> None:
    port = service.client.base_url.port
    assert port is not None
    # Loopback is a trusted proxy by default.
    with prefix_proxy(port, "/a/locum", {"X-Forwarded-Prefix": "/a/locum"}) as address:
        behind = replace(service, proxied=address)
        expected = ("status of 409", "status of 412")
        with opened_page(browser, f"{address}/", expected=expected) as page:
            story(page, behind)
            oversee(page, behind)


def story(page: Any, service: Service) -> None:
    look(page, service)
    page.get_by_role("link", name="Adapt").click()
    page.get_by_role("heading", name="Adapt a model to a hospital").wait_for()
    adapted = adapt(page, service)
    decide(page, service, adapted)
    roll_back(page, service)
    page.get_by_label("Model").select_option("tumour")
    page.get_by_role("link", name="Draw them").click()
    page.get_by_role("heading", name="Draw masks").wait_for()
    draw(page, service, adapted["cohort"])
    joined = join(page, service)
    decide(page, service, joined)
    with page.expect_popup() as opened:
        page.locator("a[href$='/card']").click()
    card = opened.value
    assert card.url.startswith(f"{service.address}/jobs/{joined['id']}/card")
    assert joined["id"] in card.content()
    card.close()


def oversee(page: Any, service: Service) -> None:
    """The last view, and the description of the API, which names its server by the prefix."""
    page.get_by_role("link", name="Oversee").click()
    page.get_by_role("region", name="Health").get_by_text("well").first.wait_for()
    serving = service.client.get("/hospitals/dune/serving/organ").json()["artefact"]
    page.get_by_role("region", name="Hospitals").get_by_role("link", name=serving).first.wait_for()
    page.get_by_role("region", name="Models").get_by_role("button", name="organ@1").first.wait_for()
    page.goto(f"{service.address}/docs")
    page.get_by_text("/locum/openapi.json").wait_for()
    page.get_by_text("/segment").first.wait_for()


def look(page: Any, service: Service) -> None:
    """Segment a scan, and compare the mask on the screen with the service's."""
    segment(page, service)
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show organ").click()
    mask = canonical(mask_of(service)) == 1
    expected = picture(mask, middle(mask))
    drawn = drawn_slice(page, expected.shape)
    assert expected.sum() > 20
    overlap = 2 * (drawn & expected).sum() / (drawn.sum() + expected.sum())
    assert overlap > 0.98, f"Dice of the drawn mask {overlap:.3f}"
    # The cross-hair hides a row and a column at most.
    assert not (drawn & np.flip(expected, 1)).any()


def adapt(page: Any, service: Service) -> dict[str, Any]:
    """Add scans, start a job and follow it to the gate's verdict. Returns the job."""
    page.get_by_label("Hospital").select_option("dune")
    page.get_by_label("Model").select_option("organ")
    page.get_by_label("Cohort").select_option("")
    page.get_by_label("Drop scans here").set_input_files(list(service.scans.values()))
    page.get_by_role("list", name="Uploads").get_by_text("done").nth(3).wait_for()
    cohort = service.client.get("/hospitals/dune/cohorts").json()["cohorts"][0]
    assert cohort["scans"] == 4
    page.get_by_role("button", name="Start the adaptation").click()
    return follow(page, service)


def follow(page: Any, service: Service) -> dict[str, Any]:
    """Wait for the job of the page, and compare what it shows with the job. Returns the job."""
    page.locator(FINISHED).wait_for(timeout=180_000)
    jobs = service.client.get("/jobs", params={"hospital": "dune"}).json()["jobs"]
    # Corrections are measured by jobs, too.
    latest = next(each for each in jobs if each["kind"] == "adaptation")
    job: dict[str, Any] = service.client.get(f"/jobs/{latest['id']}").json()
    assert page.locator("[data-state]").get_attribute("data-state") == job["state"]
    assert job["state"] in ("succeeded", "fell_back"), job["reason"]
    checks = job["gate"]["checks"]
    verdict = (
        "The new version passed its checks"
        if job["gate"]["passed"]
        else "The new version did not pass its checks"
    )
    assert page.get_by_text(verdict).is_visible()
    page.get_by_text(f"All {len(checks)} checks").click()
    failed = sum(not check["passed"] for check in checks)
    table = page.get_by_role("table").filter(has_text="Verdict")
    assert table.get_by_text("failed", exact=True).count() == failed
    assert page.locator(".notice .reasons li").count() == failed
    forms = shows_all_sections(page, service, job["id"])
    # Joining learns in epochs and reports its attention; the ladder of the default playbook has neither.
    assert ("bars" in forms) == ("curves" in forms) == (job["model"] == "tumour")
    return job


def decide(page: Any, service: Service, job: dict[str, Any]) -> None:
    """Assign the job's candidate. An override has to be confirmed a second time, by the hospital's name."""
    candidate, passed = job["candidate"]["reference"], job["gate"]["passed"]
    page.get_by_role("button", name="Assign the candidate" if passed else "Assign against the gate").click()
    dialog = page.get_by_role("dialog")
    assert candidate in dialog.inner_text()
    submit = dialog.get_by_role("button", name="Assign")
    dialog.get_by_label("Your name").fill("Ada")
    dialog.get_by_label("Reason").fill("better outlines on both scans")
    if not passed:
        assert submit.is_disabled()
        # What is overridden is said where it is.
        shown = (
            page.get_by_role("region", name="Job", exact=True)
            .locator(".notice .reasons li")
            .all_inner_texts()
        )
        assert dialog.locator(".reasons li").all_inner_texts() == shown
        dialog.get_by_label("Type dune to confirm").fill("dune")
    submit.click()
    dialog.wait_for(state="detached")
    page.get_by_text("serves now").wait_for()
    serving = service.client.get(f"/hospitals/dune/serving/{job['model']}").json()
    assert serving["artefact"] == candidate
    page.get_by_role("list", name="History").get_by_text("better outlines").wait_for()


def roll_back(page: Any, service: Service) -> None:
    """Another person assigns the first version; take that back on the page, then the first decision too."""
    path = "/hospitals/dune/serving/organ"
    before = service.client.get(path)
    service.client.put(
        path,
        json={"version": "organ@1", "actor": "Ida", "reason": "to compare"},
        headers={"If-Match": before.headers["ETag"]},
    ).raise_for_status()
    page.reload()
    for reason, expected in (
        ("the comparison is over", before.json()["artefact"]),
        ("as it was at first", "organ@1"),
    ):
        page.get_by_role("button", name="Roll back").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_text(f"{expected}, which served dune before").wait_for()
        dialog.get_by_label("Your name").fill("Ada")
        dialog.get_by_label("Reason").fill(reason)
        dialog.get_by_role("button", name="Roll back").click()
        dialog.wait_for(state="detached")
        page.get_by_role("list", name="History").get_by_text(reason).wait_for()
        assert service.client.get(path).json()["artefact"] == expected
    # At the beginning of the log there is nothing to return to.
    page.get_by_text("This is the first version that served Dune").wait_for()
    assert page.get_by_role("button", name="Roll back").is_disabled()
    entries = service.client.get(f"{path}/history").json()["entries"]
    assert [each["actor"] for each in entries] == ["service", "Ada", "Ida", "Ada", "Ada"]
    assert page.get_by_role("list", name="History").get_by_text("by default").is_visible()


def draw(page: Any, service: Service, cohort: str) -> None:
    """Draw the target's box in the middle slice of three scans of the cohort."""
    where = f"/hospitals/dune/cohorts/{cohort}"
    drawn = drawn_scans(4)
    page.get_by_label("Cohort", exact=True).select_option(cohort)
    # Adapt has a button of the same name, and stays until Draw is loaded.
    page.get_by_role("button", name=f"{next(iter(drawn))} no mask").wait_for()
    start = page.get_by_role("button", name="Start the joining")
    assert start.is_disabled()
    for name in list(drawn)[:3]:
        page.get_by_role("button", name=f"{name} no mask").click()
        page.get_by_label(f"Drawing on {name}").wait_for()
        page.get_by_role("toolbar").wait_for()
        page.get_by_role("button", name="Rectangle").click()
        truth = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(drawn[name][1])))
        level = truth.shape[2] // 2
        inside = np.argwhere(picture(truth, level))
        (first, last), (left, right) = zip(inside.min(axis=0), inside.max(axis=0), strict=True)
        _, rows, columns = shown_slice(page, picture(truth, level).shape)
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + columns[left], box["y"] + rows[first])
        page.mouse.down()
        page.mouse.move(box["x"] + columns[right], box["y"] + rows[last])
        with saving(page):
            page.mouse.up()
        page.locator("[data-save=saved]").wait_for()
        mask = service.client.get(f"{where}/scans/{name}/mask").content
        expected = np.zeros_like(picture(truth, level))
        expected[first : last + 1, left : right + 1] = 1
        found = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(mask)))
        np.testing.assert_array_equal(picture(found, level), expected)
        assert found.sum() == expected.sum()
    assert page.get_by_text("3 masks of 4 scans, 3 with a target").is_visible()


def join(page: Any, service: Service) -> dict[str, Any]:
    page.get_by_role("button", name="Start the joining").click()
    return follow(page, service)
