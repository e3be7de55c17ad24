"""Draw: a mask that is drawn on the picture is stored at the same place of the scan's own grid."""

from __future__ import annotations

import gzip
import io
import re
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from tests.e2e.page.conftest import Service, opened_page
from tests.helpers.model_store.dicom_files import series, turned
from tests.helpers.model_store.scan_files import tiff

# In canonical order, from left to right, posterior to anterior, inferior to superior: off every middle.
SHAPE = (24, 20, 7)
BLOCK = (slice(4, 9), slice(11, 17), slice(1, 6))
LEVEL = SHAPE[2] // 2


def canonical_volume() -> NDArray[np.int16]:
    voxels = np.random.default_rng(2).integers(0, 60, SHAPE).astype(np.int16)
    voxels[BLOCK] = 900
    return voxels


def on_grid(voxels: NDArray[Any], codes: str) -> NDArray[Any]:
    """Turn canonical voxels over to a file's axes, such as `LPS`."""
    turn = nib.orientations.axcodes2ornt(tuple(codes))
    back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), turn)
    return np.asarray(nib.orientations.apply_orientation(voxels, back))


def tilted(codes: str, degrees: float) -> NDArray[np.float64]:
    """An affine of a file with these axes, oblique by some degrees."""
    columns = []
    for code in codes:
        axis, sign = next(
            (i, 1 if code == "RAS"[i] else -1) for i in range(3) if code in ("RAS"[i], "LPI"[i])
        )
        columns.append(sign * np.eye(3)[axis] * (1.5, 1.5, 4.0)[axis])
    affine = np.eye(4)
    affine[:3, :3] = nib.eulerangles.euler2mat(*np.radians([degrees, -degrees, degrees / 2])) @ np.stack(
        columns, 1
    )
    affine[:3, 3] = (12, -30, 45)
    return affine


def open_scan(page: Any, service: Service, cohort: str, name: str, model: str = "tumour") -> None:
    at = f"hospital=dune&model={model}&cohort={cohort[-32:]}&scan={name}&begin=nothing"
    page.goto(f"{service.address}/#/draw?{at}")
    page.get_by_role("toolbar").wait_for()


def bright(page: Any) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the brightest thing on the canvas, in pixels of the page."""
    canvas = page.locator("canvas")
    pixels = np.asarray(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB"))
    pieces, count = ndimage.label((pixels > 180).all(axis=2))
    # The letters of the sides are smaller, and the cross-hair is no grey.
    largest = 1 + int(np.argmax(ndimage.sum_labels(np.ones_like(pieces), pieces, range(1, count + 1))))
    rows, columns = np.nonzero(pieces == largest)
    box = canvas.bounding_box()
    left, right = box["x"] + float(columns.min()), box["x"] + float(columns.max()) + 1
    return left, box["y"] + float(rows.min()), right, box["y"] + float(rows.max()) + 1


def drag_over(page: Any, box: tuple[float, float, float, float]) -> None:
    """Drag from just inside one corner to just inside the opposite one."""
    left, top, right, bottom = box
    page.mouse.move(left + 4, top + 4)
    page.mouse.down()
    page.mouse.move((left + right) / 2, (top + bottom) / 2)
    page.mouse.move(right - 4, bottom - 4)
    page.mouse.up()


def touch_over(page: Any, box: tuple[float, float, float, float]) -> None:
    """The same by a finger."""
    left, top, right, bottom = box
    devtools = page.context.new_cdp_session(page)
    way = [(left + 4, top + 4), ((left + right) / 2, (top + bottom) / 2), (right - 4, bottom - 4)]
    for kind, (x, y) in zip(("touchStart", "touchMove", "touchMove"), way, strict=True):
        devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
        page.wait_for_timeout(50)
    devtools.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def saving(page: Any) -> Any:
    """Waits for the request that saves the mask."""
    return page.expect_response(
        lambda answer: answer.request.method == "PUT" and "/mask?" in answer.url, timeout=60_000
    )


def stored(service: Service, cohort: str, name: str) -> NDArray[Any]:
    """The stored mask, read without the service's own readers."""
    content = service.client.get(f"{cohort}/scans/{name}/mask").raise_for_status().content
    if content[:4] == b"\x89PNG":
        return np.asarray(Image.open(io.BytesIO(content)))
    return np.asanyarray(nib.Nifti1Image.from_bytes(gzip.decompress(content)).dataobj)


