"""Which slices of a cohort are taken where there are more than are held at once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from model_store.scan import Limits
from personalization.cancellation import never_cancelled
from service.cohorts.files import ScanFile
from service.files.folder import FilesFolder
from service.worker import cohort_images
from service.worker.cohort_images import LabelledImages, load_images, load_labelled
from tests.helpers.service.joining_federation import TUMOUR, drawn_scans
from tests.helpers.service.volume_federation import BALLS, PATCH, scans

DRAWN = ("patient-500.nii.gz", "patient-503.nii.gz")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ScanFile, ScanFile]]:
    """Four volumes of the same number of slices, and a mask of each."""
    folder = tmp_path_factory.mktemp("cohort")

    def keep(name: str, content: bytes, to: Path) -> ScanFile:
        to.write_bytes(content)
        return ScanFile(name, FilesFolder(to.parent), to.name, hashlib.sha256(content).hexdigest())

    return {
        name: (keep(name, scan, folder / name), keep(name, mask, folder / f"mask-{name}"))
        for name, (scan, mask) in drawn_scans(4).items()
    }


def load(files: dict[str, tuple[ScanFile, ScanFile]]) -> LabelledImages:
    masks = {name: files[name][1] for name in DRAWN}
    return load_labelled([scan for scan, _ in files.values()], masks, TUMOUR, None, Limits(), never_cancelled)


def test_load_above_the_image_limit_drops_slices_without_masks_first(
    files: dict[str, tuple[ScanFile, ScanFile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(files)
    assert whole.left_out == 0
    each = len(whole.images) // 4
    monkeypatch.setattr(cohort_images, "MOST_IMAGES", 2 * each + 4)
    some = load(files)
    counts = {name: some.names.count(name) for name in files}
    assert counts == {name: each if name in DRAWN else 2 for name in files}
    assert some.left_out == 2 * each - 4
    # Slices and what belongs to them stay together.
    assert [*some.drawn_on] == [name in DRAWN for name in some.names]
    tumour = some.targets.flatten(1).any(dim=1)
    assert int(tumour.sum()) == int(whole.targets.flatten(1).any(dim=1).sum()) > 0
    assert not tumour[~some.drawn_on].any()
    monkeypatch.setattr(cohort_images, "MOST_IMAGES", 1)
    assert len(load(files).images) == 4


def test_patches_of_volumes_are_bounded_and_those_with_masks_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    for name, contents in scans(3).items():
        for kind, content in zip(("scan", "mask"), contents, strict=True):
            (tmp_path / f"{kind}-{name}").write_bytes(content)
            kept.append(
                ScanFile(name, FilesFolder(tmp_path), f"{kind}-{name}", hashlib.sha256(content).hexdigest())
            )
    volumes, drawn = kept[::2], {kept[1].name: kept[1]}
    whole = load_images(volumes, BALLS, None, Limits(), never_cancelled)
    assert whole.images.shape[1:] == (1, *PATCH)
    assert whole.left_out == 0
    each = [int((whole.scan_of_image == index).sum()) for index in range(3)]
    labelled = load_labelled(volumes, drawn, BALLS, None, Limits(), never_cancelled)
    assert [labelled.names.count(file.name) for file in volumes] == each
    assert labelled.drawn == {kept[1].name: True}
    monkeypatch.setattr(cohort_images, "MOST_VALUES", (each[0] + 2) * 16 * 16 * 8)
    few = load_labelled(volumes, drawn, BALLS, None, Limits(), never_cancelled)
    assert [few.names.count(file.name) for file in volumes] == [each[0], 1, 1]
    assert few.left_out == sum(each) - each[0] - 2
    assert load_images(volumes, BALLS, None, Limits(), never_cancelled).left_out > 0
