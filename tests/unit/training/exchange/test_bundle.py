"""A MONAI bundle becomes a network and a task, or is refused by the place that Locum cannot express."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser

from model_store.digest import sha256
from model_store.guard import Range
from model_store.normalisation import Rescale, ZScore
from model_store.store import Store
from personalization.networks import build
from tests.helpers.training.bundles import ARGMAX, INVERT, NETWORK, SOFTMAX, SPLEEN, make_bundle
from training.errors import ImportRefused
from training.exchange import bundle, checkpoints, imported
from training.exchange.imported import Imported, keeping_largest, publish
from training.exchange.source import Source

_SIGMOID = {"_target_": "Activationsd", "keys": "pred", "sigmoid": True}
_HALF = {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}
_LARGEST = {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}
_LAMBDA = {"_target_": "Lambdad", "keys": "pred", "func": "$lambda x: x"}


def _read(path: Path, **options: Any) -> Imported:
    with Source(path) as source:
        return bundle.read(source, **options)


def _scale(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": name, "keys": "image", **arguments}


def test_spleens_bundle_becomes_its_task(tmp_path: Path) -> None:
    found = _read(make_bundle(tmp_path / "spleen"))
    task, geometry = found.task, found.task.geometry

    assert geometry is not None
    assert (task.name, task.labels, task.modality) == (
        "spleen-ct-segmentation",
        {"anterior": (1,), "posterior": (2,)},
        "CT",
    )
    assert (geometry.spacing, geometry.axes, geometry.normalise) == ((1.5, 1.5, 2.0), "RAS", "after")
    assert (geometry.patch, geometry.overlap, geometry.window) == ((16, 16, 16), 0.5, "constant")
    assert (geometry.average, geometry.restore, geometry.resampling) == ("logits", "probabilities", "monai")
    assert task.normalisation.ordered_steps == (Rescale(window=(-57, 164), to=(0, 1), clip=True),)
    assert found.weights.licence == "Apache License Version 2.0, January 2004"
    assert found.weights.sha256.startswith("sha256:")


@pytest.mark.parametrize(
    "network",
    [
        NETWORK,
        {
            **NETWORK,
            "_target_": "monai.networks.nets.UNet",
            "norm": ["GROUP", {"num_groups": 1}],
            "act": "relu",
        },
        {
            "_target_": "SegResNet",
            "init_filters": 8,
            "in_channels": 1,
            "out_channels": 3,
            "blocks_down": [1, 1],
            "blocks_up": [1],
            "dropout_prob": 0.2,
        },
        {
            "_target_": "DynUNet",
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 3,
            "kernel_size": [[1, 3, 3], 3, 3],
            "strides": [1, [1, 2, 2], 2],
            "upsample_kernel_size": [[1, 2, 2], 2],
            "filters": [4, 8, 16],
            "deep_supervision": False,
        },
    ],
)
def test_the_network_answers_as_the_one_that_monais_parser_builds(
    tmp_path: Path, network: dict[str, Any]
) -> None:
    path = make_bundle(tmp_path / "b", network=network)
    found = _read(path)
    own = build(found.network.name, **found.network.arguments).eval()
    checkpoints.fill(own, found.state, "b")
    parser = ConfigParser()
    parser.read_config(str(path / "configs" / "inference.json"))
    theirs = parser.get_parsed_content("network_def").eval()
    theirs.load_state_dict(torch.load(path / "models" / "model.pt", weights_only=True))
    image = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        assert torch.equal(own(image), theirs(image))


TWO = {**NETWORK, "in_channels": 2}
APART = ["pre", "post"]


def _apart(target: str, **options: Any) -> dict[str, Any]:
    return {"_target_": target, "keys": APART, **options}


def test_channels_of_their_own_keys_are_put_together_in_order(tmp_path: Path) -> None:
    before = [
        _apart("LoadImaged"),
        _apart("EnsureChannelFirstd"),
        _apart("Orientationd", axcodes="RAS"),
        _apart("Spacingd", pixdim=[1.5, 1.5, 2.0], mode=["bilinear", "bilinear"]),
        {**_apart("ScaleIntensityRanged", a_min=0, a_max=300, b_min=0, b_max=1, clip=True), "keys": "post"},
        {**_apart("NormalizeIntensityd", nonzero=True), "keys": ["pre"]},
        _apart("ConcatItemsd", name="image", dim=0),
        {"_target_": "EnsureTyped", "keys": "image"},
    ]
    task = _read(make_bundle(tmp_path / "b", network=TWO, before=before, channels=("x", "y"))).task
    assert [channel.name for channel in task.channel_list] == ["x", "y"]
    pre, post = (channel.normalisation.ordered_steps for channel in task.channel_list)
    assert (pre, post) == (
        (ZScore(within="nonzero"),),
        (Rescale(window=(0, 300), to=(0, 1), clip=True),),
    )
    unnamed = make_bundle(tmp_path / "c", network=TWO, before=before, channels=("x", "y"))
    metadata = unnamed / "configs" / "metadata.json"
    metadata.write_text(metadata.read_text().replace('"channel_def": {"0": "x"', '"channel_def": {"5": "x"'))
    assert [channel.name for channel in _read(unnamed).task.channel_list] == APART


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (_apart("ConcatItemsd", name="image", dim=1), "with the keys of 2 channels and dim 0"),
        ({"_target_": "ConcatItemsd", "keys": ["pre"], "name": "image"}, "with the keys of 2 channels"),
        ({"_target_": "Spacingd", "keys": ["pre"], "pixdim": [1, 1, 1]}, "expected it for all channels"),
        ({"_target_": "NormalizeIntensityd", "keys": "other"}, "expected keys of pre, post, found other"),
    ],
)
def test_channels_that_are_put_together_in_another_way_are_refused(
    tmp_path: Path, step: dict[str, Any], said: str
) -> None:
    joined = [] if step["_target_"] == "ConcatItemsd" else [_apart("ConcatItemsd", name="image")]
    path = make_bundle(
        tmp_path / "b", network=TWO, before=[_apart("LoadImaged"), step, *joined], channels=("x", "y")
    )
    with pytest.raises(ImportRefused, match=said):
        _read(path)


def test_padding_to_the_window_is_what_the_window_does(tmp_path: Path) -> None:
    plain = _read(make_bundle(tmp_path / "a"))
    for name, options, notes in (("b", {}, 0), ("c", {"method": "end"}, 1), ("d", {"mode": "constant"}, 0)):
        pad = _scale("SpatialPadd", spatial_size=[16, -1, 16], **options)
        found = _read(make_bundle(tmp_path / name, before=[*SPLEEN, pad]))
        assert found.task == plain.task
        assert len(found.notes) == len(plain.notes) + notes


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ([*SPLEEN, ("SpatialPadd", {"spatial_size": 64})], "expected at most the window's"),
        ([*SPLEEN, ("SpatialPadd", {"spatial_size": 16, "mode": "reflect"})], "with zeros up to 3 sides"),
        ([*SPLEEN[:4], ("SpatialPadd", {"spatial_size": 16}), SPLEEN[4]], "before SpatialPad"),
        ([*SPLEEN[:3], ("SpatialPadd", {"spatial_size": 16}), *SPLEEN[3:]], "before SpatialPad"),
    ],
)
def test_padding_that_changes_an_answer_is_refused(tmp_path: Path, before: list[Any], said: str) -> None:
    steps = [_scale(each[0], **each[1]) if isinstance(each, tuple) else each for each in before]
    with pytest.raises(ImportRefused, match=said):
        _read(make_bundle(tmp_path / "b", before=steps))


def test_weights_of_another_name_are_read_where_they_are_the_only_ones(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    models = path / "models"
    (models / "model.pt").rename(models / "best_metric.pth")
    assert _read(path).weights.file == "models/best_metric.pth"
    (models / "last.pt").write_bytes(b"")
    with pytest.raises(
        ImportRefused, match=r"in models/model.pt, found models/best_metric.pth, models/last.pt"
    ):
        _read(path)


def test_order_of_the_transforms_is_kept(tmp_path: Path) -> None:
    before = [
        *SPLEEN[:4],
        _scale("NormalizeIntensityd", nonzero=True),
        _scale("ScaleIntensityd", minv=-1.0, maxv=1.0),
    ]
    after = [SOFTMAX, ARGMAX, {**INVERT, "nearest_interp": True}]
    found = _read(make_bundle(tmp_path / "b", before=before, after=after))

    assert found.task.normalisation.ordered_steps == (ZScore(within="nonzero"), Rescale(to=(-1, 1)))
    assert found.task.geometry is not None
    assert found.task.geometry.restore == "labels"


@pytest.mark.parametrize(("applied", "labels"), [(None, ("anterior", "posterior")), ([2], ("posterior",))])
def test_the_largest_component_is_a_field_of_the_task(tmp_path: Path, applied: Any, labels: Any) -> None:
    largest = {**_LARGEST, **({} if applied is None else {"applied_labels": applied})}
    found = _read(make_bundle(tmp_path / "b", after=[SOFTMAX, INVERT, ARGMAX, largest]))
    assert (found.task.keep_largest, found.notes) == (labels, ())
    note, *_ = _read(make_bundle(tmp_path / "c", after=[SOFTMAX, ARGMAX, largest, INVERT])).notes
    assert "on the scan's own" in note


def test_a_network_that_is_changed_after_its_definition_is_noted(tmp_path: Path) -> None:
    changed = {"network": "$torch.nn.Sequential(@network_def, torch.nn.Softmax(1)).to(@device)"}
    (note,) = _read(make_bundle(tmp_path / "b", further=changed)).notes
    assert "changes what its network answers (`network`)" in note


def test_largest_components_are_asked_for_by_label(tmp_path: Path) -> None:
    found = _read(make_bundle(tmp_path / "b"))
    assert keeping_largest(found, ["posterior"]).task.keep_largest == ("posterior",)
    with pytest.raises(ImportRefused, match=r"model.pt.*expected labels of \['anterior', 'posterior'\]"):
        keeping_largest(found, ["liver"])


def test_normalisation_before_spacing_stays_before(tmp_path: Path) -> None:
    before = [*SPLEEN[:3], _scale("ScaleIntensityd"), SPLEEN[3]]
    geometry = _read(make_bundle(tmp_path / "b", before=before)).task.geometry
    assert geometry is not None
    assert geometry.normalise == "before"

    both = [*before, _scale("NormalizeIntensityd")]
    with pytest.raises(ImportRefused, match="before Spacing or all after it"):
        _read(make_bundle(tmp_path / "c", before=both))


def test_regions_are_declared_by_the_user_and_the_lambda_left_out(tmp_path: Path) -> None:
    path = make_bundle(
        tmp_path / "brats",
        network={**NETWORK, "in_channels": 4},
        before=[_scale("LoadImaged"), _scale("NormalizeIntensityd", nonzero=True, channel_wise=True)],
        after=[_SIGMOID, INVERT, _HALF, _LAMBDA],
        labels={"0": "Tumor core", "1": "Whole tumor", "2": "Enhancing tumor"},
        channels=("T1c", "T1", "T2", "FLAIR"),
        modality="MR",
    )
    with pytest.raises(ImportRefused, match=r"Lambdad: .* --without Lambdad; .* --label NAME=VALUES"):
        _read(path)
    with pytest.raises(ImportRefused, match=r"regions that overlap .* --label 'Tumor core=1,2'"):
        _read(path, without=["Lambdad"])
    labels = {"core": (1, 4), "whole": (1, 2, 4), "enhancing": (4,)}
    task = _read(path, without=["Lambdad"], labels=labels).task

    assert task.regions
    assert task.labels == labels
    assert [channel.name for channel in task.channel_list] == ["T1c", "T1", "T2", "FLAIR"]
    assert task.geometry is not None
    assert (task.geometry.axes, task.geometry.spacing) == ("ijk", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network": {**NETWORK, "out_channels": "$len(@labels)"}}, "--set network_def::out_channels=VALUE"),
        ({"network": {**NETWORK, "_target_": "scripts.net.UNet"}}, "code of a bundle is not run"),
        ({"network": {**NETWORK, "_target_": "monai.networks.nets.SwinUNETR"}}, "SwinUNETR: expected one of"),
        ({"network": {**NETWORK, "_target_": "os.system"}}, "code of a bundle is not run"),
        ({"network": {**NETWORK, "strange": 1}}, "strange"),
        ({"network": {**NETWORK, "spatial_dims": 2}}, "expected spatial_dims 3"),
        ({"before": [*SPLEEN, _scale("Resized", spatial_size=[64, 64, 64])]}, "Resized: it stretches"),
        ({"before": [*SPLEEN, _scale("scripts.Own")]}, "Own: expected one of LoadImage"),
        ({"before": [*SPLEEN, _scale("evil.ScaleIntensityd")]}, "found 'evil.ScaleIntensityd'"),
        ({"before": [*SPLEEN[:3], {**SPLEEN[3], "pixdim": "$[1, 1, 1]"}]}, "pixdim=VALUE"),
        ({"before": [*SPLEEN[:3], {**SPLEEN[3], "diagonal": True}]}, "without diagonal"),
        ({"before": [*SPLEEN, _scale("CastToTyped", dtype="uint8")]}, "expected a dtype"),
        ({"before": [*SPLEEN, _scale("ScaleIntensityd", factor=0.2)]}, "found factor"),
        ({"before": [*SPLEEN, _scale("CropForegroundd", source_key="image")]}, "--without CropForegroundd"),
        ({"after": [SOFTMAX, _LARGEST, ARGMAX]}, "after argmax"),
        ({"after": [SOFTMAX, ARGMAX, {**_LARGEST, "independent": False}]}, "of each label by itself"),
        ({"after": [SOFTMAX, ARGMAX, {**_LARGEST, "applied_labels": [3]}]}, r"mask values of \[1, 2\]"),
        ({"inferer": {"_target_": "SimpleInferer"}}, "--set .inferer="),
        ({"inferer": {"_target_": "SlidingWindowInferer", "roi_size": [96, 96, -1]}}, "roi_size="),
        (
            {"inferer": {"_target_": "SlidingWindowInferer", "roi_size": [8] * 3, "sigma_scale": 0.2}},
            "sigma_scale",
        ),
        ({"labels": {"0": "background", "1": "a"}}, "--label NAME=VALUE"),
        ({"further": {"network_def": "%other.json::x"}}, "reads another file"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_place(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = make_bundle(tmp_path / "b")
    other = {**change}
    network = other.pop("network", None)
    if network is not None:
        # The weights stay those of a network that can be made.
        other["further"] = {"network_def": network}
    with pytest.raises(ImportRefused, match=said):
        _read(make_bundle(tmp_path / "c", **other))
    _read(path)


def test_a_declared_number_takes_the_place_of_an_expression(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b", further={"network_def": {**NETWORK, "out_channels": "$len(@labels)"}})

    found = _read(path, declared={"network_def::out_channels": 3})

    assert found.network.arguments["classes"] == 3
    assert found.details["declared"] == {"network_def::out_channels": 3}


def test_pretrained_weights_are_never_asked_for(tmp_path: Path) -> None:
    network = {
        "_target_": "FlexibleUNet",
        "in_channels": 1,
        "out_channels": 3,
        "backbone": "resnet10",
        "spatial_dims": 3,
        "pretrained": False,
    }
    path = make_bundle(
        tmp_path / "b", network=network, further={"network_def": {**network, "pretrained": True}}
    )

    assert "pretrained" not in _read(path).network.arguments


def _exported(folder: Path, **task: Any) -> Path:
    """A bundle with the task of a version, as Locum's exports have it."""
    path = make_bundle(folder)
    inference, metadata = (folder / "configs" / f"{name}.json" for name in ("inference", "metadata"))
    own = {**_read(path).task.model_dump(mode="json"), "name": "mine", **task}
    found = {"inference": sha256(inference.read_bytes()), "task": own}
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "locum": found}))
    return path


