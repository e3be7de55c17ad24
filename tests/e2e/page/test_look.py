"""Look: a scan that a person drops, and its mask in the right place."""

from __future__ import annotations

import gzip
import io
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.e2e.page.conftest import Service

SCAN = "patient-500.nii.gz"
# The viewer's ground, as in web/src/viewer/viewer.ts, and the colour of the first label.
GROUND, LABEL = (5, 9, 10), (230, 159, 0)


def segment(page: Any, service: Service, scan: str = SCAN) -> None:
    page.set_input_files("input[type=file]", service.scans[scan])
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("heading", name="Answer").wait_for(timeout=30_000)


def mask_of(service: Service, scan: str = SCAN, **fields: str) -> nib.Nifti1Image:
    """The mask by a plain request."""
    answer = service.client.post(
        "/segment",
        files={"scan": ("scan", service.scans[scan].read_bytes())},
        data={"model": "organ", **fields},
    ).raise_for_status()
    return nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))


def test_mask_is_drawn_where_the_service_found_it(page: Any, service: Service) -> None:
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


def canonical(image: nib.Nifti1Image) -> NDArray[Any]:
    """Voxels from left to right, posterior to anterior, inferior to superior."""
    return np.asanyarray(nib.as_closest_canonical(image).dataobj)


def middle(mask: NDArray[np.bool_]) -> int:
    """The axial slice of the mask's centre."""
    return round(float(np.argwhere(mask)[:, 2].mean()))


def picture(voxels: NDArray[Any], level: int) -> NDArray[Any]:
    """An axial slice as it is shown: rows from anterior to posterior, columns from R to L."""
    return np.flip(voxels[:, :, level].T)


def drawn_slice(page: Any, shape: tuple[int, ...], sign: int = 1) -> NDArray[np.bool_]:
    """Which voxels of the one slice on the canvas have the label's colour, by a pixel beside each centre.

    The cross-hair goes through centres.
    """
    canvas = page.locator("canvas")
    canvas.hover(position={"x": 2, "y": 2})
    page.wait_for_timeout(400)
    picture = np.asarray(Image.open(io.BytesIO(canvas.screenshot())).convert("RGB")).astype(int)
    # The slice fills most of its rows and columns; the letters of the sides are beside it.
    inside = (picture != GROUND).any(axis=2)
    (top, bottom), (left, right) = (np.flatnonzero(inside.mean(axis=axis) > 0.5)[[0, -1]] for axis in (1, 0))
    rows = (top + (np.arange(shape[0]) + 0.3) * (bottom + 1 - top) / shape[0]).astype(int)
    columns = (left + (np.arange(shape[1]) + 0.3) * (right + 1 - left) / shape[1]).astype(int)
    red, _, blue = np.moveaxis(picture[np.ix_(rows, columns)], 2, 0)
    return np.asarray(sign * (red - blue) > 40)


def test_receipt_is_one_click_away(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Receipt").click()
    receipt = page.get_by_role("dialog")
    assert "organ.global@1" in receipt.inner_text()
    assert "input_sha256" in receipt.inner_text()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


def test_file_that_is_no_scan_gets_a_reason(page: Any, service: Service) -> None:
    page.set_input_files("input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    assert "expected a NIfTI volume" in page.get_by_role("alert").inner_text()
    assert page.get_by_text("Research use only").is_visible()


def test_two_answers_are_compared(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Keep this answer").click()
    page.get_by_label("Who answers").select_option("member")
    page.get_by_label("Member", exact=True).select_option("aster")
    page.get_by_role("button", name="Segment").click()
    page.get_by_role("button", name="Side by side").click()
    page.get_by_label("new answer").wait_for()
    assert page.locator("canvas").count() == 2
    page.get_by_role("button", name="Difference").click()
    page.get_by_label("new answer").wait_for(state="detached")
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show organ").click()
    kept = canonical(mask_of(service, personalization="global")) == 1
    new = canonical(mask_of(service, personalization="member", site="aster")) == 1
    level = middle(new)
    for sign, only in ((1, kept & ~new), (-1, new & ~kept)):
        expected = picture(only, level)
        np.testing.assert_array_equal(drawn_slice(page, expected.shape, sign), expected)
    assert (kept != new).any()


def test_uncertainty_is_asked_when_it_is_shown(page: Any, service: Service) -> None:
    segment(page, service)
    with page.expect_response("**/segment") as sent:
        page.get_by_label("Uncertainty", exact=True).check()
    found = nib.Nifti1Image.from_bytes(gzip.decompress(sent.value.body()))
    expected = mask_of(service, voxels="uncertainty")
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), np.asanyarray(expected.dataobj))
