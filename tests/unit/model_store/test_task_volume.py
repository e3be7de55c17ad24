"""Tasks of volumes: geometry, channels by name, steps, regions, and tasks of slices as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from model_store.errors import TaskError
from model_store.task import Normalisation, Task
from model_store.volume import VolumeGeometry

GEOMETRY: dict[str, Any] = {"spacing": [1.5, 1.5, 3], "patch": [32, 48, 16]}


def volume(**fields: Any) -> Task:
    return Task.model_validate({"name": "v", "labels": {"a": [1]}, "geometry": GEOMETRY, **fields})


def brats(**fields: Any) -> Task:
    labels = {"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]}
    return volume(labels=labels, regions=["whole", "core", "enhancing"], **fields)


def test_a_volume_says_the_shape_of_the_networks_input() -> None:
    task = volume(channels=[{"name": "T1"}, {"name": "FLAIR"}])
    assert task.is_volume
    assert task.spatial_dims == 3
    assert (task.in_channels, task.channel_count, task.out_channels) == (2, 2, 2)
    assert task.input_shape == (32, 48, 16)
    slices = Task(name="s", labels={"a": (1,)}, size=(32, 48), neighbours=1)
    assert not slices.is_volume
    assert slices.spatial_dims == 2
    assert slices.input_shape == (32, 48)
    assert slices.in_channels == 3


def test_yaml_round_trip_keeps_every_field_of_a_volume(tmp_path: Path) -> None:
    steps = [
        {"step": "rescale", "window": [-57, 164], "clip": True},
        {"step": "clip", "percentiles": [1, 99]},
        {"step": "zscore", "within": "nonzero"},
    ]
    channels = [
        {"name": "ct", "normalisation": {"method": "fixed", "mean": 100.5, "std": 40, "window": [-50, 200]}},
        {"name": "pet", "normalisation": {"within": "region", "percentiles": [0.5, 99.5]}},
        {"name": "other", "normalisation": {"steps": steps}},
    ]
    geometry = {**GEOMETRY, "axes": "kji", "resampling": "nnunet", "mirror": [2, 0], "overlap": 0.25}
    original = brats(channels=channels, geometry=geometry, stacked=True, modality="CT")
    original.dump(tmp_path / "task.yaml")
    assert Task.load(tmp_path / "task.yaml") == original
    assert Task.model_validate_json(original.model_dump_json()) == original
    assert original.geometry is not None
    assert original.geometry.mirror == (0, 2)
    content = original.model_dump(mode="json")
    assert not {"size", "plane", "neighbours", "colour", "normalisation"} & content.keys()


def test_a_channel_is_normalised_by_its_volume() -> None:
    assert volume().normalisation.scope == "volume"
    assert volume(normalisation={"window": [0, 1]}).normalisation.scope == "volume"
    assert volume(normalisation=Normalisation(window=(0, 1))).normalisation.scope == "volume"
    [only] = volume(channels=[{"name": "t1"}]).channel_list
    assert only.normalisation.scope == "volume"
    [unnamed] = volume(normalisation={"percentiles": [1, 99]}).channel_list
    assert unnamed.name == "image"
    assert unnamed.normalisation.percentiles == (1, 99)


def test_steps_say_what_a_normalisation_does_in_order() -> None:
    fixed = Normalisation(scope="volume", method="fixed", mean=1, std=2, window=(0, 9))
    assert [each.model_dump(exclude_defaults=True) for each in fixed.ordered_steps] == [
        {"window": (0.0, 9.0)},
        {"mean": 1.0, "std": 2.0},
    ]
    steps = Normalisation.model_validate({"scope": "volume", "steps": [{"step": "rescale"}]}).ordered_steps
    assert [each.step for each in steps] == ["rescale"]
    assert Normalisation(method="none").ordered_steps == ()


def test_regions_that_agree_are_the_class_and_of_others_the_last_label_decides() -> None:
    task = brats()
    assert task.out_channels == 3
    assert len(task.classes) == 4
    # Bits: whole 1, core 2, enhancing 4. By nnU-Net's rule regions are painted in this order.
    painted = [0, 1, 2, 2, 3, 3, 3, 3]
    assert task.classes_of_regions(_combinations(3)).tolist() == painted
    assert task.region_members.tolist() == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_regions_that_overlap_in_part_keep_the_class_of_both() -> None:
    task = volume(labels={"left": [1, 3], "right": [2, 3]}, regions=["left", "right"])
    assert task.classes_of_regions(_combinations(2)).tolist() == [0, 1, 2, 3]


def test_64_regions_are_painted_in_their_order() -> None:
    names = [f"part{index}" for index in range(64)]
    nested = {name: list(range(index + 1, 65)) for index, name in enumerate(names)}
    task = volume(labels=nested, regions=names)
    inside = np.random.default_rng(0).random((64, 100)) < 0.1
    painted = np.zeros(100, int)
    for value, region in enumerate(inside, start=1):
        painted[region] = value
    assert task.classes_of_regions(inside).tolist() == painted.tolist()
    with pytest.raises(ValidationError, match="regions: expected at most 64, found 65"):
        volume(labels={**nested, "more": [65]}, regions=[*names, "more"])


def _combinations(regions: int) -> list[NDArray[np.bool_]]:
    return [(np.arange(1 << regions) >> index) & 1 == 1 for index in range(regions)]


def test_the_order_of_regions_outlives_a_manifest() -> None:
    import json

    task = brats()
    # Manifests are written with their keys sorted.
    again = Task.model_validate(json.loads(json.dumps(task.model_dump(mode="json"), sort_keys=True)))
    assert list(again.labels) != list(task.labels)
    assert again.region_classes.tolist() == task.region_classes.tolist()
    assert again.region_members.tolist() == task.region_members.tolist()
    assert again == task


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regions": ["a", "a"]}, r"regions: expected every label once.*\['a'\], found \['a', 'a'\]"),
        ({"geometry": {"spacing": [1, 1, 1]}}, "geometry.patch: Field required"),
        ({"geometry": {**GEOMETRY, "spacing": [0, 1, 1]}}, "geometry.spacing.0: .*greater than"),
        ({"geometry": {**GEOMETRY, "patch": [512, 512, 512]}}, "geometry.patch: .*at most 56623104 voxels"),
        ({"geometry": {**GEOMETRY, "axes": "RAL"}}, "geometry.axes: .*one of each of R or L.*found 'RAL'"),
        ({"geometry": {**GEOMETRY, "mirror": [1, 1]}}, "geometry.mirror: .*each axis once"),
        ({"geometry": {**GEOMETRY, "windows": "gaussian"}}, "no such field; did you mean 'window'"),
        ({"size": [32, 32]}, "size: .*of slices.*sees volumes"),
        ({"plane": "coronal", "neighbours": 1}, "plane, neighbours: of slices"),
        ({"channels": 3}, "channels: expected 1 or a list of names.*colours"),
        ({"channels": []}, "channels.*at least 1 item"),
        ({"channels": [{"name": f"c{index}"} for index in range(17)]}, "channels.*at most 16 items"),
        ({"channels": [{"name": "t1"}, {"name": "T1"}]}, "channels: expected different names"),
        ({"channels": [{"name": "t1 post"}]}, "channels.*name: .*match pattern"),
        ({"channels": [{"name": "a", "normalisation": {"scope": "image"}}]}, "'a'.*scope: volume"),
        ({"channels": [{"name": "a"}], "normalisation": {"window": [0, 1]}}, "each channel.*has its own"),
        ({"normalisation": {"method": "fixed", "mean": 1}}, "fixed needs mean and std"),
        ({"normalisation": {"mean": 1, "std": 1}}, "mean, std: only with method: fixed"),
        ({"normalisation": {"steps": [{"step": "clip"}]}}, "percentiles, found neither"),
        (
            {"normalisation": {"steps": [{"step": "clip", "window": [0, 1]}], "window": [0, 1]}},
            "take the place",
        ),
        ({"stacked": True}, "stacked: expected at least 2 channels"),
        ({"kind": "classification", "labels": {}, "class_names": ["a", "b"]}, "volumes are segmented"),
    ],
)
def test_what_is_wrong_with_a_volume_is_said(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    import yaml

    content = {"name": "v", "labels": {"a": [1]}, "geometry": GEOMETRY, **fields}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(TaskError, match=says):
        Task.load(tmp_path / "task.yaml")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "(?s)size.*volumes.*geometry.*found neither"),
        ({"size": [32, 32], "channels": [{"name": "t1"}]}, "channels: .*of volumes"),
        ({"size": [32, 32], "regions": ["a"]}, "regions: .*of volumes"),
        ({"size": [32, 32], "normalisation": {"within": "nonzero"}}, "within: only for volumes"),
    ],
)
def test_a_task_of_slices_has_no_fields_of_volumes(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Task.model_validate({"name": "s", "labels": {"a": [1]}, **fields})


def test_tasks_of_slices_are_written_as_before_volumes() -> None:
    full = Task.model_validate(
        {
            "name": "s",
            "labels": {"a": [1], "b": [2]},
            "channels": 3,
            "colour": "replicate",
            "neighbours": 2,
            "plane": "sagittal",
            "normalisation": {"scope": "volume", "method": "minmax", "window": [0, 80]},
            "size": [64, 32],
            "modality": "MR",
        }
    )
    assert full.model_dump_json() == (
        '{"name":"s","labels":{"a":[1],"b":[2]},"background":[0],"channels":3,"colour":"replicate",'
        '"neighbours":2,"plane":"sagittal","normalisation":{"scope":"volume","method":"minmax",'
        '"window":[0.0,80.0],"percentiles":null},"size":[64,32],"patient":null,"modality":"MR"}'
    )
    classifies = Task(name="c", kind="classification", class_names=("x", "y"), size=(28, 28))
    assert classifies.model_dump_json() == (
        '{"name":"c","kind":"classification","class_names":["x","y"],"channels":1,"colour":"refuse",'
        '"neighbours":0,"plane":"axial","normalisation":{"scope":"image","method":"zscore","window":null,'
        '"percentiles":null},"size":[28,28],"patient":null}'
    )


def test_a_reader_from_before_volumes_refuses_one() -> None:
    from pydantic import ValidationError, create_model

    names = ("name", "labels", "background", "channels", "size")
    before = create_model(
        "TaskBefore",
        __config__=Task.model_config,
        **{name: (Any, ... if name == "size" else None) for name in names},  # type: ignore[call-overload]
    )
    with pytest.raises(ValidationError) as refused:
        before.model_validate(volume().model_dump(mode="json"))
    assert {error["type"] for error in refused.value.errors()} == {"missing", "extra_forbidden"}


def test_axis_with_the_scans_own_spacing_is_refused_with_nnunets_resampling() -> None:
    kept = {"spacing": [1, 1, None], "patch": [8, 8, 8]}
    assert VolumeGeometry.model_validate(kept).spacing == (1, 1, None)
    with pytest.raises(ValidationError, match="but across a patch of 1"):
        VolumeGeometry.model_validate({**kept, "resampling": "nnunet"})
    sliced = {**kept, "resampling": "nnunet", "patch": [8, 8, 1]}
    assert VolumeGeometry.model_validate(sliced).patch == (8, 8, 1)