def test_an_export_of_ours_has_its_own_task_until_its_configuration_is_changed(tmp_path: Path) -> None:
    path = _exported(tmp_path / "b", keep_largest=["anterior"])
    found = _read(path)
    assert (found.task.name, found.task.keep_largest) == ("mine", ("anterior",))
    assert any("which Locum exported" in note for note in found.notes)
    assert _read(path, declared={"inferer::overlap": 0.25}).task.name == "spleen-ct-segmentation"
    inference = path / "configs" / "inference.json"
    inference.write_text(inference.read_text().replace('"overlap": 0.5', '"overlap": 0.25'))
    changed = _read(path).task
    assert changed.geometry is not None
    assert (changed.name, changed.geometry.overlap) == ("spleen-ct-segmentation", 0.25)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"labels": {"one": [1]}}, "with 1 channels and 3 classes, as the network has, found 1 and 2"),
        ({"geometry": None, "size": [16, 16], "normalisation": {}}, "expected a task of volumes"),
        ({"labels": {"one": ["x"]}}, "metadata.json: locum: the task: labels"),
    ],
)
def test_a_task_that_the_network_does_not_fit_is_refused(
    tmp_path: Path, task: dict[str, Any], said: str
) -> None:
    with pytest.raises(ImportRefused, match=said):
        _read(_exported(tmp_path / "b", **task))


