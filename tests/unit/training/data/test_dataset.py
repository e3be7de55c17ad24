from __future__ import annotations

from collections import Counter
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from model_store.guard import ReferenceStatistics
from model_store.task import Normalisation, Task
from training.data.cases import Case, Federation, Site
from training.data.federation import load_federation
from training.data.splits import all_for_testing, split_by_patient
from training.errors import FederationError
from training.local.site import SiteData
from training.local.slices import Slices, batches


@pytest.fixture(scope="module")
def federation(phantom_federation: Path) -> Federation:
    return load_federation(phantom_federation)


def tiny(count: int = 10) -> Slices:
    """Slice i is filled with i; every third slice has no foreground."""
    images = np.arange(count, dtype=np.float32)[:, None, None, None] * np.ones((1, 2, 16, 16), np.float32)
    targets = np.zeros((count, 16, 16), np.uint8)
    for i in range(count):
        targets[i, 4:9, 5:8] = 0 if i % 3 == 0 else 1
    names = tuple(f"c{i // 2}" for i in range(count))
    return Slices(images, targets, names, names, tuple(i % 2 for i in range(count)))


class TestLoad:
    """From files to slices."""

    @pytest.mark.parametrize("name", ["aster", "birch", "cedar"])
    def test_slices_match_the_reorientation_by_nibabel(self, federation: Federation, name: str) -> None:
        """Compared with nibabel's reorientation: slices upwards, rows to the back, columns to the left."""
        site = split_by_patient(federation.site(name), seed=0)
        data = SiteData.load(site, federation.task)
        case = site.of_split("train")[0]
        mask = nib.load(case.mask)
        to = nib.orientations.axcodes2ornt(("S", "P", "L"))
        turn = nib.orientations.ornt_transform(nib.orientations.io_orientation(mask.affine), to)
        expected = nib.orientations.apply_orientation(np.asarray(mask.dataobj), turn)
        ours = data.train.targets[[i for i, c in enumerate(data.train.cases) if c == case.name]]
        assert len(ours) == len(expected)
        # The sizes differ; the relative position and area of the organ do not.
        for slice_, truth in zip(ours, expected, strict=True):
            if truth.sum() < 20:
                continue
            for axis in (0, 1):
                place = np.argwhere(slice_)[:, axis].mean() / slice_.shape[axis]
                assert place == pytest.approx(
                    np.argwhere(truth)[:, axis].mean() / truth.shape[axis], abs=0.03
                )
            assert slice_.mean() == pytest.approx(truth.mean(), rel=0.2)

    def test_slices_keep_patients_in_one_split_with_names_and_positions(self, federation: Federation) -> None:
        site = split_by_patient(federation.site("aster"), seed=0)
        data = SiteData.load(site, federation.task)
        assert data.site == "aster"
        for slices, split in ((data.train, "train"), (data.val, "val"), (data.test, "test")):
            assert set(slices.patients) == {case.patient for case in site.of_split(split)}
            assert Counter(slices.patients) == dict.fromkeys(slices.patients, 12)
            assert slices.positions == tuple(range(12)) * (len(slices) // 12)
            assert slices.cases == tuple(f"{patient}.nii.gz" for patient in slices.patients)
            assert slices.images.shape == (len(slices), 1, 32, 32)
            assert (slices.images.dtype, slices.targets.dtype) == (np.float32, np.uint8)

    def test_volume_is_normalised_over_all_slices(self, federation: Federation) -> None:
        data = SiteData.load(split_by_patient(federation.site("aster"), seed=0), federation.task)
        volume = data.train.images[:12]
        assert volume.mean() == pytest.approx(0, abs=0.02)
        assert volume.std() == pytest.approx(1, abs=0.1)
        assert abs(volume[6].mean() - volume[0].mean()) > 0.01

    def test_neighbour_slices_become_channels(self, federation: Federation) -> None:
        task = federation.task.model_copy(update={"neighbours": 1})
        site = split_by_patient(federation.site("cedar"), seed=0)
        images = SiteData.load(site, task).train.images[:14]
        assert images.shape == (14, 3, 32, 32)
        np.testing.assert_array_equal(images[5, 0], images[4, 1])
        np.testing.assert_array_equal(images[5, 2], images[6, 1])
        np.testing.assert_array_equal(images[0, 0], images[0, 1])
        np.testing.assert_array_equal(images[13, 2], images[13, 1])

    def test_keep_empty_false_drops_empty_slices_from_training_only(self, federation: Federation) -> None:
        site = split_by_patient(federation.site("aster"), seed=0)
        whole = SiteData.load(site, federation.task)
        thinned = SiteData.load(site, federation.task, keep_empty=False)
        empty = ~whole.train.targets.any(axis=(1, 2))
        assert 0 < empty.sum() == len(whole.train) - len(thinned.train)
        assert thinned.train.targets.any(axis=(1, 2)).all()
        assert len(thinned.val) == len(whole.val) == 12
        kept = [p for p, e in zip(whole.train.positions, empty, strict=True) if not e]
        assert list(thinned.train.positions) == kept
        np.testing.assert_array_equal(thinned.all_train.images, whole.train.images)
        assert whole.all_train is whole.train

    def test_site_of_one_patient_validates_on_its_training_slices(self, federation: Federation) -> None:
        aster = federation.site("aster")
        alone = Site("aster", tuple(case for case in aster.cases if case.patient == "aster-01"))
        alone = split_by_patient(alone, seed=0)
        data = SiteData.load(alone, federation.task)
        assert data.val is data.train
        assert not data.held_out
        thinned = SiteData.load(alone, federation.task, keep_empty=False)
        assert len(thinned.val) == len(data.val) > len(thinned.train)
        assert not thinned.held_out
        assert len(data.test) == 0
        assert data.test.images.shape == (0, 1, 32, 32)

    def test_site_with_only_background_masks_loads(self, tmp_path: Path) -> None:
        path = tmp_path / "a.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20), dtype=np.uint8)).save(path)
        blank = tmp_path / "m.png"
        Image.fromarray(np.zeros((20, 20), np.uint8)).save(blank)
        task = Task(name="t", labels={"x": (1,)}, size=(16, 16))
        site = Site("s", (Case(path, blank, "a", "train"),))
        data = SiteData.load(site, task, keep_empty=False)
        assert len(data.train) == 1
        assert not data.train.targets.any()

    def test_site_statistics_count_training_scans_only(self, federation: Federation) -> None:
        site = split_by_patient(federation.site("aster"), seed=0)
        statistics = SiteData.load(site, federation.task).statistics
        assert isinstance(statistics, ReferenceStatistics)
        assert statistics.count == len(site.of_split("train"))
        assert statistics.kinds == {"grey volume": statistics.count}
        assert SiteData.load(all_for_testing(federation.site("aster")), federation.task).statistics is None

    def test_load_of_a_file_that_became_unreadable_names_it(
        self, federation: Federation, tmp_path: Path
    ) -> None:
        bad = tmp_path / "broken.nii.gz"
        bad.write_bytes(b"\x1f\x8b nothing")
        mask = federation.site("aster").cases[0].mask
        with pytest.raises(FederationError, match=r"aster/broken\.nii\.gz"):
            SiteData.load(Site("aster", (Case(bad, mask, "p", "train"),)), federation.task)

    def test_2d_images_are_normalised_individually(self, tmp_path: Path) -> None:
        cases = []
        for i in range(2):
            pixels = np.random.default_rng(i).normal(100 + 50 * i, 10 + 5 * i, (32, 32))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{i}.png")
            Image.fromarray(np.eye(32, dtype=np.uint8)).save(tmp_path / f"m{i}.png")
            cases.append(Case(tmp_path / f"{i}.png", tmp_path / f"m{i}.png", f"p{i}", "train"))
        task = Task(name="t", labels={"x": (1,)}, size=(32, 32), normalisation=Normalisation(scope="image"))
        images = SiteData.load(Site("s", tuple(cases)), task).train.images
        np.testing.assert_allclose(images.mean(axis=(1, 2, 3)), 0, atol=1e-4)
        np.testing.assert_allclose(images.std(axis=(1, 2, 3)), 1, atol=1e-3)


class TestBatches:
    """One epoch."""

    def test_batches_yield_each_slice_once_with_its_target(self) -> None:
        slices = tiny()
        epoch = list(batches(slices, 4, torch.Generator().manual_seed(0), augment=False))
        assert [len(images) for images, _ in epoch] == [4, 4, 2]
        seen = []
        for images, targets in epoch:
            assert images.dtype == torch.float32
            assert targets.dtype == torch.uint8
            for image, target in zip(images, targets, strict=True):
                index = int(image.flatten()[0])
                seen.append(index)
                assert np.array_equal(target.numpy(), slices.targets[index])
        assert sorted(seen) == list(range(10))
        assert seen != list(range(10))

    def test_batches_depend_only_on_the_generator(self) -> None:
        def epoch(seed: int, augment: bool) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            return [x for pair in batches(tiny(), 4, generator, augment) for x in pair]

        for augment in (False, True):
            torch.manual_seed(0)
            first = epoch(1, augment)
            torch.manual_seed(1)
            second = epoch(1, augment)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert any(not torch.equal(a, b) for a, b in zip(first, epoch(2, augment), strict=True))

    def test_augmentation_changes_batches_but_not_the_stored_slices(self) -> None:
        slices = tiny()
        before = slices.images.copy(), slices.targets.copy()
        targets = torch.cat(
            [t for _, t in batches(slices, 4, torch.Generator().manual_seed(0), augment=True)]
        )
        assert len({t.numpy().tobytes() for t in targets}) > 4
        np.testing.assert_array_equal(slices.images, before[0])
        np.testing.assert_array_equal(slices.targets, before[1])

    @pytest.mark.parametrize(
        ("count", "size", "least", "sizes"),
        [
            (9, 4, 2, [4, 5]),
            (9, 4, 1, [4, 4, 1]),
            (10, 4, 2, [4, 4, 2]),
            (1, 4, 2, [2]),
            (3, 1, 2, [3]),
            (5, 1, 2, [2, 3]),
        ],
    )
    def test_a_last_batch_of_fewer_than_needed_joins_the_one_before(self, count, size, least, sizes) -> None:
        slices = tiny()
        few = Slices(slices.images[:count], slices.targets[:count], (), (), ())
        epoch = list(batches(few, size, torch.Generator().manual_seed(0), False, least=least))
        assert [len(images) for images, _ in epoch] == sizes
        seen = {int(image.flatten()[0]) for images, _ in epoch for image in images}
        assert seen == set(range(count))

    def test_batches_of_no_slices_are_empty(self) -> None:
        none = Slices(np.zeros((0, 1, 16, 16), np.float32), np.zeros((0, 16, 16), np.uint8), (), (), ())
        assert list(batches(none, 4, torch.Generator(), augment=True)) == []


def test_real_volumes_load_as_slices_along_the_task_plane(real_data: Path) -> None:
    folder = real_data / "hippocampus_nifti"
    names = sorted(path.name for path in (folder / "images").iterdir())[:3]
    cases = tuple(Case(folder / "images" / n, folder / "labels" / n, n, "train") for n in names)
    task = Task(
        name="h", labels={"anterior": (1,), "posterior": (2,)}, size=(48, 48), neighbours=1, plane="coronal"
    )
    data = SiteData.load(Site("h", cases), task)
    slices_along_y = [nib.load(case.image).shape[1] for case in cases]
    assert len(data.train) == sum(slices_along_y)
    for number, name in zip(slices_along_y, names, strict=True):
        assert data.train.cases.count(name) == number
    assert set(np.unique(data.train.targets)) == {0, 1, 2}
