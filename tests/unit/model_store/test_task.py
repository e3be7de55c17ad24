"""The task: exclusive classes from labels, lookup, patients, YAML and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from model_store.errors import TaskError
from model_store.task import Task


def task(**fields: object) -> Task:
    return Task.model_validate({"name": "t", "labels": {"a": [1]}, "size": [32, 48], **fields})


def test_nested_labels_become_exclusive_classes() -> None:
    fundus = task(labels={"disc": [1, 2], "cup": [2]}, channels=3)
    assert [(c.index, c.labels, c.values) for c in fundus.classes] == [
        (0, (), (0,)),
        (1, ("disc",), (1,)),
        (2, ("disc", "cup"), (2,)),
    ]
    assert fundus.label_classes("disc") == (1, 2)
    assert fundus.label_classes("cup") == (2,)


def test_values_with_the_same_labels_become_one_class() -> None:
    whole = task(labels={"tumour": [1, 2, 4]}, background=(0, 3))
    assert [c.values for c in whole.classes] == [(0, 3), (1, 2, 4)]


def test_most_classes_have_their_own_index_in_8_bits() -> None:
    most = task(labels={str(value): [value] for value in range(1, 256)})
    np.testing.assert_array_equal(most.lookup().astype(np.uint8), range(256))
    assert len(task(labels={"a": range(1, 1000)}).classes) == 2


def test_places_without_a_truth_have_an_index_of_their_own() -> None:
    assert task(ignore=255).ignore == (255,)
    table = task(labels={"tumour": [2]}, ignore=[9, 1]).lookup()
    np.testing.assert_array_equal(table, [0, 255, 1, -1, -1, -1, -1, -1, -1, 255])
    # What was published before there were any keeps its digest.
    assert not {"ignore", "absent"} & task().model_dump().keys()
    with pytest.raises(ValueError, match="at most 255 classes"):
        task(labels={str(value): [value] for value in range(1, 256)}, ignore=300)


def test_lookup_marks_values_outside_the_task() -> None:
    table = task(labels={"tumour": [2]}, background=(0, 1)).lookup()
    np.testing.assert_array_equal(table, [0, 0, 1])
    np.testing.assert_array_equal(task(labels={"lesion": [255]}).lookup()[[0, 1, 255]], [0, -1, 1])


def test_input_channels_include_the_neighbour_slices() -> None:
    assert task(channels=1, neighbours=1).in_channels == 3
    assert task(channels=3).in_channels == 3


def test_patient_is_parsed_from_the_name_and_a_mismatch_is_rejected() -> None:
    lgg = task(patient=r"^TCGA_[A-Z]+_(?P<patient>[0-9A-Z]+)_")
    assert lgg.patient_of("TCGA_CS_4941_19960909_11") == "4941"
    assert task().patient_of("anything") == "anything"
    with pytest.raises(TaskError, match="no patient in the name"):
        lgg.patient_of("scan_1")


def test_yaml_round_trip_keeps_every_field(tmp_path: Path) -> None:
    original = task(
        labels={"disc": [1, 2], "cup": [2]},
        ignore=255,
        absent="background",
        neighbours=1,
        plane="coronal",
        normalisation={"scope": "volume", "window": [-100, 400], "percentiles": [1, 99.5]},
        patient=r"(?P<patient>\d+)",
    )
    original.dump(tmp_path / "task.yaml")
    assert Task.load(tmp_path / "task.yaml") == original


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("size", [30, 32], "multiple of 16"),
        ("size", [32, 4096], "up to 1024"),
        ("labels", {}, "at least 1"),
        ("labels", {"a": []}, "no mask value"),
        ("labels", {str(value): [value] for value in range(1, 257)}, "at most 256 classes"),
        ("background", [0, 1], "both background and label"),
        ("ignore", [1], "that no label and not the background has, found [1]"),
        ("ignore", 0, "that no label and not the background has, found [0]"),
        ("patient", "(", "not a regular expression"),
        ("patient", r"\d+", "group named 'patient'"),
        ("plane", "diagonal", "axial"),
        ("normalisation", {"window": [5, 5]}, "low < high"),
        ("normalisation", {"percentiles": [-5, 150]}, "from 0 to 100, found [-5.0, 150.0]"),
        ("colour_space", "lab", "colour_space: there is no such field"),
    ],
)
def test_load_with_invalid_field_names_file_and_field(
    tmp_path: Path, field: str, value: object, says: str
) -> None:
    import yaml

    content = {"name": "t", "labels": {"a": [1]}, "size": [32, 32], field: value}
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(TaskError) as caught:
        Task.load(path)
    assert str(path) in str(caught.value)
    assert field in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "{", "\x00"])
def test_load_of_yaml_that_is_not_a_mapping_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "task.yaml").write_text(content)
    with pytest.raises(TaskError, match=r"task\.yaml"):
        Task.load(tmp_path / "task.yaml")
    with pytest.raises(TaskError, match="cannot be read"):
        Task.load(tmp_path / "absent.yaml")


def classes(**fields: object) -> Task:
    given = {"name": "t", "kind": "classification", "class_names": ["no", "yes"], "size": [28, 28]}
    return Task.model_validate({**given, **fields})


class TestClassification:
    """Tasks with one class per image."""

    def test_classes_follow_class_names_in_order(self) -> None:
        assert [(c.index, c.labels) for c in classes().classes] == [(0, ("no",)), (1, ("yes",))]

    def test_dump_leaves_out_segmentation_fields(self, tmp_path: Path) -> None:
        classes().dump(tmp_path / "task.yaml")
        written = (tmp_path / "task.yaml").read_text()
        assert "kind: classification" in written
        assert "labels" not in written
        assert Task.load(tmp_path / "task.yaml") == classes()

    @pytest.mark.parametrize(
        "fields",
        [
            {"class_names": ["one"]},
            {"class_names": ["a", "a"]},
            {"class_names": ["a", "b/c"]},
            {"labels": {"a": [1]}},
            {"size": [7, 28]},
            {"size": [28, 2000]},
            {"kind": "regression"},
        ],
    )
    def test_invalid_classification_field_is_rejected_by_name(self, fields: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=next(iter(fields))):
            classes(**fields)

    def test_segmentation_with_class_names_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="kind: classification"):
            task(class_names=["a", "b"])


def test_segmentation_task_serializes_to_the_same_bytes_as_before_kinds() -> None:
    # Digests of published artefacts and of federations were computed from these bytes.
    assert task(labels={"disc": [1, 2]}).model_dump_json() == (
        '{"name":"t","labels":{"disc":[1,2]},"background":[0],"channels":1,"colour":"refuse","neighbours":0,'
        '"plane":"axial","normalisation":{"scope":"image","method":"zscore","window":null,"percentiles":null},'
        '"size":[32,48],"patient":null}'
    )


def test_task_for_a_plan_need_not_say_a_size() -> None:
    said = {"name": "organ", "labels": {"organ": (1,)}}
    task = Task.for_plan(said)
    assert not task.is_sized
    assert Task.for_plan(task.model_dump(mode="json")) == task
    assert Task.for_plan(json.loads(task.model_dump_json())) == task
    with pytest.raises(ValidationError, match="expected the pixels"):
        Task.model_validate(said)
    assert Task.model_validate({**task.model_dump(), "size": (32, 32)}).is_sized
    # What only volumes have says that they are.
    channels = [{"name": "T1"}, {"name": "T2"}]
    for more in ({"channels": channels}, {"regions": ["organ"]}, {"channels": channels, "stacked": True}):
        assert Task.for_plan({**said, **more}).is_volume
    assert Task.for_plan({**said, "size": [32, 32]}).size == (32, 32)
    with pytest.raises(ValidationError, match="multiple of 16"):
        Task.for_plan({**said, "size": [33, 32]})
