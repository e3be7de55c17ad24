"""A service with no model; one with a classifier and no hospital: register one, and look at a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from locum.demo.service_process import free_port, running_service
from model_store.task import Task
from tests.e2e.page.conftest import opened_page
from tests.helpers.service.pool_federation import publish_pool

PICTURES = Task(name="pictures", kind="classification", class_names=("a", "b", "c"), size=(16, 16))


def test_empty_service_explains_itself_and_takes_up_a_model(browser: Any, tmp_path: Path) -> None:
    from tests.helpers.training.backbones import vit

    (tmp_path / "store").mkdir()
    with (
        running_service(tmp_path / "store", tmp_path / "state", free_port()) as running,
        opened_page(browser, str(running.base_url), expected=()) as page,
    ):
        page.get_by_role("heading", name="This service has no model yet").wait_for()
        commands = {
            "See it work": "locum demo",
            "Serve the model you have": "locum store import nnunet FOLDER",
            "Train one": "locum train --method iop-fl --data FOLDER",
        }
        for name, command in commands.items():
            page.get_by_role("button", name=name).click()
            assert page.locator("pre").inner_text().startswith(command)
        for view, title in (("adapt", "nothing to adapt yet"), ("draw", "nothing to draw yet")):
            page.goto(f"{running.base_url}/#/{view}")
            page.get_by_role("heading", name=title).wait_for()
            assert page.get_by_role("button", name="See it work").is_visible()
        page.goto(f"{running.base_url}/#/look")
        page.get_by_role("heading", name="This service has no model yet").wait_for()

        # Nothing is pressed and no page is read again.
        publish_pool(tmp_path / "store", PICTURES, vit(PICTURES), "pictures")
        expect = pytest.importorskip("playwright.sync_api").expect
        expect(page.get_by_label("Model")).to_have_value("pictures", timeout=30_000)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.helpers.training.backbones import vit

    root: Path = tmp_path_factory.mktemp("classes")
    publish_pool(root / "store", PICTURES, vit(PICTURES), "pictures")
    with running_service(root / "store", root / "state", free_port()) as running:
        yield running


def test_picture_gets_the_probabilities_of_a_plain_request(browser: Any, client: httpx.Client) -> None:
    content = io.BytesIO()
    pixels = np.random.default_rng(5).integers(0, 256, (40, 40, PICTURES.channels), dtype=np.uint8)
    Image.fromarray(pixels.squeeze()).save(content, "PNG")
    files = {"scan": ("cell.png", content.getvalue())}
    report = client.post("/classify", files=files, data={"model": "pictures"}).raise_for_status().json()
    with opened_page(browser, str(client.base_url), expected=()) as page:
        page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
        sent = {"name": "cell.png", "mimeType": "", "buffer": content.getvalue()}
        page.set_input_files("input[type=file]", sent)
        page.get_by_role("button", name="Classify").click()
        answer = page.get_by_role("region", name="Answer")
        answer.wait_for()
        rows = [row.split("\t") for row in answer.get_by_role("row").all_inner_texts()[1:]]
        expected = sorted(report["probabilities"].items(), key=lambda each: -each[1])
        assert [(name.strip(), value.strip()) for name, value in rows] == [
            (name, f"{100 * value:.0f} %") for name, value in expected
        ]
        assert answer.locator("strong").nth(-1).inner_text() == report["predicted"]
        for warning in report["warnings"]:
            assert page.get_by_role("status", name="Warnings").get_by_text(warning).is_visible()


def test_admin_registers_a_hospital_where_none_is(browser: Any, client: httpx.Client) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    with opened_page(browser, str(client.base_url), expected=()) as page:
        # A view that has chosen a model without any hospital takes the first one later.
        expect(page.get_by_label("Model")).not_to_have_value("", timeout=30_000)
        page.goto(f"{client.base_url}/#/adapt")
        page.get_by_text("No model that can be adapted is in the store").wait_for()
        page.get_by_role("button", name="Register a hospital").click()
        dialog = page.get_by_role("dialog")
        submit = dialog.get_by_role("button", name="Register")
        assert submit.is_disabled()
        dialog.get_by_label("Name").fill("Saint Élm, east")
        assert dialog.get_by_label("Identifier").input_value() == "saint-elm-east"
        dialog.get_by_label("Identifier").fill("elm")
        dialog.get_by_label("Name").fill("Saint Elm")
        submit.click()
        dialog.wait_for(state="detached")
        found = client.get("/hospitals/elm").raise_for_status().json()
        assert (found["name"], found["site"]) == ("Saint Elm", None)

        # What is still missing; and the only hospital is that of a scan.
        page.get_by_text("No hospital is registered").wait_for(state="detached")
        assert page.get_by_text("No model that can be adapted is in the store").is_visible()
        page.goto(f"{client.base_url}/#/look")
        # The list is drawn again when the catalogue comes, so no handle of an element is kept.
        expect(page.get_by_label("Hospital of the scan")).to_have_value("elm", timeout=30_000)

        # The same identifier would rename it.
        page.goto(f"{client.base_url}/#/oversee")
        page.get_by_role("region", name="Hospitals").get_by_text("Saint Elm").wait_for()
        page.get_by_role("button", name="Register a hospital").click()
        dialog.get_by_label("Name").fill("Another")
        dialog.get_by_label("Identifier").fill("elm")
        dialog.get_by_text("elm is registered already").wait_for()
        assert submit.is_disabled()
