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


def mask_of(service: Service, scan: str = SCAN) -> nib.Nifti1Image:
    """The mask by a plain request."""
    answer = service.client.post(
        "/segment", files={"scan": ("scan", service.scans[scan].read_bytes())}, data={"model": "organ"}
    ).raise_for_status()
    return nib.Nifti1Image.from_bytes(gzip.decompress(answer.content))


def test_mask_is_drawn_where_the_service_found_it(page: Any, service: Service) -> None:
    segment(page, service)
    page.get_by_role("button", name="Axial").click()
    page.get_by_role("button", name="Show organ").click()
    # In canonical order: left to right, posterior to anterior, inferior to superior.
    mask = np.asanyarray(nib.as_closest_canonical(mask_of(service)).dataobj) == 1
    level = round(float(np.argwhere(mask)[:, 2].mean()))
    expected = np.flip(mask[:, :, level].T)  # rows from anterior to posterior, columns from R to L
    drawn = drawn_slice(page, expected.shape)
    assert expected.sum() > 20
    overlap = 2 * (drawn & expected).sum() / (drawn.sum() + expected.sum())
    assert overlap > 0.98, f"Dice of the drawn mask {overlap:.3f}"
    # The cross-hair hides a row and a column at most.
    assert not (drawn & np.flip(expected, 1)).any()


def drawn_slice(page: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
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
    return np.asarray(red - blue > 40)


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
