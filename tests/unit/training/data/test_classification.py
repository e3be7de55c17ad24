"""Federations of classified images: folders, arrays, partitions, and the network's input."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from model_store.preprocessing import prepare
from model_store.scan import decode
from model_store.task import Task
from personalization.networks import build, initialise
from training.data.classification import Partition, share_out
from training.data.federation import load_federation
from training.data.splits import split_by_patient
from training.errors import FederationError
from training.local.classifier import SgdSchedule, train_classifier
from training.local.images import Images, labelled_batches
from training.local.loop import train_locally
from training.local.schedule import Schedule
from training.local.site import SiteData
from training.phantom.shapes import CLASSES, make_shape, write_shapes
from training.phantom.shapes import HOSPITALS as SITES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_shapes(tmp_path / "shapes", ("elm", "larch"), images_per_site=10, size=16)


def problems(path: Path, *given: object) -> tuple[str, ...]:
    with pytest.raises(FederationError) as caught:
        load_federation(path, *given)  # type: ignore[arg-type]
    return caught.value.problems


def save(path: Path, **changed: object) -> Path:
    """An .npz of 60 + 8 + 12 images with the label in the first pixel."""
    arrays: dict[str, object] = {}
    for split, count in (("train", 60), ("val", 8), ("test", 12)):
        labels = (np.arange(count) % 3).astype(np.uint8)
        images = np.random.default_rng(count).integers(0, 255, (count, 12, 14)).astype(np.uint8)
        images[:, 0, 0] = labels
        arrays |= {f"{split}_images": images, f"{split}_labels": labels[:, None]}
    arrays |= changed
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


class TestFolders:
    """A folder per site and class."""

    def test_images_get_the_class_of_their_folder(self, root: Path) -> None:
        federation = load_federation(root)
        assert federation.task.class_names == CLASSES
        assert not federation.inferred
        larch = federation.site("larch")
        # Shares 0, 0.4 and 0.6 of ten images: no disc.
        assert [case.label for case in larch.cases] == [1] * 4 + [2] * 6
        assert all(case.image.parent.name == CLASSES[case.label] for case in larch.cases)
        assert all(case.name == f"{CLASSES[case.label]}/{case.image.name}" for case in larch.cases)

    def test_classes_and_size_are_inferred_without_task_yaml(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        federation = load_federation(root)
        assert federation.inferred
        assert federation.task.class_names == ("cross", "disc", "ring")
        assert (federation.task.kind, federation.task.size) == ("classification", (16, 16))
        assert [case.label for case in federation.site("larch").cases] == [0] * 6 + [2] * 4

    def test_all_problems_of_a_class_folder_federation_are_listed_at_once(self, root: Path) -> None:
        (root / "elm" / "disc" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        Image.new("RGB", (16, 16), (200, 10, 10)).save(root / "elm" / "ring" / "red.png")
        (root / "larch" / "square").mkdir()
        (root / "larch" / "cases.csv").write_text("file,split\nring/no.png,train\n")
        (root / "empty").mkdir()
        found = "\n".join(problems(root))
        for words in (
            "elm/disc/torn.png",
            "elm/ring/red.png: task 'shapes' expects a grey scan",
            "larch/square: not a class of task 'shapes' (disc, ring, cross)",
            "larch/cases.csv: 'ring/no.png'",
            "site 'empty': empty",
        ):
            assert words in found

    def test_patients_and_splits_come_from_cases_csv(self, root: Path) -> None:
        names = [case.name for case in load_federation(root).site("elm").cases]
        rows = [f"{names[0]},anna,test", f"{names[1]},anna,", f"{names[2]},bea,"]
        (root / "elm" / "cases.csv").write_text("\n".join(["file,patient,split", *rows]) + "\n")
        site = load_federation(root).site("elm")
        assert [(c.patient, c.split) for c in site.cases[:3]] == [
            ("anna", "test"),
            ("anna", "test"),
            ("bea", None),
        ]
        assert {c.patient for c in split_by_patient(site, 0).of_split("test")} == {"anna"}

    def test_digest_changes_when_an_image_moves_to_another_class(self, root: Path, tmp_path: Path) -> None:
        again = write_shapes(tmp_path / "again", ("elm", "larch"), images_per_site=10, size=16)
        assert load_federation(again).digest == load_federation(root).digest
        moved = next((again / "elm" / "disc").iterdir())
        moved.rename(again / "elm" / "ring" / moved.name)
        assert load_federation(again).digest != load_federation(root).digest

    def test_partition_of_a_folder_is_rejected(self, root: Path) -> None:
        assert "are for an .npz" in problems(root, None, Partition())[0]

    def test_segmentation_task_on_class_folders_is_rejected(self, root: Path) -> None:
        masks = Task(name="m", labels={"a": (1,)}, size=(16, 16))
        assert "elm" in problems(root, masks)[0]


class TestArrays:
    """An .npz in MedMNIST's layout."""

    def test_npz_images_go_to_exactly_one_client_with_their_label(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.npz")
        federation = load_federation(path, None, Partition(3, 0.5, 1))
        assert federation.names == ("client-1", "client-2", "client-3")
        assert federation.task.class_names == ("0", "1", "2")
        names = [case.name for site in federation.sites for case in site.cases]
        assert len(names) == len(set(names)) == 80
        for site in federation.sites:
            data = SiteData.load(site, federation.task)
            assert len(data.train) >= 10
            raw = {case.name: np.load(path)[case.row[0]][case.row[1]] for case in site.cases}
            for part in (data.train, data.test):
                assert [raw[name][0, 0] for name in part.cases] == part.targets.tolist()
        assert load_federation(path, None, Partition(3, 0.5, 1)).digest == federation.digest
        assert load_federation(path, None, Partition(3, 0.5, 2)).digest != federation.digest

    def test_npz_images_are_prepared_as_in_serving(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.npz")
        federation = load_federation(path, None, Partition(1))
        data = SiteData.load(federation.sites[0], federation.task)
        png = io.BytesIO()
        Image.fromarray(np.load(path)["train_images"][17], "L").save(png, "PNG")
        served = prepare(decode(png.getvalue()), federation.task).slices[0]
        np.testing.assert_array_equal(data.train.images[17], served)
        assert data.train.images.shape == (60, 1, 12, 14)

    def test_npz_task_is_read_from_the_yaml_of_the_same_name(self, tmp_path: Path) -> None:
        task = Task(name="abc", kind="classification", class_names=("x", "y", "z"), size=(28, 28))
        task.dump(tmp_path / "a.yaml")
        assert load_federation(save(tmp_path / "a.npz")).task == task

    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"val_labels": None}, "array 'val_labels' is missing"),
            ({"train_images": np.zeros((60, 12, 14), np.float32)}, "expected 8 or 16 bit"),
            ({"train_images": np.zeros((60, 12, 12, 12), np.uint8)}, "volumes cannot"),
            ({"train_images": np.zeros((60, 12, 12, 3), np.uint8)}, "in colour"),
            ({"train_images": np.zeros((60, 4, 12), np.uint8)}, "at least 8 pixels"),
            ({"train_labels": np.zeros((60, 14), np.uint8)}, "several labels"),
            ({"test_labels": np.full(12, 7)}, r"expected 0..2"),
            ({"train_labels": np.array([{}] * 60)}, "not an .npz of plain arrays"),
        ],
    )
    def test_npz_with_invalid_arrays_is_rejected(
        self, tmp_path: Path, changed: dict[str, object], says: str
    ) -> None:
        task = Task(name="t", kind="classification", class_names=("a", "b", "c"), size=(28, 28))
        assert says in "\n".join(problems(save(tmp_path / "a.npz", **changed), task))

    def test_npz_with_a_false_header_or_truncated_is_rejected(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.npz")
        lie = io.BytesIO()
        header = {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**4, 10**4)}
        np.lib.format.write_array_header_1_0(lie, header)
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.npz", "w") as new:
            for entry in old.infolist():
                content = old.read(entry) if entry.filename != "val_images.npy" else lie.getvalue()
                new.writestr(entry.filename, content)
        assert "val_images.npy: shape (1000000" in problems(tmp_path / "b.npz")[0]
        (tmp_path / "c.npz").write_bytes(path.read_bytes()[:500])
        assert "not an .npz" in problems(tmp_path / "c.npz")[0]