def test_the_window_of_intensities_is_what_the_guard_compares(tmp_path: Path) -> None:
    found = _read(make_bundle(tmp_path / "b")).statistics
    assert found is not None
    assert (found.count, found.kinds, found.sums) == (0, {"grey volume": 0}, None)
    assert found.ranges == {"foreground": Range(low=-57, high=164)}
    assert _read(make_bundle(tmp_path / "c", before=SPLEEN[:4])).statistics is None


_HUGE = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        {"_target_": "UNet", "channels": [2048] * 10, "strides": [2] * 9},
        {"_target_": "AttentionUnet", "channels": [2048] * 10, "strides": [2] * 9},
        {"_target_": "DynUNet", "filters": [2048] * 10, "kernel_size": [9] * 10, "strides": [1, *[2] * 9]}
        | {"upsample_kernel_size": [2] * 9},
        {"_target_": "BasicUNet", "features": [2048] * 6},
        {"_target_": "SegResNet", "init_filters": 2048, "blocks_down": [8] * 6, "blocks_up": [8] * 5},
        {"_target_": "MedNeXt", "init_filters": 2048},
        {"_target_": "FlexibleUNet", "backbone": "resnet50", "decoder_channels": [2048] * 5},
    ],
    ids=lambda arguments: arguments["_target_"],
)
def test_a_network_that_would_fill_the_memory_is_compared_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    found = _read(make_bundle(tmp_path / "b", further={"network_def": {**_HUGE, **arguments}}))

    def built(*_: object, **__: object) -> None:
        raise AssertionError("the network was built")

    monkeypatch.setattr(imported, "build", built)
    with pytest.raises(ImportRefused, match=r"the weights do not fit \w+: without "):
        publish(Store(tmp_path / "store"), "huge", found)


def test_torchscript_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b")
    (path / "models" / "model.pt").rename(path / "models" / "model.ts")
    with pytest.raises(ImportRefused, match=r"model.ts: TorchScript has code"):
        _read(path)


@pytest.mark.parametrize(
    ("pixdim", "spacing"),
    [
        ([1.5, 1.5, -1], (1.5, 1.5, None)),
        ([-1, 2.0], (None, 2.0, 2.0)),
        ([1.0, 2.0], (1.0, 2.0, 2.0)),
        (1.5, (1.5, 1.5, 1.5)),
        ([0, 0, 0], None),
    ],
)
def test_spacings_that_are_not_there_are_monais(tmp_path: Path, pixdim: Any, spacing: Any) -> None:
    before = [*SPLEEN[:3], {**SPLEEN[3], "pixdim": pixdim}, *SPLEEN[4:]]
    with Source(make_bundle(tmp_path / "bundle", before=before)) as source:
        task = bundle.read(source).task
    assert task.geometry is not None
    assert task.geometry.spacing == spacing
    assert task.geometry.normalise == "after"
