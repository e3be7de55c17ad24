"""The largest component of each label: against a labelling of the whole, MONAI's, and cases by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import ndimage

from model_store.preprocessing import keep_largest
from model_store.task import Task

EYE: dict[str, Any] = {"name": "eye", "labels": {"disc": [1, 2], "cup": [2]}, "size": [16, 16]}
ORGANS: dict[str, Any] = {"name": "organs", "labels": {"liver": [1], "spleen": [2]}, "size": [16, 16]}


def task(content: dict[str, Any], *kept: str) -> Task:
    return Task.model_validate({**content, "keep_largest": kept})


def naive(classes: NDArray[np.uint8], index: int) -> NDArray[np.bool_]:
    """Where a class is in another component than its largest."""
    labelled, _ = ndimage.label(classes == index, np.ones((3,) * classes.ndim))
    sizes = np.bincount(labelled.ravel())
    return (labelled > 0) & (labelled != 1 + sizes[1:].argmax())


@pytest.mark.parametrize("shape", [(40, 31), (24, 19, 33)])
@pytest.mark.parametrize("slab", [1, 1500, 2**22])
@pytest.mark.parametrize("order", ["C", "F"])
def test_components_of_slabs_are_those_of_the_whole(shape: tuple[int, ...], slab: int, order: Any) -> None:
    noise = ndimage.gaussian_filter(np.random.default_rng(len(shape)).normal(size=shape), 1.5)
    classes = np.digitize(noise, np.quantile(noise, [0.6, 0.8])).astype(np.uint8)
    expected = classes.copy()
    islands = naive(classes, 1), naive(classes, 2)
    for one in islands:
        assert one.sum() > 20
        expected[one] = 0
    found = np.asarray(classes.copy(), order=order)
    lost = keep_largest(found, task(ORGANS, "liver", "spleen"), slab)
    np.testing.assert_array_equal(found, expected)
    assert lost == {"liver": islands[0].sum(), "spleen": islands[1].sum()}


def test_each_slab_is_looked_at_and_may_end_the_work() -> None:
    # Each of five slabs is labelled, and the two of the lesser component again, to be cleared.
    own, classes = task(ORGANS, "liver"), np.zeros((4, 4, 10), np.uint8)
    classes[0, 0, :5] = classes[3, 3, 6:] = 1
    looks: list[int] = []
    keep_largest(classes.copy(), own, 4 * 4 * 2, lambda: looks.append(1))
    assert len(looks) == 7

    def leave() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        keep_largest(classes, own, 4 * 4 * 2, leave)


@pytest.mark.filterwarnings("ignore")  # of MONAI
def test_components_are_monais() -> None:
    pytest.importorskip("skimage", reason="MONAI's transform needs scikit-image")
    from monai.transforms import KeepLargestConnectedComponent

    noise = ndimage.gaussian_filter(np.random.default_rng(1).normal(size=(30, 28, 26)), 1.5)
    classes = np.digitize(noise, np.quantile(noise, [0.6, 0.8])).astype(np.uint8)
    expected = KeepLargestConnectedComponent(applied_labels=[1, 2], is_onehot=False)(classes[None])
    keep_largest(classes, task(ORGANS, "liver", "spleen"))
    np.testing.assert_array_equal(classes, np.asarray(expected)[0])


def test_a_voxel_elsewhere_keeps_its_other_labels() -> None:
    classes = np.array([[1, 2, 2, 1, 0, 1, 0, 2], [1, 1, 1, 2, 0, 2, 0, 2]], np.uint8)
    classes[:, 3] = [1, 1]
    by_cup = classes.copy()
    assert keep_largest(by_cup, task(EYE, "cup")) == {"cup": 3}
    np.testing.assert_array_equal(by_cup, [[1, 2, 2, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 1, 0, 1]])
    assert keep_largest(classes, task(EYE, "disc")) == {"disc": 4}
    np.testing.assert_array_equal(classes, [[1, 2, 2, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])


def test_what_touches_at_a_corner_is_one_and_empty_masks_stay() -> None:
    corner = np.eye(4, dtype=np.uint8)
    assert keep_largest(corner, task(EYE, "disc", "cup")) == {"disc": 0, "cup": 0}
    np.testing.assert_array_equal(corner, np.eye(4))
    assert keep_largest(np.zeros((3, 3, 3), np.uint8), task(EYE, "disc")) == {"disc": 0}


def test_a_task_says_it_once_by_its_own_labels_and_only_where_it_is_set() -> None:
    assert "keep_largest" not in task(EYE).model_dump()
    assert task(EYE, "cup").model_dump()["keep_largest"] == ("cup",)
    for wrong in (("macula",), ("cup", "cup")):
        with pytest.raises(ValidationError, match=r"keep_largest: expected labels of \['disc', 'cup'\]"):
            task(EYE, *wrong)


def test_an_older_reader_refuses_it() -> None:
    class Older(Task):
        """A reader from before the field."""

    del Older.__pydantic_fields__["keep_largest"]
    Older.model_rebuild(force=True)
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Older.model_validate({**EYE, "keep_largest": ["cup"]})
