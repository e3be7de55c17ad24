"""Look: a scan that a person drops, and its mask in the right place."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.e2e.page.conftest import Service, opened_page
from tests.helpers.model_store.dicom_files import series, turned
from tests.helpers.model_store.other_formats import SUFFIXES, save_as
from tests.helpers.service.joining_federation import drawn_scans

SCAN = "patient-500.nii.gz"
# The viewer's ground, as in web/src/viewer/viewer.ts.
GROUND = (5, 9, 10)
# Red, green and blue of NiiVue's colour map at 0, 64, 192 and 255.
PLASMA = ((13, 156, 237, 240), (8, 23, 121, 249), (135, 158, 83, 33))


def segment(page: Any, service: Service, scan: str = SCAN) -> None:
    # As bytes: what is sent of a file of the disk is not given to `route`.
    content = service.scans[scan].read_bytes()
    page.set_input_files("input[type=file]", {"name": scan, "mimeType": "", "buffer": content})
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("heading", name="Answer").wait_for(timeout=30_000)


def ask_again(page: Any) -> None:
    """Unfold what was asked: it folds up below an answer."""
    page.locator("details.question").evaluate("question => { question.open = true; }")


def mask_of(service: Service, scan: str = SCAN, **fields: str) -> nib.Nifti1Image:
    """The mask by a plain request."""
    answer = service.client.post(
        "/segment",
        files={"scan": ("scan", service.scans[scan].read_bytes())},
        data={"model": "organ", **fields},
    ).raise_for_status()
    return nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))


def canonical(image: nib.Nifti1Image) -> NDArray[Any]:
    """Voxels from left to right, posterior to anterior, inferior to superior."""
    return np.asanyarray(nib.as_closest_canonical(image).dataobj)


def middle(mask: NDArray[np.bool_]) -> int:
    """The axial slice of the mask's centre."""
    return round(float(np.argwhere(mask)[:, 2].mean()))


def picture(voxels: NDArray[Any], level: int) -> NDArray[Any]:
    """An axial slice as it is shown: rows from anterior to posterior, columns from R to L."""
    return np.flip(voxels[:, :, level].T)


def drawn_slice(
    page: Any, shape: tuple[int, ...], sign: int = 1, channels: tuple[int, int] = (0, 2), pane: str = ""
) -> NDArray[np.bool_]:
    """Which voxels of the one slice on a pane have the label's colour, by a pixel beside each centre.

    The first of its `channels` is brighter than the second, and in grey they are equal. The cross-hair
    goes through centres.
    """
    found = shown_voxels(page, shape, pane)
    return np.asarray(sign * (found[..., channels[0]] - found[..., channels[1]]) > 40)


def shown_voxels(page: Any, shape: tuple[int, ...], pane: str = "") -> NDArray[np.int64]:
    """Red, green and blue of each voxel of the one slice on a pane."""
    pixels, rows, columns = shown_slice(page, shape, pane)
    return pixels[np.ix_(rows.astype(int), columns.astype(int))]


