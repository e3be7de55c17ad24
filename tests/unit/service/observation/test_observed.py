"""What is seen of labels, against a naive search, and what a DICOM header says."""

from __future__ import annotations

import io
from collections import deque
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import dcmread

from model_store.scan import Limits, decode, encode_png
from model_store.scans.dicom.reading import read_series
from model_store.task import Normalisation, Task
from service.observation import Observed, SeenLabel, acquisition_of, observed, seen_labels
from tests.helpers.model_store.dicom_files import series, turned

TASK = Task(
    name="eye",
    labels={"disc": (1, 2), "cup": (2,), "vessel": (3,)},
    normalisation=Normalisation(method="none"),
    size=(32, 32),
)


def naive_parts(inside: NDArray[np.bool_]) -> int:
    """Components that touch by side, edge or corner, by a search from voxel to voxel."""
    left, parts = set(zip(*map(list, inside.nonzero()), strict=True)), 0
    while left:
        parts += 1
        waiting = deque([left.pop()])
        while waiting:
            at = waiting.popleft()
            for step in product((-1, 0, 1), repeat=inside.ndim):
                beside = tuple(a + b for a, b in zip(at, step, strict=True))
                if beside in left:
                    left.remove(beside)
                    waiting.append(beside)
    return parts


@pytest.mark.parametrize("shape", [(17, 23), (6, 9, 7)])
@pytest.mark.parametrize("share", [0.02, 0.15])
def test_labels_are_those_of_a_naive_search(shape: tuple[int, ...], share: float) -> None:
    draw = np.random.default_rng(0)
    classes = np.where(draw.random(shape) < share, draw.integers(1, 3, shape), 0).astype(np.uint8)
    confidences = {"disc": 0.75, "cup": 0.5, "vessel": 0.25}
    found = {each.label: each for each in seen_labels(classes, TASK, confidences, 0.5)}
    for label in ("disc", "cup"):
        inside = np.isin(classes, TASK.label_classes(label))
        edges = any(inside.take(side, axis=axis).any() for axis in range(inside.ndim) for side in (0, -1))
        assert found[label] == SeenLabel(
            label, confidences[label], inside.sum(), inside.sum() * 0.5, naive_parts(inside), edges
        )
    assert found["vessel"] == SeenLabel("vessel", 0.25, 0, 0.0, 0, False)


def test_parts_beyond_the_bound_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = np.zeros((20, 20), np.uint8)
    classes[2:4, 2:4], classes[1:19, 1:19:2] = 2, 1
    classes[2:4, 2:4] = 3
    monkeypatch.setattr(observed, "_MOST_COUNTED", 100)
    found = {each.label: each for each in seen_labels(classes, TASK, dict.fromkeys(TASK.labels, 0.0), None)}
    assert (found["vessel"].parts, found["vessel"].volume_ml) == (1, None)
    assert found["disc"].parts is None
    assert found["disc"].voxels == np.isin(classes, (1, 2)).sum()


def test_checkpoint_gives_it_back() -> None:
    first = Observed(
        *("organ", "sha256:v", "sha256:g", "sha256:s", (3, 4, 5), 1.5, "float32", "CPU"),
        labels=(SeenLabel("organ", 0.5, 7, None, None, True),),
        locum="1",
        spacing=(1.0, 2.0, 3.0),
        acquisition={"maker": "ACME"},
        warnings=("one",),
    )
    assert Observed.from_json(first.to_json()) == first


def test_acquisition_is_read_from_the_header_without_what_names_a_patient() -> None:
    slices = np.arange(3 * 16 * 16, dtype=np.int16).reshape(3, 16, 16)

    def said(**elements: Any) -> dict[str, Any] | None:
        content = {}
        for name, each in series(slices, turned(0)).items():
            header = dcmread(io.BytesIO(each))
            for keyword, value in elements.items():
                setattr(header, keyword, value)
            written = io.BytesIO()
            header.save_as(written)
            content[name] = written.getvalue()
        return acquisition_of(read_series(content, Limits()))

    found = said(
        Manufacturer="ACME",
        ManufacturerModelName="One",
        SoftwareVersions=["1.2", "b"],
        StationName="CT\x002",
        ConvolutionKernel="B30f",
        SliceThickness="2.5",
        PatientName="DOE^JOHN",
    )
    assert found is not None
    modality = found.pop("modality", None)
    assert modality in (None, "CT", "MR")
    assert found == {
        "maker": "ACME",
        "model": "One",
        "software": "1.2\\b",
        "station": "CT2",
        "kernel": "B30f",
        "slice_mm": 2.5,
    }
    assert "maker" not in (said(Manufacturer="") or {})


def test_scan_of_another_format_has_no_acquisition() -> None:
    assert acquisition_of(decode(encode_png(np.zeros((32, 32), np.uint8)), Limits())) is None