class TestShares:
    """Dirichlet partitions."""

    def test_share_out_gives_each_client_at_least_ten_and_loses_none(self) -> None:
        labels = {"train": np.arange(200) % 4, "val": np.arange(40) % 4, "test": np.arange(40) % 5}
        parts = share_out(labels, Partition(6, 0.3, 5))
        for split, found in labels.items():
            assert sorted(np.concatenate(parts[split]).tolist()) == list(range(len(found)))
        assert min(map(len, parts["train"])) >= 10

    def test_share_out_is_more_uneven_with_a_smaller_alpha(self) -> None:
        labels = {"train": np.arange(2000) % 4}

        def spread(alpha: float) -> float:
            parts = share_out(labels, Partition(5, alpha, 0))["train"]
            counts = np.array([np.bincount(labels["train"][part], minlength=4) for part in parts])
            return float((counts / counts.sum(0)).std())

        assert spread(0.1) > 4 * spread(100.0)

    def test_share_out_gives_test_images_the_class_mix_of_the_client(self) -> None:
        labels = {"train": np.arange(4000) % 2, "test": np.arange(2000) % 2}
        parts = share_out(labels, Partition(4, 0.5, 3))
        for train, test in zip(parts["train"], parts["test"], strict=True):
            ours, theirs = (
                np.bincount(labels[s][i], minlength=2) for s, i in (("train", train), ("test", test))
            )
            np.testing.assert_allclose(ours / 2000, theirs / 1000, atol=2e-3)

    @pytest.mark.parametrize(
        ("count", "partition", "says"),
        [
            (49, Partition(5), "49 training images cannot be divided among 5 clients with at least 10"),
            (50, Partition(5, 0.01), "in 1000 draws"),
            (50, Partition(0), "expected clients >= 1"),
            (50, Partition(2, -1.0), r"alpha .* > 0"),
            (50, Partition(2, float("nan")), "finite, found 2, nan"),
            (50, Partition(2, float("inf")), "finite, found 2, inf"),
        ],
    )
    def test_share_out_with_an_impossible_partition_is_rejected(
        self, count: int, partition: Partition, says: str
    ) -> None:
        with pytest.raises(FederationError, match=says):
            share_out({"train": np.arange(count) % 2}, partition)