def shown_slice(
    page: Any, shape: tuple[int, ...], pane: str = ""
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The pixels of the pane, and where in them each row and column of voxels is, beside its middle."""
    canvas = page.locator("canvas").and_(page.get_by_label(re.compile(pane)))
    canvas.hover(position={"x": 2, "y": 2})
    page.wait_for_timeout(400)
    pixels = np.asarray(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB")).astype(np.int64)
    # The slice fills most of its rows and columns; the letters of the sides are beside it.
    inside = (pixels != GROUND).any(axis=2)
    (top, bottom), (left, right) = (np.flatnonzero(inside.mean(axis=axis) > 0.3)[[0, -1]] for axis in (1, 0))
    rows = top + (np.arange(shape[0]) + 0.3) * (bottom + 1 - top) / shape[0]
    columns = left + (np.arange(shape[1]) + 0.3) * (right + 1 - left) / shape[1]
    return pixels, rows, columns


def test_scan_of_which_viewers_read_another_form_is_shown_below_its_mask(page: Any, service: Service) -> None:
    """Of both forms the viewer alone would take the qform, which is mirrored here."""
    scan = nib.Nifti1Image.from_bytes(gzip.decompress(service.scans[SCAN].read_bytes()))
    scan.set_sform(scan.affine, 1)
    scan.set_qform(np.diag([-1.0, 1.0, 1.0, 1.0]) @ scan.affine, 2)
    show_and_compare(page, service, [("scan.nii", scan.to_bytes())])


def test_dicom_series_is_shown_below_its_mask(page: Any, service: Service) -> None:
    scan = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(service.scans[SCAN].read_bytes())))
    # DICOM's rows go to posterior, its columns to the patient's left; this plane is oblique.
    slices = np.rint(np.flip(scan, (0, 1))).astype(np.int16).transpose(2, 1, 0)
    files = series(slices, turned(8))
    show_and_compare(page, service, list(files.items()))
    with page.expect_download() as saved:
        page.get_by_role("button", name="as RTSTRUCT").click()
    assert saved.value.suggested_filename.endswith("structures.dcm")
    form = {"model": "organ", "output": "dicom-rtstruct"}
    parts = [("scan", (name, content)) for name, content in files.items()]
    answer = service.client.post("/segment", files=parts, data=form).raise_for_status()
    assert Path(saved.value.path()).read_bytes() == answer.content


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scan_in_another_format_is_shown_below_its_mask(
    page: Any, service: Service, tmp_path: Path, suffix: str
) -> None:
    target = tmp_path / f"scan{suffix}"
    save_as(service.scans[SCAN], target)
    files = [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    show_and_compare(page, service, files)


def show_and_compare(page: Any, service: Service, files: list[tuple[str, bytes]]) -> None:
    """Show a scan and its answer, and compare the drawn mask with that of a plain request."""
    sent = [{"name": name, "mimeType": "", "buffer": content} for name, content in files]
    page.set_input_files("input[type=file]", sent)
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("heading", name="Answer").wait_for(timeout=30_000)
    answer = service.client.post(
        "/segment",
        files=[("scan", (name, content)) for name, content in files],
        data={"model": "organ", "output": "nifti"},
    ).raise_for_status()
    mask = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))) == 1
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show organ").click()
    expected = picture(mask, middle(mask))
    drawn = drawn_slice(page, expected.shape)
    assert expected.sum() > 20
    assert 2 * (drawn & expected).sum() / (drawn.sum() + expected.sum()) > 0.98
    assert not (drawn & ~expected).any()


def test_scan_of_a_cohort_is_shown_with_its_mask_in_the_chosen_plane(page: Any, service: Service) -> None:
    (scan, mask), *_ = drawn_scans(1).values()
    cohort = service.cohort(a=scan)
    service.client.put(f"{cohort}/scans/a/mask", content=mask).raise_for_status()
    page.set_input_files("input[type=file]", service.scans[SCAN])
    page.get_by_text("A scan of a cohort").click()
    page.get_by_label("Hospital of the cohort").select_option("dune")
    page.get_by_label("Cohort", exact=True).select_option(cohort[-32:])
    # The plane is chosen while the scan is on its way.
    late: list[Any] = []
    page.route("**/scans/a?output=stored", lambda request: late.append(request))
    page.get_by_label("Scan", exact=True).select_option("a")
    while not late:
        page.wait_for_timeout(20)
    page.get_by_role("button", name="Axial").click()
    late[0].continue_()
    page.get_by_label("Drawn mask").wait_for()
    truth = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(mask))) == 1
    expected = picture(truth, truth.shape[2] // 2)
    drawn = drawn_slice(page, expected.shape, channels=(1, 0))
    assert expected.sum() > 20
    assert 2 * (drawn & expected).sum() / (drawn.sum() + expected.sum()) > 0.98
    page.get_by_label("Drawn mask").uncheck()
    assert not drawn_slice(page, expected.shape, channels=(1, 0)).any()
    # What is segmented is the stored file, and its answer is compared with the mask.
    page.get_by_role("button", name="Segment").click()
    answer = service.client.post(
        "/segment", files={"scan": scan}, data={"model": "organ", "hospital": "dune"}
    )
    found = canonical(nib.Nifti1Image.from_bytes(gzip.decompress(answer.raise_for_status().content))) == 1
    dice = 2 * (found & truth).sum() / (found.sum() + truth.sum())
    page.get_by_text(f"Dice: organ {100 * dice:.1f} %").wait_for()
    page.get_by_text("its values are read as 1 = organ.").wait_for()
    page.get_by_role("button", name="Receipt").click()
    stored = service.client.get(f"{cohort}/scans").json()["scans"][0]["sha256"]
    assert stored in page.get_by_role("dialog").inner_text()


@pytest.mark.parametrize("status", [404, 503])
def test_drawn_mask_of_another_task_has_no_dice_and_a_failure_is_said(
    browser: Any, service: Service, status: int
) -> None:
    (scan, mask), *_ = drawn_scans(1).values()
    drawn = nib.Nifti1Image.from_bytes(gzip.decompress(mask))
    voxels = np.asanyarray(drawn.dataobj).astype(np.uint8)
    voxels[0, 0, 0] = 2
    cohort = service.cohort(a=scan, b=scan)
    service.client.put(f"{cohort}/scans/a/mask", content=mask).raise_for_status()
    other = nib.Nifti1Image(voxels, drawn.affine).to_bytes()
    service.client.put(f"{cohort}/scans/b/mask", content=other).raise_for_status()
    with opened_page(browser, service.address, expected=(f"status of {status}",)) as page:

        def ask(name: str) -> None:
            at = f"hospital=dune&model=organ&cohort={cohort[-32:]}&scan={name}"
            page.goto(f"{service.address}/?{name}#/look?{at}")
            page.get_by_label("Drawn mask").wait_for()
            with page.expect_response("**/models/organ/versions/1"):
                page.get_by_role("button", name="Segment").click()
            page.get_by_role("heading", name="Answer").wait_for()

        ask("a")
        page.get_by_text("Dice: organ").wait_for()
        # The model has no label of the value 2.
        ask("b")
        page.wait_for_timeout(500)
        assert page.get_by_role("heading", name="Beside the drawn mask").count() == 0
        # A version that is gone is no failure.
        problem = {"type": "urn:locum:problem:x", "title": "Not now", "detail": "Later.", "status": status}
        page.route("**/models/organ/versions/1", lambda route: route.fulfill(status=status, json=problem))
        ask("a")
        if status == 503:
            page.get_by_text("Not now").wait_for()
        page.wait_for_timeout(500)
        assert page.get_by_text("Not now").count() == int(status == 503)
        assert page.get_by_role("heading", name="Beside the drawn mask").count() == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_answer_has_its_receipt_and_a_command_that_returns_its_mask(
    page: Any, service: Service, tmp_path: Path
) -> None:
    page.set_input_files("input[type=file]", service.scans[SCAN])
    page.get_by_label("Who answers").select_option("member")
    page.get_by_label("Member", exact=True).select_option("aster")
    with page.expect_response("**/segment") as sent:
        page.get_by_role("button", name="Segment").click()
    page.get_by_role("button", name="Receipt").click()
    receipt = page.get_by_role("dialog")
    assert "organ.aster@1" in receipt.inner_text()
    assert hashlib.sha256(service.scans[SCAN].read_bytes()).hexdigest() in receipt.inner_text()
    page.keyboard.press("Escape")
    assert receipt.count() == 0

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy as curl").click()
    page.get_by_text("Copied").wait_for()
    (tmp_path / "SCAN").write_bytes(service.scans[SCAN].read_bytes())
    command = page.evaluate("navigator.clipboard.readText()")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=60)
    found = np.asanyarray(nib.Nifti1Image.load(tmp_path / "mask.nii.gz").dataobj).ravel(order="F")
    _, _, packed = sent.value.body().partition(b"NRRD")[2].partition(b"\n\n")
    shown = np.frombuffer(zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(packed), np.uint8)
    np.testing.assert_array_equal(found, shown)
    assert (found != np.asanyarray(mask_of(service).dataobj).ravel(order="F")).any()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save the mask").click()
    assert saved.value.suggested_filename == "patient-500-mask.nrrd"
    assert Path(saved.value.path()).read_bytes() in sent.value.body()


def test_text_that_the_browser_does_not_copy_is_not_called_copied(page: Any, service: Service) -> None:
    segment(page, service)
    # Both ways of a browser that forbids it.
    page.evaluate(
        """() => {
            navigator.clipboard.writeText = async () => { throw new Error("forbidden") };
            document.execCommand = () => false;
        }"""
    )
    page.get_by_role("button", name="Copy as curl").click()
    page.get_by_role("button", name="Not copied").wait_for()


@pytest.mark.parametrize(("model", "personalization"), [("organ", "cluster"), ("retina", "member")])
def test_personalization_of_an_address_that_the_model_does_not_offer_is_auto(
    page: Any, service: Service, model: str, personalization: str
) -> None:
    page.goto(f"{service.address}/?again#/look?model={model}&personalization={personalization}")
    page.get_by_label("Hospital of the scan").locator("option").nth(2).wait_for(state="attached")
    assert page.get_by_label("Model").input_value() == model
    assert page.get_by_label("Who answers").input_value() == "auto"


def test_viewer_that_does_not_load_is_no_fault_of_the_browser(browser: Any, service: Service) -> None:
    with opened_page(browser, service.address, expected=("net::ERR_",)) as page:
        page.route("**/viewer.js", lambda request: request.abort())
        page.set_input_files("input[type=file]", service.scans[SCAN])
        page.get_by_text("The viewer could not be loaded").wait_for()
        assert page.get_by_text("WebGL").count() == 0


def test_fingers_zoom_and_change_slices_on_a_tablet_which_says_so(browser: Any, service: Service) -> None:
    tablet = {"viewport": {"width": 820, "height": 1180}, "is_mobile": True, "has_touch": True}
    with opened_page(browser, service.address, expected=(), **tablet) as page:
        page.set_input_files("input[type=file]", service.scans[SCAN])
        page.get_by_text("Pinch: zoom. Two fingers: slices").wait_for()
        page.get_by_role("button", name="Axial").click()
        before = page.get_by_text("intensity").inner_text().split(" · ")[-1].split(",")[0]
        assert before == "axial 7 of 12"
        box = page.locator("canvas").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        send = page.context.new_cdp_session(page).send

        def move(apart: int, down: int) -> None:
            """Two fingers, which go so far from each other, and down together."""
            for step, kind in enumerate(("touchStart", "touchMove", "touchMove", "touchMove")):
                fingers = [
                    {"x": x + side * (20 + apart * step), "y": y + down * step, "id": side} for side in (0, 1)
                ]
                send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})
            send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

        move(0, 15)
        page.wait_for_function("said => !document.body.innerText.includes(said)", arg=before)
        assert float(page.get_by_label("Zoom").input_value()) == 1
        move(20, 0)
        while float(page.get_by_label("Zoom").input_value()) == 1:
            page.wait_for_timeout(20)


def test_file_that_is_no_scan_gets_a_reason(page: Any, service: Service) -> None:
    page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    assert "expected a NIfTI, NRRD or MetaImage volume" in page.get_by_role("alert").inner_text()
    assert page.get_by_text("Research use only").is_visible()


@pytest.mark.parametrize("is_packed", [True, False])
def test_volume_that_ends_early_is_rejected_in_the_service_s_words_and_not_shown_as_black(
    browser: Any, service: Service, is_packed: bool
) -> None:
    content = service.scans[SCAN].read_bytes()
    whole = content if is_packed else gzip.decompress(content)
    with opened_page(browser, service.address, expected=("status of 422",)) as page:
        sent = {"name": "cut.nii", "mimeType": "", "buffer": whole[: len(whole) // 2]}
        page.set_input_files("input[type=file]", sent)
        assert "send the whole file" in page.get_by_role("alert").inner_text()
        assert page.locator("canvas").count() == 0


def test_two_answers_are_compared(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Keep this answer").click()
    ask_again(page)
    page.get_by_label("Who answers").select_option("member")
    page.get_by_label("Member", exact=True).select_option("aster")
    page.get_by_role("button", name="Segment").click()
    kept = canonical(mask_of(service, personalization="global")) == 1
    new = canonical(mask_of(service, personalization="member", site="aster")) == 1
    level = middle(new)
    page.get_by_role("button", name="Axial").click()
    # Two answers stand side by side at once, with what a person would measure of them.
    page.get_by_label("new answer").wait_for()
    both = 2 * (kept & new).sum() / (kept.sum() + new.sum())
    row = page.get_by_role("region", name="Comparison").get_by_role("row").nth(1)
    row.wait_for()
    assert f"{100 * both:.1f} %" in row.inner_text()
    per_voxel = abs(np.linalg.det(mask_of(service).affine)) / 1000
    assert f"{kept.sum() * per_voxel:.1f} mL" in row.inner_text()
    more = (int(new.sum()) - int(kept.sum())) * per_voxel
    assert f"{'−' if more < 0 else '+'}{abs(more):.2f} mL" in row.inner_text()
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_label("new answer").wait_for(state="detached")
    page.get_by_role("button", name="Show organ").click()

    # The second viewer opens where the first one is, and their cross-hairs move together.
    page.locator("canvas").hover()
    page.mouse.wheel(0, 100)
    page.mouse.wheel(0, 100)
    page.get_by_role("button", name="Side by side").click()
    page.get_by_label("new answer").wait_for()
    for shown in (level + 2, level + 1):
        for pane, mask in (("kept answer", kept), ("new answer", new)):
            expected = picture(mask, shown)
            np.testing.assert_array_equal(drawn_slice(page, expected.shape, pane=pane), expected)
        page.get_by_label("kept answer").hover()
        page.mouse.wheel(0, -100)

    # Left of the border is the kept answer, right of it the new one; here the border divides what differs.
    page.get_by_role("button", name="Wipe").click()
    left, right = picture(kept, level), picture(new, level)
    border = int(np.median(np.nonzero(left != right)[1]))
    _, _, columns = shown_slice(page, left.shape, "kept answer")
    width = page.get_by_label("kept answer").bounding_box()["width"]
    page.get_by_label("Border").fill(f"{columns[border - 1 : border + 1].mean() / width:.2f}")
    expected = np.hstack([left[:, :border], right[:, border:]])
    assert (expected != left).any()
    assert (expected != right).any()
    np.testing.assert_array_equal(drawn_slice(page, expected.shape, pane="kept answer"), expected)

    page.get_by_role("button", name="Difference").click()
    page.get_by_label("new answer").wait_for(state="detached")
    # Violet in the kept answer alone, and lime in the new one.
    for sign, only in ((-1, kept & ~new), (1, new & ~kept)):
        expected = picture(only, level)
        np.testing.assert_array_equal(drawn_slice(page, expected.shape, sign), expected)


def test_uncertainty_is_asked_when_it_is_shown_and_lets_the_scan_through(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show organ").click()
    expected = mask_of(service, voxels="uncertainty")
    level = middle(canonical(mask_of(service)) == 1)
    shape = picture(canonical(expected), level).shape
    page.get_by_label("Mask").fill("0")
    below = shown_voxels(page, shape)
    with page.expect_response("**/segment") as sent:
        page.get_by_label("Uncertainty", exact=True).check()
    found = nib.Nifti1Image.from_bytes(gzip.decompress(sent.value.body()))
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), np.asanyarray(expected.dataobj))
    # From 5 to 100 percent in the colours of plasma, at 60 percent of opacity; below 5 percent nothing.
    percent = picture(canonical(expected), level)
    place = (percent - 5) / 95 * 255
    colours = np.stack([np.interp(place, (0, 64, 192, 255), stops) for stops in PLASMA], axis=-1)
    blended = np.where((percent > 5)[..., None], 0.4 * below + 0.6 * colours, below)
    assert 0.05 < (percent > 5).mean() < 0.95
    drawn = shown_voxels(page, shape)
    assert np.abs(drawn - blended).mean() < 3
    assert np.abs(drawn - blended).max() < 12


def fundus() -> bytes:
    """A picture with a disc of 196 pixels, of which 36 are its cup."""
    pixels = np.full((32, 32), 20, np.uint8)
    pixels[8:22, 9:23] = 150
    pixels[12:18, 13:19] = 240
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def segment_fundus(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/?again#/look?model=retina")
    page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
    page.set_input_files("input[type=file]", {"name": "eye.png", "mimeType": "", "buffer": fundus()})
    page.get_by_role("button", name="Segment").click()


def test_label_inside_another_is_listed_with_its_own_size(page: Any, service: Service) -> None:
    segment_fundus(page, service)
    answer = page.get_by_role("region", name="Answer")
    answer.wait_for()
    for row, name, size in zip(answer.get_by_role("row").all()[1:], ("cup", "disc"), (36, 196), strict=False):
        label, pixels, *_ = row.get_by_role("cell").all_inner_texts()
        assert (label.split()[0], pixels) == (name, f"{size} px")
        assert "Too few answers yet to compare; confidence 1.00" in label
    # A value of the mask, which is a set of labels, is what is drawn and hidden.
    assert answer.get_by_role("checkbox").count() == 2
    shown = drawn_slice(page, (32, 32), -1)
    assert shown.sum() == 36
    answer.get_by_label("cup + disc", exact=True).uncheck()
    assert not drawn_slice(page, (32, 32), -1).any()
    assert drawn_slice(page, (32, 32)).sum() == 160


@pytest.mark.parametrize("changes", [1, 4])
def test_mask_and_report_of_different_versions_are_asked_for_again_once(
    page: Any, service: Service, changes: int
) -> None:
    asked: list[str] = []

    def answer(route: Any) -> None:
        reply = route.fetch()
        asked.append(reply.headers["locum-graph"])
        changed = {"locum-graph": f"sha256:{len(asked)}"} if len(asked) <= changes else {}
        route.fulfill(response=reply, headers=reply.headers | changed)

    page.route("**/segment", answer)
    segment_fundus(page, service)
    if changes == 1:
        page.get_by_role("heading", name="Answer").wait_for()
    else:
        page.get_by_role("alert").get_by_text("Segment the scan again").wait_for()
        assert page.get_by_role("heading", name="Answer").count() == 0
    assert len(asked) == 4


def test_uncertainty_of_another_version_is_not_shown_over_the_mask(page: Any, service: Service) -> None:
    segment(page, service)

    def answer(route: Any) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, headers=reply.headers | {"locum-graph": "sha256:other"})

    page.route("**/segment", answer)
    page.get_by_label("Uncertainty", exact=True).check()
    page.get_by_role("alert").get_by_text("another version than the mask").wait_for()


def test_scan_opened_while_an_uncertainty_is_asked_for_is_shown_at_once(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Axial").click()
    held: list[Any] = []
    page.route("**/segment", lambda request: held.append(request))
    page.get_by_label("Uncertainty", exact=True).check()
    while not held:
        page.wait_for_timeout(20)
    voxels = np.zeros((16, 16, 8), np.int16)
    voxels[:8] = 900
    other = nib.Nifti1Image(voxels, np.diag([2.0, 2.0, 4.0, 1.0]))
    with page.expect_event("requestfailed", lambda sent: sent.url.endswith("/segment")):
        page.set_input_files(
            "input[type=file]", {"name": "other.nii", "mimeType": "", "buffer": other.to_bytes()}
        )
    page.get_by_label("Scan other.nii").wait_for()
    left = shown_voxels(page, (16, 16)).mean(axis=2) > 128
    # The patient's left, which is the end of the first axis, is on the right of the picture.
    np.testing.assert_array_equal(left, picture(voxels, 4) == 900)


def test_difference_of_models_with_other_labels_compares_their_names(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Keep this answer").click()

    def rename(route: Any) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, body=reply.body().replace(b'"organ"', b'"tumor"'))

    page.route("**/segment", rename)
    ask_again(page)
    page.get_by_role("button", name="Segment").click()
    page.get_by_label("tumor", exact=True).wait_for()
    mask = canonical(mask_of(service)) == 1
    level = middle(mask)
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show tumor").click()
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_label("new answer").wait_for(state="detached")
    legend = page.get_by_role("list", name="Kept labels")
    assert legend.count() == 0
    page.get_by_role("button", name="Kept", exact=True).click()
    assert legend.inner_text() == "organ"
    page.get_by_role("button", name="Difference").click()
    # Another label in each is drawn in crimson.
    expected = picture(mask, level)
    np.testing.assert_array_equal(drawn_slice(page, expected.shape, channels=(0, 1)), expected)


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080), (820, 1180)], ids=lambda size: f"{size[0]}")
def test_warning_is_in_sight_without_scrolling(page: Any, service: Service, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(f"{service.address}/?again#/look?model=tumour&hospital=dune")
    page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
    segment(page, service)
    answer = page.get_by_role("region", name="Answer")
    surety = answer.get_by_text("confidence 0.").first
    for shown in (page.get_by_text("Do not rely on this mask").first, surety):
        box = shown.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= size[1]
    # The first thing that the answer says, before any size.
    assert answer.inner_text().index("warning") < answer.inner_text().index("mL")
    canvas = page.locator("canvas").bounding_box()
    assert canvas["height"] > size[1] / 3


def test_model_that_needs_masks_is_not_the_first_choice(page: Any, service: Service) -> None:
    page.get_by_label("Model").and_(page.locator("select:has(option)")).wait_for()
    names = page.get_by_label("Model").locator("option").all_inner_texts()
    assert set(names) == {"organ", "retina", "tumour"}
    assert names[-1] == "tumour"
    page.wait_for_function(
        "select => select.value === 'organ'", arg=page.get_by_label("Model").element_handle()
    )
    # Where there is no other, a person chooses it.
    found = service.client.get("/models").json()
    found["models"] = [each for each in found["models"] if each["name"] == "tumour"]
    page.route("**/models", lambda route: route.fulfill(json=found))
    page.reload()
    page.get_by_label("Model").locator("option", has_text="Choose a model").wait_for(state="attached")
    page.set_input_files("input[type=file]", service.scans[SCAN])
    page.locator("canvas").wait_for()
    assert page.get_by_role("button", name="Segment").is_disabled()
    page.get_by_label("Model").select_option("tumour")
    page.locator("button:enabled", has_text="Segment").wait_for()


def test_first_model_is_the_hospital_s_assigned_one_and_never_a_zero_shot_one(
    page: Any, service: Service
) -> None:
    service.client.put("/hospitals/hill", json={"name": "Hill"}).raise_for_status()
    model, hospital = page.get_by_label("Model"), page.get_by_label("Hospital of the scan")

    def first(address: str, expected: str, at: str) -> None:
        page.goto(f"{service.address}/?{address}")
        page.wait_for_function(
            "([select, value]) => select.value === value", arg=[model.element_handle(), expected]
        )
        assert hospital.input_value() == at

    first("1#/look?hospital=hill", "organ", "hill")
    for version in ("retina@1", "tumour@1"):
        path = f"/hospitals/hill/serving/{version.split('@')[0]}"
        body = {"version": version, "actor": "Ada", "reason": "ours"}
        service.client.put(path, json=body, headers={"If-None-Match": "*"}).raise_for_status()
    # The latest decision is on a version that knows no mask of this hospital.
    first("2#/look?hospital=hill", "retina", "hill")
    first("3#/look?hospital=hill&model=tumour", "tumour", "hill")
    # A person's choice of the hospital brings its model, and is remembered.
    first("4#/look", "organ", "")
    hospital.select_option("hill")
    page.wait_for_function("select => select.value === 'retina'", arg=model.element_handle())
    assert page.url.endswith("#/look?hospital=hill")
    first("5#/look", "retina", "hill")
    # A model that a person named stays.
    model.select_option("tumour")
    hospital.select_option("")
    hospital.select_option("hill")
    assert model.input_value() == "tumour"
    assert page.url.endswith("#/look?model=tumour&hospital=hill")


def test_model_of_an_address_stays_when_its_scan_comes_before_the_models(page: Any, service: Service) -> None:
    cohort = service.cohort(a=service.scans[SCAN].read_bytes())
    late: list[Any] = []
    page.route("**/models", lambda route: late.append(route))
    at = f"hospital=dune&model=retina&cohort={cohort[-32:]}&scan=a"
    page.goto(f"{service.address}/?again#/look?{at}")
    page.get_by_label("Scan a").wait_for()
    for route in late:
        route.continue_()
    model = page.get_by_label("Model")
    page.wait_for_function("select => select.value !== ''", arg=model.element_handle())
    page.wait_for_timeout(500)
    assert model.input_value() == "retina"
    assert "model=retina" in page.url
    assert page.get_by_label("Hospital of the scan").input_value() == "dune"


def test_model_of_an_address_is_not_replaced_by_an_earlier_search(page: Any, service: Service) -> None:
    held: list[Any] = []
    page.route("**/serving/*", lambda route: held.append(route))
    page.goto(f"{service.address}/?again#/look?hospital=dune")
    while not held:
        page.wait_for_timeout(20)
    page.get_by_role("link", name="Adapt").click()
    page.get_by_role("heading", name="Adapt a model").wait_for()
    page.evaluate("location.hash = '#/look?hospital=dune&model=retina'")
    page.get_by_role("heading", name="Look at a scan").wait_for()
    model = page.get_by_label("Model")
    # The list of the view before may still be there: no handle of it.
    model.locator("option:checked", has_text="retina").wait_for(state="attached")
    for route in held:
        route.continue_()
    page.wait_for_timeout(500)
    assert model.input_value() == "retina"


def test_what_an_address_names_and_is_not_there_is_replaced_by_no_other(
    browser: Any, service: Service
) -> None:
    # The cohorts of no hospital.
    with opened_page(browser, service.address, expected=("status of 404",)) as page:
        page.evaluate("localStorage.setItem('locum-hospital', 'dune')")
        model, hospital = page.get_by_label("Model"), page.get_by_label("Hospital of the scan")
        for named, at in (("dune", "dune"), ("gone", "")):
            page.goto(f"{service.address}/?{named}#/look?hospital={named}&model=gone")
            model.locator("option", has_text="Choose a model").wait_for(state="attached")
            assert (model.input_value(), hospital.input_value()) == ("", at)
        # Another hospital does not bring its model in place of the one that was named.
        hospital.select_option("aster")
        assert model.input_value() == ""
        assert page.url.endswith("#/look?hospital=aster&model=gone")
        page.goto(f"{service.address}/?no-model#/look?hospital=gone")
        page.wait_for_function("select => select.value === 'organ'", arg=model.element_handle())
        assert hospital.input_value() == ""


def test_window_and_place_are_in_the_scan_s_own_units(page: Any, service: Service) -> None:
    scan = nib.Nifti1Image.from_bytes(gzip.decompress(service.scans[SCAN].read_bytes()))
    voxels = canonical(scan)
    segment(page, service)
    page.get_by_role("button", name="Axial").click()
    page.get_by_label("Window").select_option("whole")
    low, high = float(voxels.min()), float(voxels.max())
    assert float(page.get_by_label("Level").input_value()) == pytest.approx((low + high) / 2, rel=1e-3)
    assert float(page.get_by_label("Width").input_value()) == pytest.approx(high - low, rel=1e-3)
    assert page.get_by_label("Window").locator("option").count() == 3, "no CT: its least value is not air"

    page.get_by_role("button", name="Show organ").click()
    page.get_by_label("Mask").fill("0")
    level = middle(canonical(mask_of(service)) == 1)
    expected = picture(voxels, level).astype(float)
    for low, high in ((0.0, 100.0), (100.0, 300.0)):
        page.get_by_label("Level").fill(f"{(low + high) / 2}")
        page.get_by_label("Level").press("Enter")
        page.get_by_label("Width").fill(f"{high - low}")
        page.get_by_label("Width").press("Enter")
        grey = np.clip((expected - low) / (high - low), 0, 1) * 255
        shown = shown_voxels(page, expected.shape)[..., 1]
        assert np.abs(shown - grey).mean() < 6
        assert (grey > 250).mean() + (grey < 5).mean() > 0.02

    page.get_by_role("button", name="Full screen").click()
    page.get_by_role("button", name="Leave full screen").wait_for()
    assert page.evaluate("document.fullscreenElement.className") == "stage"
    page.get_by_role("button", name="Leave full screen").click()
    page.get_by_role("button", name="Full screen", exact=True).wait_for()

    place = page.get_by_text("intensity").inner_text()
    found = re.search(
        r"([\d.]+) ([LR]), ([\d.]+) ([PA]), ([\d.]+) ([IS]) mm · intensity (\S+) · axial (\d+)", place
    )
    assert found, place
    x, y, z = (float(found[i]) * (-1 if found[i + 1] in "LPI" else 1) for i in (1, 3, 5))
    index = np.rint(np.linalg.inv(scan.affine) @ [x, y, z, 1])[:3].astype(int)
    assert float(found[7]) == pytest.approx(float(np.asanyarray(scan.dataobj)[tuple(index)]), rel=1e-3)
    assert int(found[8]) == level + 1


def test_an_address_that_asks_for_it_has_the_answer_drawn_once(page: Any, service: Service) -> None:
    cohort = service.cohort(a=service.scans[SCAN].read_bytes())
    page.goto(
        f"{service.address}/?now#/look?model=organ&hospital=dune&cohort={cohort[-32:]}&scan=a&answer=now"
    )
    page.get_by_role("heading", name="Answer").wait_for()
    assert "answer=now" not in page.url
    assert "scan=a" in page.url
    # Read again, the scan is open and nothing was asked.
    page.reload()
    page.get_by_label("Scan a").first.wait_for()
    assert page.get_by_role("heading", name="Answer").count() == 0


def test_tour_is_shown_once_where_an_address_asks_and_again_by_the_keys(page: Any, service: Service) -> None:
    cohort = service.cohort(a=service.scans[SCAN].read_bytes())
    shown = f"#/look?model=organ&hospital=dune&cohort={cohort[-32:]}&scan=a&answer=now&tour=now"
    page.goto(f"{service.address}/?tour{shown}")
    tour, following = page.get_by_role("dialog"), page.get_by_role("button", name="Next")
    for number in range(1, 6):
        tour.get_by_text(f"Step {number} of 6").wait_for()
        assert following.evaluate("button => button === document.activeElement")
        # What the step is about is seen, and the card is beside it.
        ring = page.locator(".tour-ring").bounding_box()
        assert ring["width"] > 0
        following.click()
    tour.get_by_role("button", name="Done").click()
    assert tour.count() == 0

    page.goto(f"{service.address}/?again{shown}")
    page.get_by_role("heading", name="Answer").wait_for()
    assert "tour=now" not in page.url
    assert tour.count() == 0
    page.get_by_role("heading", name="Look at a scan").click()
    page.keyboard.press("?")
    tour.get_by_role("button", name="Take the tour").click()
    tour.get_by_text("Step 1 of 6").wait_for()
    page.keyboard.press("Escape")
    assert tour.count() == 0

    # Each word of the glossary is linked once in a view, and opens it there.
    words = page.locator(".term").evaluate_all("all => all.map((each) => each.title)")
    assert len(set(words)) == len(words) > 2
    page.locator(".term", has_text="confidence").click()
    page.wait_for_function("() => document.activeElement.textContent.startsWith('Confidence')")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.activeElement.className === 'term'")


def test_a_question_mark_lists_the_keys_but_not_where_a_person_writes(page: Any, service: Service) -> None:
    page.goto(f"{service.address}/?keys#/look")
    page.get_by_role("heading", name="Look at a scan").click()
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard")
    keys.get_by_text("Takes a stroke back.").wait_for()
    page.keyboard.press("Escape")
    assert keys.count() == 0
    page.get_by_role("button", name="Keyboard").click()
    keys.wait_for()


def test_keys_wheel_and_double_click_do_what_they_do_in_other_viewers(page: Any, service: Service) -> None:
    segment(page, service)
    scan = nib.Nifti1Image.from_bytes(gzip.decompress(service.scans[SCAN].read_bytes()))
    under = np.asanyarray(scan.dataobj)[np.asanyarray(mask_of(service).dataobj) == 1].astype(float)
    words = page.get_by_role("region", name="Answer").get_by_text("Mean").inner_text()
    found = [float(each) for each in re.findall(r"-?[\d.]+", words)]
    assert found == pytest.approx([under.mean(), under.std(), under.min(), under.max()], rel=1e-3)
    box = page.locator("canvas").bounding_box()
    # The axial plane is the third of four.
    axial = {"x": box["width"] / 4, "y": 3 * box["height"] / 4}
    page.locator("canvas").dblclick(position=axial)
    page.get_by_role("button", name="Axial", pressed=True).wait_for()
    page.get_by_role("button", name="Show organ").click()

    def place() -> list[int]:
        return [int(each) for each in re.findall(r"(\d+) of", page.get_by_text("intensity").inner_text())]

    page.locator("canvas").focus()
    level, row, column = place()
    for key in ("PageUp", "ArrowUp", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    # The patient's left is on the right, where sagittal slices count down.
    assert place() == [level + 1, row + 2, column - 1]
    page.keyboard.press("PageDown")
    shape = picture(canonical(scan), level).shape

    def orange() -> int:
        pixels, _, _ = shown_slice(page, shape)
        return int((pixels[..., 0] - pixels[..., 2] > 40).sum())

    filled = orange()
    page.get_by_label("Outlines").check()
    assert 0 < orange() < filled / 4
    page.locator("canvas").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    assert float(page.get_by_label("Zoom").input_value()) > 1
    page.locator("canvas").dblclick(position=axial)
    page.get_by_role("button", name="All planes", pressed=True).wait_for()
