"""Correct: an answer that is accepted, or redrawn and sent with its scan, from Look and from Watch."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from tests.e2e.page.conftest import Service
from tests.e2e.page.test_draw import picture_scan, png
from tests.helpers.waiting import wait_for


def answered(page: Any, service: Service, top: int) -> tuple[str, Any, bytes]:
    """Answer a new picture in Look for dune. Returns the request, the answer's mask and the scan."""
    content = png(picture_scan(np.uint8, top))
    page.goto(f"{service.address}/?{top}#/look?hospital=dune&model=retina")
    page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
    with page.expect_response(
        lambda found: found.url.endswith("/segment") and b"PNG" in found.body()[:8]
    ) as mask:
        page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "", "buffer": content})
        page.get_by_role("button", name="Segment").click()
    page.get_by_role("heading", name="Answer").wait_for()
    page.get_by_role("button", name="Receipt").click()
    receipt = page.get_by_role("dialog").locator("pre").inner_text()
    page.keyboard.press("Escape")
    request = receipt.split('"request": "')[1].split('"')[0]
    return request, np.asarray(Image.open(io.BytesIO(mask.value.body()))), content


def test_answer_is_redrawn_where_it_was_seen_and_sent_with_its_scan(page: Any, service: Service) -> None:
    request, mask, content = answered(page, service, 250)
    page.get_by_label("Zoom").fill("2")
    page.get_by_label("Level").fill("100")
    page.get_by_label("Level").press("Enter")
    page.get_by_role("button", name="Correct", exact=True).click()
    page.get_by_role("toolbar").wait_for()
    assert page.get_by_label("Zoom").input_value() == "2"
    assert page.get_by_label("Level").input_value() == "100"
    page.get_by_role("button", name="Accept the answer").wait_for()
    page.locator("canvas").focus()
    page.keyboard.press("Space")
    # Nothing is sent by itself, and nothing is lost without a question.
    page.get_by_role("link", name="Oversee").click()
    page.get_by_role("dialog", name="The mask is not saved").get_by_role("button", name="Close").click()
    path = f"/hospitals/dune/corrections/{request}"
    assert service.client.get(path).status_code == 404
    page.get_by_role("button", name="Send the correction").click()
    page.get_by_text("The correction is stored").wait_for()
    found = service.client.get(path).raise_for_status().json()
    assert found["accepted"] is False
    assert found["seconds"] >= 0
    scan = f"/hospitals/dune/cohorts/{found['cohort']}/scans/{found['scan']}"
    stored = np.asarray(Image.open(io.BytesIO(service.client.get(f"{scan}/mask").content)))
    expected = mask.copy()
    expected[19:22, 23:26] = 1
    assert (expected != mask).any()
    np.testing.assert_array_equal(stored, expected)
    pixels = Image.open(io.BytesIO(service.client.get(scan).content))
    np.testing.assert_array_equal(np.asarray(pixels), np.asarray(Image.open(io.BytesIO(content))))


def test_answer_is_accepted(page: Any, service: Service) -> None:
    request, _, _ = answered(page, service, 240)
    page.get_by_role("button", name="Accept", exact=True).click()
    page.get_by_role("button", name="Accepted").wait_for()
    found = service.client.get(f"/hospitals/dune/corrections/{request}").raise_for_status().json()
    assert found["accepted"] is True


def test_answer_of_which_the_scan_is_gone_is_corrected_once_it_is_opened(page: Any, service: Service) -> None:
    content = png(picture_scan(np.uint8, 230))
    asked = {"model": "retina", "hospital": "dune", "output": "png"}
    first = service.client.post("/segment", files={"scan": content}, data=asked).raise_for_status()
    request = first.headers["locum-request"]
    page.goto(f"{service.address}/?gone#/draw?hospital=dune&model=retina&correct={request}")
    page.get_by_label("Drop the scan of this answer").set_input_files(
        {"name": "a.png", "mimeType": "", "buffer": content}
    )
    page.get_by_role("button", name="Accept the answer").click()
    page.get_by_text("The answer counts as right").wait_for()
    assert service.client.get(f"/hospitals/dune/corrections/{request}").json()["accepted"] is True


def test_work_list_opens_the_scan_that_is_kept(page: Any, service: Service) -> None:
    content = png(picture_scan(np.uint8, 220))
    cohort = service.cohort(ann=content).rpartition("/")[2]
    asked = {"model": "retina", "hospital": "dune", "output": "png"}
    answer = service.client.post("/segment", files={"scan": content}, data=asked).raise_for_status()
    request = answer.headers["locum-request"]
    expected = np.asarray(Image.open(io.BytesIO(answer.content)))
    # The watcher looks at new answers every some seconds.
    wait_for(
        lambda: any(
            (each["hospital"], each["model"]) == ("dune", "retina")
            for each in service.client.get("/watch").json()["watches"]
        )
    )
    page.goto(f"{service.address}/?kept#/watch?hospital=dune&model=retina")
    listed = page.get_by_role("region", name="Masks to look at first")
    row = listed.get_by_role("row").filter(has_text=request)
    listed.get_by_role("table").wait_for()
    while row.count() == 0:
        listed.get_by_role("button", name="Next").click()
    row.get_by_role("link", name="ann", exact=True).click()
    page.get_by_role("heading", name="Answer").wait_for()
    assert f"cohort={cohort}" in page.url
    page.go_back()
    row.get_by_role("link", name=f"Correct {request}").click()
    page.get_by_role("toolbar").wait_for()
    page.locator("canvas").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Send the correction").click()
    page.get_by_text("The correction is stored").wait_for()
    found = service.client.get(f"/hospitals/dune/corrections/{request}").raise_for_status().json()
    mask = service.client.get(f"/hospitals/dune/cohorts/{found['cohort']}/scans/{found['scan']}/mask")
    stored = np.asarray(Image.open(io.BytesIO(mask.content)))
    assert 0 < (stored != expected).sum() <= 9


def test_most_doubtful_scan_comes_first_and_next(page: Any, service: Service) -> None:
    content = png(picture_scan(np.uint8, 250))
    cohort = service.cohort(a=content, b=content, c=content, d=content)
    ranks = {"a": 0.5, "b": None, "c": 0.05, "d": 0.2}

    def ranked(route: Any) -> None:
        found = route.fetch().json()
        for each in found["scans"]:
            each["review"] = ranks[each["name"]]
        route.fulfill(json=found)

    page.route("**/cohorts/*/scans", ranked)
    page.goto(f"{service.address}/#/draw?hospital=dune&model=retina&cohort={cohort[-32:]}&begin=nothing")
    scans = page.get_by_role("list", name="Scans of the cohort").get_by_role("button")
    scans.nth(3).wait_for()
    page.get_by_label("Most doubtful first").check()
    assert [each[0] for each in scans.all_inner_texts()] == ["c", "d", "a", "b"]
    assert page.get_by_text("look twice").count() == 1
    for name in ("c", "d", "a"):
        page.get_by_role("button", name="Next doubtful scan").click()
        page.get_by_label(f"Drawing on {name}").wait_for()
    page.unroute_all(behavior="wait")
