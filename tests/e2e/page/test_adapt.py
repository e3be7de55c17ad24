"""Adapt: files reach the cohort that they were dropped for, and what came of a job or a decision is shown."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from model_store.lens import FINGERPRINT
from model_store.manifest import GRAPH, WEIGHTS
from model_store.store import Store
from personalization.gate import CheckResult
from tests.e2e.page.conftest import Service, opened_page, shows_all_sections
from tests.helpers.model_store.dicom_files import series, turned
from tests.helpers.model_store.other_formats import save_as
from tests.integration.service.routes.test_segment_volume import nifti, publish, voxels
from tests.integration.service.worker.test_lens import SLICES, fingerprint

TABLET = {"width": 820, "height": 1180}


def assign(service: Service, path: str, actor: str, reason: str) -> None:
    """Assign `organ@1` at the path of a hospital's serving, after the last decision there."""
    service.client.put(
        path,
        json={"version": "organ@1", "actor": actor, "reason": reason},
        headers={"If-Match": service.client.get(path).headers["ETag"]},
    ).raise_for_status()


def test_an_address_that_names_what_is_not_there_adapts_nothing_else(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/#/adapt?hospital=nowhere&model=nothing")
    page.get_by_text("No hospital nowhere is registered.").wait_for()
    page.get_by_text("No model nothing that can be adapted is in the store.").wait_for()
    start = page.get_by_role("button", name="Start the adaptation")
    assert start.count() == 0
    page.get_by_label("Hospital").select_option("dune")
    page.get_by_text("No hospital nowhere is registered.").wait_for(state="detached")
    assert start.count() == 0
    page.get_by_label("Model").select_option("organ")
    start.wait_for()
    assert page.evaluate("location.hash") == "#/adapt?hospital=dune&model=organ"


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


def test_header_and_its_voxels_are_one_scan(browser: Any, service: Service, tmp_path: Path) -> None:
    save_as(next(iter(service.scans.values())), tmp_path / "case7.hdr")
    cohort = service.client.post("/hospitals/dune/cohorts").headers["location"]
    with opened_page(browser, service.address, expected=()) as page:
        page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&cohort={cohort[-32:]}")
        page.get_by_label("Drop scans here").set_input_files(sorted(tmp_path.iterdir()))
        page.get_by_role("list", name="Uploads").get_by_text("done").wait_for()
    listed = service.client.get(f"{cohort}/scans").json()["scans"]
    assert [(each["name"], each["format"]) for each in listed] == [("case7.hdr.zip", "analyze")]


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


def test_other_scans_of_one_name_get_names_of_their_own(page: Any, service: Service) -> None:
    contents = [path.read_bytes() for path in service.scans.values()]
    cohort = service.client.post("/hospitals/dune/cohorts").headers["location"]
    held: list[Any] = []
    page.route("**/scans/*", lambda request: held.append(request), times=1)
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&cohort={cohort[-32:]}")
    uploads = page.get_by_role("list", name="Uploads").get_by_role("listitem")

    def drop(content: bytes) -> None:
        page.get_by_label("Drop scans here").set_input_files(
            {"name": "scan.nii.gz", "mimeType": "", "buffer": content}
        )

    for count, content in enumerate(contents[:2], 1):
        drop(content)
        uploads.nth(count - 1).wait_for()
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    uploads.get_by_text("done").nth(1).wait_for()
    assert "Another scan is named scan.nii.gz" in uploads.nth(1).inner_text()
    # A page that does not know them learns it from the service; the same bytes keep their name.
    page.reload()
    for content in (contents[2], contents[1], contents[2]):
        with page.expect_response(lambda answer: answer.request.method == "PUT" and answer.ok):
            drop(content)
        uploads.last.get_by_text("done").wait_for()
    listed = [each["name"] for each in service.client.get(f"{cohort}/scans").json()["scans"]]
    assert len(set(listed)) == 3
    assert {name[:4] + name[-7:] for name in listed} == {"scan.nii.gz"}
    assert set(uploads.locator(".mono").all_inner_texts()) == set(listed) - {"scan.nii.gz"}


def test_series_with_files_of_the_same_names_are_two_scans(page: Any, service: Service) -> None:
    cohort = service.client.post("/hospitals/dune/cohorts").headers["location"]
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&cohort={cohort[-32:]}")
    uploads = page.get_by_role("list", name="Uploads")
    for count in (1, 2):
        voxels = np.random.default_rng(count).integers(0, 900, (4, 16, 16)).astype(np.int16)
        page.get_by_label("Drop scans here").set_input_files(
            [
                {"name": name, "mimeType": "", "buffer": content}
                for name, content in series(voxels, turned(0)).items()
            ]
        )
        uploads.get_by_text("done").nth(count - 1).wait_for()
    assert len(service.client.get(f"{cohort}/scans").json()["scans"]) == 2


def test_files_of_a_case_are_channels_of_one_scan_in_look_and_in_a_cohort(
    page: Any, service: Service, store: Store
) -> None:
    publish(store.root, "two-channels", ("T1", "FLAIR"))
    cases = {
        f"{case}_{name}.nii": nifti(voxels(10 * number + index))
        for number, case in enumerate(("p1", "p2"))
        for index, name in enumerate(("T1", "FLAIR"))
    }
    dropped = [{"name": name, "mimeType": "", "buffer": content} for name, content in cases.items()]
    cohort = service.client.post("/hospitals/dune/cohorts").headers["location"]
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=two-channels&cohort={cohort[-32:]}")
    page.get_by_label("Drop scans here").set_input_files(dropped)
    page.get_by_role("list", name="Uploads").get_by_text("done").nth(1).wait_for()
    stored = [each["name"] for each in service.client.get(f"{cohort}/scans").json()["scans"]]
    assert stored == ["p1.zip", "p2.zip"]

    page.goto(f"{service.address}/#/look?model=two-channels")
    page.set_input_files("input[type=file]", dropped[:2])
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("button", name="Receipt").click()
    files = {f"scan.{name}": (name, cases[f"p1_{name}.nii"]) for name in ("T1", "FLAIR")}
    asked = service.client.post("/segment", files=files, data={"model": "two-channels", "output": "json"})
    assert asked.json()["receipt"]["input_sha256"] in page.get_by_role("dialog").inner_text()


def test_page_and_card_show_what_the_service_says_of_a_job(page: Any, service: Service) -> None:
    """A check, a recipe and a stage that neither the page nor the card has heard of."""
    passed = CheckResult("agreement", 0.9, 0.8, True, "Dice with the parent's", "at least", "It differs.")
    failed = replace(passed, name="new_check", passed=False, failure="It lost a slice of five.")
    older = asdict(replace(failed, name="older"))
    del older["failure"]
    playbook = {
        "recipe": "new recipe",
        "promise": "A promise of practice.",
        "tried": [{"recipe": "new recipe", "predicted": 0.031, "bound": -0.008}],
        "members": {"aster": [0.02, -0.01, 0.05]},
    }
    job = service.finished_job(
        gate={
            "passed": False,
            "checks": [asdict(passed), asdict(failed), older],
            "summary": ["A gain of 3.1 points of Dice is expected."],
        },
        result={
            "playbook": playbook,
            "coefficients": {"layers": ["l0"], "models": ["aster", "global"], "values": [[0.75, 0.25]]},
            "milliseconds": {"new stage": 1500},
            "best_epoch": 0,
        },
        epochs=[{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.4, "safe": False, "reason": "too small"}],
    )
    page.set_viewport_size(TABLET)
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ&job={job}")
    shown = page.get_by_role("region", name="Job", exact=True)
    verdict = shown.get_by_text("The new version did not pass its checks")
    verdict.wait_for()
    assert verdict.bounding_box()["y"] < TABLET["height"] / 2
    assert page.evaluate("document.documentElement.scrollWidth") == TABLET["width"]
    assert page.locator(".topbar").bounding_box()["height"] < 60, "one row"
    assert shown.locator(".notice .reasons li").all_inner_texts() == [
        "It lost a slice of five.",
        "Not passed: older (Dice with the parent's).",
    ]
    assert shown.get_by_text("A gain of 3.1 points of Dice is expected.").is_visible()
    forms = shows_all_sections(page, service, job)
    assert forms == ["checks", "curves", "forest", "table", "heat-map", "table"]
    assert shown.get_by_role("row", name="new check").get_by_text("failed").is_visible()
    assert shown.get_by_role("row", name="new recipe").get_by_text("taken").is_visible()
    assert shown.get_by_role("row", name="aster").get_by_text("−0.010 to +0.050").is_visible()
    assert shown.get_by_role("row", name="l0").get_by_role("cell").all_inner_texts() == ["75 %", "25 %"]
    # From the left to the right, and a falling loss downwards.
    points = shown.locator(".curve polyline").get_attribute("points")
    assert [[float(at) for at in point.split(",")] for point in points.split()] == [[0, 6], [200, 42]]
    assert shown.locator(".curve circle.unsafe").get_attribute("cx") == "200"


def test_view_opens_at_the_newest_job_that_passed_and_names_a_cohort(page: Any, service: Service) -> None:
    gate = {"passed": True, "checks": []}
    cohort, newer, of_another_model, _set_aside = (service.cohort() for _ in range(4))
    job = service.finished_job(gate=gate, cohort=cohort[-32:])
    service.finished_job(gate={**gate, "passed": False}, cohort=newer[-32:])
    service.finished_job(gate={**gate, "passed": False}, cohort=of_another_model[-32:], model="tumour")
    page.goto(f"{service.address}/#/oversee")
    page.get_by_role("link", name="Adapt").first.click()
    page.wait_for_url(f"**job={job}*")
    assert "hospital=dune" in page.url
    assert "model=organ" in page.url
    chosen = page.get_by_label("Cohort", exact=True)
    page.wait_for_function(
        "([select, id]) => select.value === id", arg=[chosen.element_handle(), cohort[-32:]]
    )
    # Without a job, that of the model's last one that passed: the adaptations passed over the newest cohort.
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=organ")
    page.get_by_text("No job is open").wait_for()
    page.wait_for_function(
        "([select, id]) => select.value === id", arg=[chosen.element_handle(), cohort[-32:]]
    )
    # A cohort that came since waits for one.
    fresh = service.cohort()
    page.goto(f"{service.address}/?again#/adapt?hospital=dune&model=organ")
    page.wait_for_function(
        "([select, id]) => select.value === id", arg=[chosen.element_handle(), fresh[-32:]]
    )
    chosen.select_option(cohort[-32:])
    page.get_by_role("button", name="Name and note").click()
    page.get_by_label("Name", exact=True).fill("Thorax, new scanner")
    page.get_by_label("Note", exact=True).fill("sent in March")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("sent in March").wait_for()
    said = service.client.get(cohort).json()
    assert (said["name"], said["note"]) == ("Thorax, new scanner", "sent in March")
    page.get_by_role("button", name="Glossary").click()
    page.get_by_role("dialog", name="Glossary").get_by_text("Candidate", exact=True).wait_for()


def test_page_shows_shares_of_attention(page: Any, service: Service) -> None:
    job = service.finished_job(model="tumour", result={"attention": {"own": 0.75, "birch": 0.25}})
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=tumour&job={job}")
    page.get_by_text("Attention by source").wait_for()
    assert shows_all_sections(page, service, job) == [None, "bars"]
    assert page.get_by_role("row", name="own").get_by_text("75.0 %").is_visible()


def test_what_a_lens_does_is_drawn_beside_the_members(page: Any, service: Service, store: Store) -> None:
    retina = store.open("retina")
    files = {WEIGHTS: b"none", GRAPH: retina.read(GRAPH), FINGERPRINT: fingerprint(SLICES).to_bytes()}
    store.publish(retina.manifest.model_copy(update={"name": "lensed", "files": {}}), files)
    shifts = dict.fromkeys(("field", "spectrum", "quantiles"), 3.0)
    lens = {"before": shifts, "after": shifts, "shares": {}, "negated": True, "network": None}
    curves = {
        "quantiles": [[level * slope for level in range(25)] for slope in (1, -1, 1.1)],
        "spectrum": [[4 - band * slope for band in range(12)] for slope in (1, 0.5, 0.9)],
    }
    job = service.finished_job(model="lensed", result={"lens": lens, "curves": curves})
    page.goto(f"{service.address}/#/adapt?hospital=dune&model=lensed&job={job}")
    page.get_by_text("What the lens does to these scans").wait_for()
    assert shows_all_sections(page, service, job) == [None, "table", "lines", "lines"]
    figures = page.locator("figure.lines")
    assert figures.count() == 2
    assert figures.first.locator("polyline").count() == 3
    # The members' line rises from left to right, and that of the scans falls.
    members, scans, _ = (
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in figures.first.locator("polyline").evaluate_all(
            "all => all.map(each => each.getAttribute('points'))"
        )
    )
    assert members[0][0] < members[-1][0]
    assert members[0][1] > members[-1][1]
    assert scans[0][1] < scans[-1][1]


def test_decision_after_a_rejected_one_is_made_on_what_serves_by_then(page: Any, service: Service) -> None:
    path = "/hospitals/aster/serving/organ"
    service.client.put(
        path, json={"version": "organ@1", "actor": "Ada", "reason": "first"}, headers={"If-None-Match": "*"}
    ).raise_for_status()
    assign(service, path, "Ada", "second")
    page.goto(f"{service.address}/#/adapt?hospital=aster&model=organ")
    page.get_by_role("button", name="Roll back").click()
    assign(service, path, "Ida", "meanwhile")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Your name").fill("Ada")
    dialog.get_by_label("Reason").fill("again")
    dialog.get_by_role("button", name="Roll back").click()
    dialog.get_by_text("organ@1 serves now").wait_for()
    history = page.get_by_role("list", name="History", include_hidden=True)
    assert "meanwhile" in history.inner_text()
    dialog.get_by_role("button", name="Roll back").click()
    dialog.wait_for(state="detached")
    page.get_by_role("list", name="History").get_by_text("again").wait_for()
    entries = service.client.get(f"{path}/history").json()["entries"]
    assert [each["reason"] for each in entries] == [
        "the newest version; no decision was made",
        *("first", "second", "meanwhile", "again"),
    ]


def test_precision_is_chosen_where_the_store_has_graphs_in_fewer_bits(page: Any, service: Service) -> None:
    path = "/hospitals/aster/serving/organ"
    assign(service, path, "Ada", "first")
    page.goto(f"{service.address}/#/adapt?hospital=aster&model=organ")
    page.get_by_role("button", name="Roll back").wait_for()
    change = page.get_by_role("button", name="Change the precision")
    assert change.count() == 0

    def add_a_graph(route: Any) -> None:
        answer = route.fetch()
        listed = answer.json()
        listed["versions"].append({"name": "organ.aster.int8"})
        route.fulfill(response=answer, json=listed)

    page.route("**/lineage?*", add_a_graph)
    page.reload()
    change.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Precision").wait_for()
    assert dialog.get_by_label("Precision").locator("option").all_inner_texts() == [
        "float32, as trained",
        "int8, faster on a processor",
    ]
    dialog.get_by_label("Precision").select_option("int8")
    dialog.get_by_label("Your name").fill("Ada")
    dialog.get_by_label("Reason").fill("a third of the time")
    with page.expect_request("**/serving/organ") as sent:
        dialog.get_by_role("button", name="Change the precision").click()
    asked = sent.value.post_data_json
    assert (asked["version"], asked["precision"], asked["override"]) == ("organ@1", "int8", False)
    # The store has none in truth: the service says how to make one, and nothing is changed.
    dialog.get_by_text("is to answer in int8: expected a graph of it in the store").wait_for()
    assert service.client.get(path).json()["assignment"]["precision"] == "float32"