def test_site_without_validation_images_validates_on_its_training_images(tmp_path: Path) -> None:
    root = write_shapes(tmp_path / "s", ("larch",), images_per_site=10, size=16)
    site = load_federation(root).sites[0]
    trained = site.assigned(dict.fromkeys(site.patients, "train"))
    data = SiteData.load(trained, load_federation(root).task)
    assert data.val is data.train
    assert len(data.test) == 0
    assert data.test.images.shape == (0, 1, 16, 16)
    assert data.statistics.count == 10
    assert sorted(set(data.train.targets.tolist())) == [1, 2]


def test_guard_statistics_count_training_images_only(tmp_path: Path) -> None:
    root = write_shapes(tmp_path / "s", ("larch",), images_per_site=10, size=16)
    federation = load_federation(root)
    site = federation.sites[0]
    trains = dict.fromkeys(site.patients[:4], "train")
    rest = dict.fromkeys(site.patients[4:7], "val") | dict.fromkeys(site.patients[7:], "test")
    data = SiteData.load(site.assigned(trains | rest), federation.task)
    assert [len(part) for part in (data.train, data.val, data.test)] == [4, 3, 3]
    assert data.statistics.count == 4


def image_set(count: int) -> Images:
    images = np.arange(count, dtype=np.float32)[:, None, None, None] * np.ones((1, 1, 8, 8), np.float32)
    names = tuple(map(str, range(count)))
    return Images(images, np.arange(count) % 3, names, names, (0,) * count)


def test_labelled_batches_yield_each_image_once_with_its_label() -> None:
    data = image_set(7)
    found = list(labelled_batches(data, 3, torch.Generator().manual_seed(0), augment=False))
    # The seventh image is left out: it would be alone in its batch.
    assert [len(labels) for _, labels, _ in found] == [3, 3]
    indices = torch.cat([chosen for _, _, chosen in found])
    assert len(set(indices.tolist())) == 6
    for images, labels, chosen in found:
        assert images[:, 0, 0, 0].tolist() == chosen.tolist()
        assert labels.tolist() == (chosen % 3).tolist()
    assert [len(b[1]) for b in labelled_batches(image_set(1), 3, torch.Generator(), augment=False)] == [1]
    turned, _, chosen = next(iter(labelled_batches(data, 7, torch.Generator().manual_seed(1), augment=True)))
    torch.testing.assert_close(turned[:, 0, 4, 4], chosen.float())


@pytest.mark.parametrize(("count", "batches"), [(4, 2), (5, 2), (6, 4)])
def test_train_locally_runs_the_scheduled_number_of_epochs(count: int, batches: int) -> None:
    """Two epochs in batches of four, counted by batch norm. A fifth image would be alone in its batch."""
    network = initialise(build("resnet18", in_channels=1, classes=3, width=1), torch.Generator())
    loss = train_locally(network, image_set(count), Schedule(epochs=2, batch_size=4), torch.Generator())
    assert network.state_dict()["bn1.num_batches_tracked"] == batches
    # The mean, not the sum, of the batch losses: near that of guessing among three classes.
    assert 0.5 < loss < 1.9


def test_sgd_rate_falls_to_a_tenth_at_each_milestone() -> None:
    """A loss with slope 1 for each class moves the bias by the learning rate."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    seen: list[float] = []

    def slope_of_one(logits: Tensor, *_: Tensor) -> Tensor:
        seen.append(network[1].bias[0].item())
        return logits.sum(1).mean()

    schedule = SgdSchedule(8, 4, 1.0, momentum=0.0, weight_decay=0.0, milestones=(0.5, 0.75))
    train_classifier(network, image_set(4), schedule, torch.Generator(), slope_of_one)
    seen.append(network[1].bias[0].item())
    np.testing.assert_allclose(-np.diff(seen), [1.0] * 4 + [0.1] * 2 + [0.01] * 2, rtol=1e-4)


def test_make_shape_depends_on_class_and_site_and_is_deterministic() -> None:
    camera = SITES["elm"].camera
    first = make_shape(camera, 0, 28, 5)
    assert np.array_equal(first, make_shape(camera, 0, 28, 5))
    assert not np.array_equal(first, make_shape(camera, 1, 28, 5))
    assert first.mean() < 128 < make_shape(SITES["hazel"].camera, 0, 28, 5).mean()