@pytest.mark.parametrize(
    ("codes", "degrees", "over"), [("LPS", 0, drag_over), ("LAI", 12, drag_over), ("SRP", 14, touch_over)]
)
def test_drawn_rectangle_is_stored_where_the_scan_shows_it(
    page: Any, service: Service, codes: str, degrees: float, over: Any
) -> None:
    affine = tilted(codes, degrees)
    assert "".join(nib.aff2axcodes(affine)) == codes
    scan = nib.Nifti1Image(on_grid(canonical_volume(), codes), affine)
    cohort = service.cohort(a=gzip.compress(scan.to_bytes(), 1))
    open_scan(page, service, cohort, "a")
    page.get_by_role("button", name="Rectangle").click()
    with saving(page) as sent:
        over(page, bright(page))
    assert sent.value.status == 201
    page.locator("[data-save=saved]").wait_for()
    expected = np.zeros(SHAPE, np.uint8)
    expected[BLOCK[0], BLOCK[1], LEVEL] = 1
    np.testing.assert_array_equal(stored(service, cohort, "a"), on_grid(expected, codes))
    mask = nib.Nifti1Image.from_bytes(gzip.decompress(service.client.get(f"{cohort}/scans/a/mask").content))
    np.testing.assert_allclose(mask.affine, affine, atol=1e-4)

    # Opened again, it is at the same place, and one more voxel leaves the others as they are.
    page.reload()
    page.get_by_role("toolbar").wait_for()
    page.locator("canvas").focus()
    page.keyboard.press("[")
    with saving(page) as sent:
        page.keyboard.press("Space")
    assert sent.value.status == 200
    expected[SHAPE[0] // 2, SHAPE[1] // 2, LEVEL] = 1
    np.testing.assert_array_equal(stored(service, cohort, "a"), on_grid(expected, codes))


def picture_scan(dtype: type[np.generic], top: int) -> NDArray[Any]:
    pixels = np.random.default_rng(4).integers(0, top // 10, (41, 49)).astype(dtype)
    pixels[8:17, 30:42] = top
    return pixels


def png(pixels: NDArray[Any]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("content", [png(picture_scan(np.uint8, 250)), tiff(picture_scan(np.uint16, 50_000))])
def test_mask_of_a_picture_has_the_picture_s_own_pixels(page: Any, service: Service, content: bytes) -> None:
    cohort = service.cohort(a=content)
    open_scan(page, service, cohort, "a", model="retina")
    page.get_by_role("button", name="cup + disc", exact=True).click()
    page.get_by_role("button", name="Rectangle").click()
    with saving(page):
        drag_over(page, bright(page))
    expected = np.zeros((41, 49), np.uint8)
    expected[8:17, 30:42] = 2
    np.testing.assert_array_equal(stored(service, cohort, "a"), expected)
    (listed,) = service.client.get(f"{cohort}/scans").json()["scans"]
    assert listed["mask"]["values"] == [0, 2]


def test_mask_of_a_picture_beyond_the_browser_s_textures_has_the_picture_s_own_size(
    page: Any, service: Service
) -> None:
    picture = np.kron(picture_scan(np.uint8, 250), np.ones((20, 60), np.uint8))
    assert max(picture.shape) > 2048
    cohort = service.cohort(a=png(picture))
    open_scan(page, service, cohort, "a", model="retina")
    page.get_by_role("button", name="Rectangle").click()
    with saving(page):
        drag_over(page, bright(page))
    drawn, expected = stored(service, cohort, "a") > 0, picture == 250
    assert drawn.shape == expected.shape
    # The pointer stays a few pixels of the screen inside, each of which is three of the picture.
    assert not (drawn & ~expected).any()
    assert drawn.sum() > 0.8 * expected.sum()


def test_mask_is_drawn_and_undone_by_keys(page: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    page.locator("canvas").focus()
    expected = np.zeros((41, 49), np.uint8)

    def press(*keys: str) -> None:
        with saving(page):
            for key in keys:
                page.keyboard.press(key)
        page.locator("[data-save=saved]").wait_for()
        np.testing.assert_array_equal(stored(service, cohort, "a"), expected)

    row, column = 20, 24
    expected[row - 1 : row + 2, column - 1 : column + 2] = 1
    press("Space")
    row, column = row - 4, column + 3
    expected[row, column : column + 3] = 2
    press("2", "[", *["ArrowUp"] * 4, *["ArrowRight"] * 3, "Space", *["Shift+ArrowRight"] * 2)
    expected[row, column] = 0
    press("e", *["ArrowLeft"] * 2, "Space")
    expected[row, column] = 2
    press("Control+z")
    with page.expect_response(lambda answer: answer.request.method == "DELETE", timeout=60_000):
        for _ in range(4):
            page.get_by_role("button", name="Undo").click()
        assert page.get_by_role("button", name="Undo").is_disabled()
    page.locator("[data-save=saved]").wait_for()
    assert service.client.get(f"{cohort}/scans").json()["scans"][0]["mask"] is None


def test_scan_without_a_target_counts_as_reviewed_until_its_mask_is_removed(
    page: Any, service: Service
) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    scan = page.get_by_role("list", name="Scans of the cohort").get_by_role("listitem")
    scan.get_by_text("no mask").wait_for()
    page.get_by_role("button", name="No target here").click()
    scan.get_by_text("no target").wait_for()
    assert not stored(service, cohort, "a").any()
    page.get_by_role("button", name="Remove the mask").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove the mask").click()
    scan.get_by_text("no mask").wait_for()
    (listed,) = service.client.get(f"{cohort}/scans").json()["scans"]
    assert listed["mask"] is None


def test_undone_or_erased_stroke_leaves_no_mask_and_an_undo_after_no_target_keeps_it(
    page: Any, service: Service
) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    scan = page.get_by_role("list", name="Scans of the cohort").get_by_role("listitem")

    def listed() -> Any:
        return service.client.get(f"{cohort}/scans").json()["scans"][0]["mask"]

    def stroke_and_back(*keys: str) -> None:
        page.locator("canvas").focus()
        with saving(page):
            page.keyboard.press("Space")
        for key in keys:
            page.keyboard.press(key)

    for keys in (("Control+z",), ("e", "Space", "b")):
        stroke_and_back(*keys)
        scan.get_by_text("no mask").wait_for()
        page.locator("[data-save=saved]").wait_for()
        assert listed() is None
    # Undone at once, nothing was ever stored, and there is nothing to delete.
    page.locator("canvas").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Control+z")
    page.locator("[data-save=changed]").wait_for()
    page.locator("[data-save=saved]").wait_for()
    assert listed() is None
    page.get_by_role("button", name="No target here").click()
    scan.get_by_text("no target").wait_for()
    page.reload()
    page.get_by_role("toolbar").wait_for()
    stroke_and_back()
    assert listed()["values"] == [0, 1]
    with saving(page):
        page.keyboard.press("Control+z")
    scan.get_by_text("no target").wait_for()
    assert listed()["values"] == [0]


def test_strokes_are_saved_before_another_scan_or_view_is_opened(page: Any, service: Service) -> None:
    content = png(picture_scan(np.uint8, 250))
    cohort = service.cohort(a=content, b=content)
    open_scan(page, service, cohort, "a", model="retina")
    page.locator("canvas").focus()
    with saving(page):
        page.keyboard.press("Space")
        page.get_by_role("button", name="b no mask").click()
    page.get_by_text("Drawing on b").or_(page.get_by_label("Drawing on b")).first.wait_for()
    page.get_by_role("toolbar").wait_for()
    page.locator("canvas").focus()
    with saving(page):
        page.keyboard.press("Space")
        page.get_by_role("link", name="Oversee").click()
    assert stored(service, cohort, "a").sum() == stored(service, cohort, "b").sum() == 9


def test_tab_is_not_opened_over_strokes_that_cannot_be_saved(browser: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    with opened_page(browser, service.address, expected=("status of 503",)) as page:
        open_scan(page, service, cohort, "a", model="retina")
        page.route(lambda address: "/mask?" in address, lambda route: route.fulfill(status=503, json={}))
        page.locator("canvas").focus()
        page.keyboard.press("Space")
        address = page.url
        page.get_by_role("link", name="Oversee").click()
        dialog = page.get_by_role("dialog", name="The mask is not saved")
        dialog.wait_for()
        assert page.url == address
        dialog.get_by_role("button", name="Close").click()
        page.unroute_all()
        with saving(page):
            page.get_by_role("link", name="Oversee").click()
        page.get_by_role("heading", name="Oversee").wait_for()
        assert page.url.endswith("#/oversee")
        assert stored(service, cohort, "a").sum() == 9
        page.go_back()
        page.get_by_role("toolbar").wait_for()


def test_stroke_during_a_save_is_saved_after_it(page: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    held: list[Any] = []
    page.route(lambda address: "/mask?" in address, lambda request: held.append(request))
    page.locator("canvas").focus()

    def wait_for(count: int) -> None:
        while len(held) < count:
            page.wait_for_timeout(50)

    page.keyboard.press("Space")
    wait_for(1)
    for key in (*["ArrowRight"] * 3, "Space"):
        page.keyboard.press(key)
    # Longer than the pause before a save.
    page.wait_for_timeout(2500)
    assert len(held) == 1
    held[0].continue_()
    wait_for(2)
    assert page.locator("[data-save=saved]").count() == 0
    held[1].continue_()
    page.locator("[data-save=saved]").wait_for()
    assert stored(service, cohort, "a").sum() == 18


def test_mask_of_another_person_is_not_overwritten(page: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    other = np.zeros((41, 49), np.uint8)
    other[2, 3] = 2
    service.client.put(f"{cohort}/scans/a/mask", content=png(other)).raise_for_status()
    page.locator("canvas").focus()
    with saving(page) as sent:
        page.keyboard.press("Space")
    assert sent.value.status == 409
    assert "another mask" in page.get_by_role("alert").inner_text()
    np.testing.assert_array_equal(stored(service, cohort, "a"), other)
    # The drawing before is gone when the stored mask is fetched.
    with page.expect_response(lambda answer: "/mask" in answer.url and answer.request.method == "GET"):
        page.get_by_role("button", name="Open the stored mask").click()
    page.locator("[data-save=saved]").wait_for()
    page.locator("canvas").focus()
    with saving(page) as sent:
        page.keyboard.press("Space")
    assert sent.value.status == 200
    other[19:22, 23:26] = 1
    np.testing.assert_array_equal(stored(service, cohort, "a"), other)


def test_dicom_series_of_several_files_is_one_scan_and_drawn_on_its_grid(page: Any, service: Service) -> None:
    # Slices, rows, columns; an oblique plane.
    voxels = np.random.default_rng(6).integers(0, 60, (7, 24, 24)).astype(np.int16)
    voxels[1:6, 5:11, 12:19] = 900
    files = series(voxels, turned(8))
    cohort = service.cohort()
    page.goto(f"{service.address}/#/draw?hospital=dune&model=tumour&cohort={cohort[-32:]}")
    page.get_by_label("Drop scans here").set_input_files(
        [{"name": name, "mimeType": "", "buffer": content} for name, content in files.items()]
    )
    page.get_by_role("list", name="Uploads").get_by_text("done").wait_for()
    # In another order it is the same scan.
    with page.expect_response(lambda answer: answer.request.method == "PUT"):
        page.get_by_label("Drop scans here").set_input_files(
            [{"name": name, "mimeType": "", "buffer": files[name]} for name in reversed(files)]
        )
    page.get_by_role("list", name="Uploads").get_by_text("done").wait_for()
    (listed,) = service.client.get(f"{cohort}/scans").json()["scans"]
    assert listed["format"] == "dicom"
    page.get_by_role("button", name=f"{listed['name']} no mask").click()
    page.get_by_role("toolbar").wait_for()
    page.get_by_role("button", name="Rectangle").click()
    with saving(page):
        drag_over(page, bright(page))
    # A mask is columns, rows, slices.
    expected = np.zeros((24, 24, 7), np.uint8)
    expected[12:19, 5:11, 3] = 1
    np.testing.assert_array_equal(stored(service, cohort, listed["name"]), expected)


def test_scan_that_came_after_the_list_was_read_opens_by_its_address(page: Any, service: Service) -> None:
    cohort = service.cohort()
    address = f"{service.address}/#/draw?hospital=dune&model=tumour&cohort={cohort[-32:]}"
    page.goto(address)
    page.get_by_text("0 masks of 0 scans").wait_for()
    page.get_by_text("No scan", exact=True).wait_for()
    service.client.put(f"{cohort}/scans/late", content=service.scans["patient-500.nii.gz"].read_bytes())

    page.goto(f"{address}&scan=late")

    page.get_by_role("toolbar").wait_for()


def test_scan_without_a_mask_begins_with_the_model_s_which_is_stored_once_taken(
    page: Any, service: Service
) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    question = {"model": "retina", "hospital": "dune", "output": "png"}
    answer = service.client.post("/segment", files={"scan": png(picture_scan(np.uint8, 250))}, data=question)
    expected = np.asarray(Image.open(io.BytesIO(answer.raise_for_status().content)))
    assert expected.any()
    page.goto(f"{service.address}/#/draw?hospital=dune&model=retina&cohort={cohort[-32:]}&scan=a")
    page.locator("[data-save=proposal]").wait_for()

    def listed() -> Any:
        return service.client.get(f"{cohort}/scans").json()["scans"][0]["mask"]

    # A stroke that is undone leaves the proposal, and no mask.
    page.locator("canvas").focus()
    with saving(page):
        page.keyboard.press("Space")
    with page.expect_response(lambda answer: answer.request.method == "DELETE"):
        page.keyboard.press("Control+z")
    page.locator("[data-save=proposal]").wait_for()
    assert listed() is None
    with saving(page):
        page.get_by_role("button", name="Save it as it is").click()
    page.locator("[data-save=saved]").wait_for()
    np.testing.assert_array_equal(stored(service, cohort, "a"), expected)


def test_undone_stroke_is_done_again_until_another_is_drawn(page: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    undo, redo = (page.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    page.locator("canvas").focus()
    # More strokes than are kept.
    for _ in range(34):
        page.keyboard.press("Space")
        page.keyboard.press("ArrowUp" if _ % 2 else "ArrowLeft")
    undone = 31
    for _ in range(undone - 1):
        page.keyboard.press("Control+z")
    undo.click()
    # Not asked at once: the page draws a stroke's end a moment after its click.
    page.get_by_role("button", name="Undo", disabled=True).wait_for()
    for _ in range(undone - 1):
        page.keyboard.press("Control+y")
    with saving(page):
        redo.click()
    assert redo.is_disabled()
    page.locator("[data-save=saved]").wait_for()
    whole = stored(service, cohort, "a")
    with saving(page):
        undo.click()
    assert (stored(service, cohort, "a") != whole).any()
    page.locator("canvas").focus()
    page.keyboard.press("e")
    with saving(page):
        page.keyboard.press("Space")
    assert redo.is_disabled()


def test_label_is_filled_between_two_slices_and_a_locked_one_stays(page: Any, service: Service) -> None:
    scan = nib.Nifti1Image(canonical_volume(), np.diag([1.5, 1.5, 4.0, 1.0]))
    cohort = service.cohort(a=gzip.compress(scan.to_bytes(), 1))
    # Squares of 4 and 12 voxels, four slices apart.
    before = np.zeros(SHAPE, np.uint8)
    before[10:14, 8:12, 1] = 1
    before[6:18, 4:16, 5] = 1
    mask = nib.Nifti1Image(before, scan.affine)
    content = gzip.compress(mask.to_bytes(), 1)
    service.client.put(f"{cohort}/scans/a/mask?model=tumour", content=content).raise_for_status()
    open_scan(page, service, cohort, "a")
    with saving(page):
        page.get_by_role("button", name="Fill between slices").click()
    found = stored(service, cohort, "a")
    np.testing.assert_array_equal(found[:, :, [1, 5]], before[:, :, [1, 5]])
    sizes = found.sum(axis=(0, 1))
    assert list(sizes[[0, 6]]) == [0, 0]
    assert sizes[1] < sizes[2] < sizes[3] < sizes[4] < sizes[5]
    assert 7 * 7 <= sizes[3] <= 9 * 9
    # A locked label is neither erased nor drawn over.
    page.get_by_role("button", name=re.compile("^Lock")).click()
    page.locator("canvas").focus()
    page.keyboard.press("e")
    page.keyboard.press("Space")
    page.locator("[data-save=saved]").wait_for()
    np.testing.assert_array_equal(stored(service, cohort, "a"), found)


def test_picture_is_windowed_by_a_drag_and_by_figures(page: Any, service: Service) -> None:
    cohort = service.cohort(a=png(picture_scan(np.uint8, 250)))
    open_scan(page, service, cohort, "a", model="retina")
    level, width = page.get_by_label("Level"), page.get_by_label("Width", exact=True)
    assert (level.input_value(), width.input_value()) == ("127.5", "255")
    left, top, right, bottom = bright(page)
    middle = ((left + right) / 2, (top + bottom) / 2)
    page.mouse.move(*middle)
    page.mouse.down(button="right")
    page.mouse.move(middle[0] + 40, middle[1] - 40, steps=4)
    page.mouse.up(button="right")
    assert float(width.input_value()) > 255
    assert float(level.input_value()) > 127.5
    assert page.get_by_label("Window", exact=True).input_value() == "own"
    # Above the brightest pixel everything is black.
    level.fill("400")
    level.press("Enter")
    width.fill("100")
    width.press("Enter")
    pixels = np.asarray(Image.open(io.BytesIO(page.locator("canvas").screenshot())).convert("RGB"))
    assert (pixels.mean(axis=2) > 180).mean() < 0.001
