"""A folder of nnU-Net v2 becomes MONAI's DynUNet and a task, or is refused by name."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_store.guard import Range
from model_store.normalisation import Clip, ZScore
from personalization.networks import build
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from training.errors import ImportRefused
from training.exchange import checkpoints, nnunet
from training.exchange.imported import Imported, turned
from training.exchange.source import Source

FINAL, BEST, LATEST = "checkpoint_final.pth", "checkpoint_best.pth", "checkpoint_latest.pth"
_CT = {"mean": 117.5, "std": 23.2, "percentile_00_5": 80.1, "percentile_99_5": 190.4}
_OLD = {
    "architecture": None,
    "UNet_class_name": "PlainConvUNet",
    "UNet_base_num_features": 4,
    "unet_max_num_features": 320,
    "n_conv_per_stage_encoder": [2, 2, 2],
    "n_conv_per_stage_decoder": [2, 2],
    "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}


def _read(path: Path, *folds: str, **options: Any) -> Imported:
    with Source(path) as source:
        return nnunet.read(source, folds, **options)


def _logits(found: Imported, image: torch.Tensor) -> torch.Tensor:
    network = build(found.network.name, **found.network.arguments).eval()
    checkpoints.fill(network, found.state, "x")
    with torch.no_grad():
        answer: torch.Tensor = network(image)
    return answer


def _image() -> torch.Tensor:
    return torch.randn(1, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("configuration", [{}, _OLD])
def test_the_network_is_nnunets_with_kernels_that_grow_and_in_both_forms_of_plans(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    (theirs,) = make_nnunet_folder(tmp_path / "model", configuration=configuration)
    found = _read(tmp_path / "model")
    with torch.no_grad():
        expected = theirs(_image())

    assert found.network.name == "monai.dynunet"
    torch.testing.assert_close(_logits(found, _image()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_a_residual_encoder_and_plans_of_slices_are_the_same_network(
    tmp_path: Path, residual: bool, slices: bool
) -> None:
    (theirs,) = make_nnunet_folder(tmp_path / "model", residual=residual, slices=slices, name="own")
    found = _read(tmp_path / "model")
    image = torch.randn(1, 1, 1 if slices else 8, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(image[:, :, 0]).unsqueeze(2) if slices else theirs(image)

    assert found.network.name == ("resenc" if residual else "monai.dynunet")
    torch.testing.assert_close(_logits(found, image), expected, atol=1e-5, rtol=1e-5)
    geometry = found.task.geometry
    assert geometry is not None
    assert geometry.patch == ((1 if slices else 8), 16, 16)
    assert geometry.spacing == ((None if slices else 3.0), 1.0, 1.5)
    # nnU-Net counts the axes of a slice from its own first.
    assert geometry.mirror == ((1, 2) if slices else (0, 1, 2))


def test_a_value_without_a_truth_is_ignored_and_the_reader_of_simpleitk_turns(tmp_path: Path) -> None:
    make_nnunet_folder(
        tmp_path / "model",
        labels={"background": 0, "shell": 1, "core": 2, "ignore": 3},
        plans={"image_reader_writer": "SimpleITKIOWithReorient", "transpose_forward": [1, 0, 2]},
    )
    found = _read(tmp_path / "model")
    assert (found.task.ignore, [*found.task.labels]) == ((3,), ["shell", "core"])
    assert found.task.geometry is not None
    assert found.task.geometry.axes == "ASR"


def test_folds_are_averaged_as_logits(tmp_path: Path) -> None:
    theirs = make_nnunet_folder(tmp_path / "model", folds=("0", "1", "4"))
    with torch.no_grad():
        each = [network(_image()) for network in theirs]

    all_folds, two = _read(tmp_path / "model"), _read(tmp_path / "model", "0", "4")

    torch.testing.assert_close(_logits(all_folds, _image()), torch.stack(each).mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(_logits(two, _image()), (each[0] + each[2]) / 2, atol=1e-5, rtol=1e-5)
    assert two.details["folds"] == ["0", "4"]
    assert two.weights.sha256 != all_folds.weights.sha256


@pytest.mark.parametrize(
    ("made", "asked", "chosen", "said"),
    [
        ({"0": FINAL, "1": FINAL, "all": FINAL}, {}, ["0", "1"], "fold_all is left out, as nnU-Net does"),
        ({"0": FINAL, "1": BEST}, {}, ["0"], "fold_1 is left out, as nnU-Net does, since it has no"),
        ({"all": FINAL}, {}, ["all"], "fold_all is the only fold with checkpoint_final.pth"),
        ({"0": BEST, "2": BEST}, {}, ["0", "2"], "no fold has checkpoint_final.pth"),
        ({"0": FINAL, "all": FINAL}, {"folds": ("0", "all")}, ["0", "all"], ""),
        ({"0": FINAL, "1": BEST}, {"checkpoint": "checkpoint_best.pth"}, ["1"], "fold_0 is left out"),
        ({"0": LATEST}, {"checkpoint": "checkpoint_latest"}, ["0"], ""),
        ({"10": FINAL, "2": FINAL}, {}, ["2", "10"], ""),
    ],
)
def test_folds_and_checkpoints_are_nnunets_own_choice_and_what_is_left_out_is_noted(
    tmp_path: Path, made: dict[str, str], asked: dict[str, Any], chosen: list[str], said: str
) -> None:
    make_nnunet_folder(tmp_path / "model", folds=[*made])
    for fold, name in made.items():
        folder = tmp_path / "model" / f"fold_{fold}"
        (folder / "checkpoint_final.pth").rename(folder / name)
    found = _read(tmp_path / "model", *asked.pop("folds", ()), **asked)
    assert found.details["folds"] == chosen
    notes = [note for note in found.notes if "fold" in note]
    assert len(notes) == bool(said)
    assert not said or notes[0].startswith(said)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([1], "component alone of shell, which .* leaves: here --keep-largest shell does"),
        ([[1, 2]], "shell and core together, .* --keep-largest core keeps that of each by itself"),
        ([], None),
    ],
)
def test_postprocessing_that_nnunet_chose_is_noted(tmp_path: Path, kept: list[Any], said: str | None) -> None:
    make_nnunet_folder(tmp_path / "model")
    folder = tmp_path / "model" / "crossval_results_folds_0_1_2_3_4"
    folder.mkdir()
    steps = ["remove_all_but_largest_component_from_segmentation"] * len(kept)
    arguments = [{"labels_or_regions": each} for each in kept]
    content = {"postprocessing_fns": steps, "postprocessing_kwargs": arguments, "input_folder": {}}
    (folder / "postprocessing.json").write_text(json.dumps(content))
    notes = [note for note in _read(tmp_path / "model").notes if "postprocessing" in note]
    assert len(notes) == len(kept)
    assert said is None or re.search(said, notes[0])


def test_an_unfinished_training_is_refused_with_what_there_is(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    folder = tmp_path / "model" / "fold_0"
    (folder / "checkpoint_final.pth").rename(folder / LATEST)
    with pytest.raises(ImportRefused, match=r"found fold_0/checkpoint_latest.pth: name others with --folds"):
        _read(tmp_path / "model")


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ({"T2": "T2", "FLAIR": "FLAIR"}, ["T2", "FLAIR"]),
        ({"1": "T2", "0": "FLAIR"}, ["FLAIR", "T2"]),
        ({"a": "T2", "0": "FLAIR"}, ["T2", "FLAIR"]),
    ],
)
@pytest.mark.parametrize("key", ["channel_names", "modality"])
def test_channels_have_the_order_of_their_numbers_or_that_of_the_file(
    tmp_path: Path, written: dict[str, str], names: list[str], key: str
) -> None:
    make_nnunet_folder(tmp_path / "model", channels=("", ""))
    file = tmp_path / "model" / "dataset.json"
    content = json.loads(file.read_text())
    del content["channel_names"]
    file.write_text(json.dumps({**content, key: written}))
    task = _read(tmp_path / "model").task
    assert [channel.name for channel in task.channel_list] == names


def _rewrite(folder: Path, **changes: Any) -> None:
    """Change members of dataset.json; None removes one."""
    file = folder / "dataset.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_labels_of_version_1_are_read_by_name_with_a_note(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model", channels=("MRI",))
    expected = _read(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "dataset.json").read_text())["labels"]
    by_value = {str(value): name for name, value in written.items()}
    _rewrite(tmp_path / "model", labels=by_value, channel_names=None, modality={"0": "MRI"})
    found = _read(tmp_path / "model")
    assert found.task == expected.task
    (note,) = [each for each in found.notes if each not in expected.notes]
    assert note.startswith(
        "dataset.json: labels are written as by nnU-Net v1, by value, and are read so: back"
    )


def test_labels_with_numbers_for_names_are_of_version_2(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model", labels={"background": 0, "2": 1}, outputs=2)
    found = _read(tmp_path / "model")
    assert found.task.labels == {"2": (1,)}
    assert not any("v1" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"labels": None},
            r"labels: expected a value for each name, such as .*, found none: write the values",
        ),
        ({"labels": {}}, r"labels: expected a value for each name, .*, found \{\}: "),
        ({"labels": ["background", "organ"]}, r'found \["background", "organ"\]: write the values of the'),
        ({"labels": {"0": "background", "1": "lobe", "2": "lobe"}}, "expected a value for each name"),
        ({"labels": {"0": "background", "organ": 1}}, "expected a value for each name"),
        ({"labels": {f"label {n}": "x" for n in range(99)}}, r"found \{.{99}…: write"),
        (
            {"channel_names": ["T1"]},
            r'channel_names: expected a name for each .*, found \["T1"\]: write them',
        ),
        (
            {"channel_names": None},
            r"channel_names: expected a name for each of 1 to 16 .*, found none: write",
        ),
        ({"channel_names": {}}, r"channel_names: .*, found \{\}: write them in the order of the training's"),
        ({"channel_names": {"0": 1}}, r'channel_names: .*, found \{"0": 1\}: '),
        ({"channel_names": None, "modality": ["CT"]}, r'modality: expected a name for .*, found \["CT"\]: '),
    ],
)
def test_labels_and_channels_in_another_form_are_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    make_nnunet_folder(tmp_path / "model")
    _rewrite(tmp_path / "model", **changes)
    with pytest.raises(ImportRefused, match=f"model: dataset.json: .*{said}") as caught:
        _read(tmp_path / "model")
    assert "Input should" not in str(caught.value)
    assert "Field required" not in str(caught.value)


def test_a_list_for_a_dataset_is_refused(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    (tmp_path / "model" / "dataset.json").write_text("[]")
    with pytest.raises(
        ImportRefused, match=r"expected an object with labels and channel_names, found \[\]: "
    ):
        _read(tmp_path / "model")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results' folder of one dataset with two configurations, and a zip file as nnU-Net exports it."""
    root = tmp_path_factory.mktemp("results")
    for name in ("3d_fullres", "3d_lowres"):
        make_nnunet_folder(
            root / "results" / "Dataset047_Blobs" / f"nnUNetTrainer__nnUNetPlans__{name}", name=name
        )
    with zipfile.ZipFile(root / "export.zip", "w") as packed:
        for path in (root / "results").rglob("*.*"):
            packed.write(path, path.relative_to(root / "results"))
        packed.writestr("__MACOSX/._plans.json", b"")
    return root


@pytest.mark.parametrize("path", ["results", "results/Dataset047_Blobs", "export.zip"])
def test_a_model_is_found_below_and_one_of_several_is_named(results: Path, path: str) -> None:
    with pytest.raises(
        ImportRefused,
        match=r"found .*nnUNetTrainer__nnUNetPlans__3d_fullres, .*__3d_lowres: name one with --inside",
    ):
        _read(results / path)
    found = _read(results / path, inside="nnUNetTrainer__nnUNetPlans__3d_lowres")
    assert (found.weights.origin or "").endswith("/3d_lowres")
    assert found.notes[0].startswith("the model is that of ")
    chosen = _read(results / path, configuration="3d_lowres", trainer="nnUNetTrainer")
    assert chosen.weights == found.weights
    with pytest.raises(ImportRefused, match=r"found .*3d_fullres, .*3d_lowres: name one with"):
        _read(results / path, trainer="nnUNetTrainerOther")
    with pytest.raises(ImportRefused, match=r"called 2d, found .*3d_fullres"):
        _read(results / path, inside="2d")


def test_the_only_model_below_is_read_from_a_folder_above_and_from_an_export(tmp_path: Path) -> None:
    trainer = tmp_path / "Dataset047_Blobs" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    make_nnunet_folder(trainer)
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as packed:
        for path in trainer.rglob("*.*"):
            packed.write(path, path.relative_to(tmp_path))
    own = _read(trainer)
    assert not [note for note in own.notes if "the model is that" in note]
    for path in (tmp_path / "Dataset047_Blobs", tmp_path / "export.zip"):
        found = _read(path)
        assert found.weights.sha256 == own.weights.sha256
        assert found.notes[0] == f"the model is that of {trainer.name}"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ("plans.pkl", "fold_0/model_final_checkpoint.model"),
            r"found one of a version before it \(model_final",
        ),
        (
            ("3d_fullres/Task04/nnUNetTrainerV2__nnUNetPlansv2.1/plans.pkl",),
            r"before it \(plans.pkl\): its plans are",
        ),
        (("fold_0/checkpoint_final.pth",), "beside fold_0, found neither: name the trainer's folder"),
        (("dataset.json", "imagesTr/a_0000.nii.gz"), r"found dataset.json: name the trainer's folder"),
    ],
)
def test_what_is_no_model_of_version_2_is_called_by_its_name(
    tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ImportRefused, match=said):
        _read(tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "network.", "module._orig_mod.", "model."])
def test_weights_behind_a_prefix_are_found(tmp_path: Path, prefix: str) -> None:
    make_nnunet_folder(tmp_path / "model")
    expected = _logits(_read(tmp_path / "model"), _image())
    _change_weights(tmp_path / "model", lambda name: f"{prefix}{name}")
    torch.testing.assert_close(_logits(_read(tmp_path / "model"), _image()), expected)


@pytest.mark.parametrize("key", ["state_dict", "model", "ema"])
def test_weights_under_another_key_are_found(tmp_path: Path, key: str) -> None:
    make_nnunet_folder(tmp_path / "model")
    expected = _logits(_read(tmp_path / "model"), _image())
    file = tmp_path / "model" / "fold_0" / "checkpoint_final.pth"
    found = torch.load(file, weights_only=True)
    found[key] = found.pop("network_weights")
    torch.save(found, file)
    torch.testing.assert_close(_logits(_read(tmp_path / "model"), _image()), expected)


def test_a_trainer_with_batch_norm_is_named(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    _change_weights(tmp_path / "model", lambda name: name, running_mean=torch.zeros(4))
    with pytest.raises(ImportRefused, match=r"with instance norm, found batch norm, by nnUNetTrainer"):
        _read(tmp_path / "model")


def _change_weights(folder: Path, rename: Callable[[str], str], **further: torch.Tensor) -> None:
    file = folder / "fold_0" / "checkpoint_final.pth"
    found = torch.load(file, weights_only=True)
    renamed = {rename(name): each for name, each in found["network_weights"].items()}
    torch.save({**found, "network_weights": renamed | further}, file)


@pytest.mark.parametrize(
    ("transpose", "codes", "axes"), [([0, 1, 2], "LPS", "SPL"), ([1, 0, 2], "ras", "ASR")]
)
def test_stored_axes_are_noted_and_the_training_files_directions_take_their_place(
    tmp_path: Path, transpose: list[int], codes: str, axes: str
) -> None:
    make_nnunet_folder(tmp_path / "model", plans={"transpose_forward": transpose})
    found = _read(tmp_path / "model")
    assert [note for note in found.notes if "as a file stores them" in note]
    made = turned(found, codes)
    assert made.task.geometry is not None
    assert (made.task.geometry.axes, made.details["axes"], made.notes) == (axes, codes.upper(), ())
    for wrong, said in ((made, "takes S.*leave it out|takes A.*leave it out"), (found, "expected")):
        with pytest.raises(ImportRefused, match=said):
            turned(wrong, "RAS" if wrong is made else "RLS")


def test_a_reader_that_turns_scans_has_no_note(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model", plans={"image_reader_writer": "NibabelIOWithReorient"})
    assert _read(tmp_path / "model").notes == ()


def test_the_task_is_that_of_the_plans(tmp_path: Path) -> None:
    make_nnunet_folder(
        tmp_path / "model",
        channels=("CT", "T1"),
        configuration={
            "normalization_schemes": ["CTNormalization", "ZScoreNormalization"],
            "use_mask_for_norm": [False, True],
        },
        plans={"foreground_intensity_properties_per_channel": {"0": _CT}, "transpose_forward": [1, 0, 2]},
        labels={"background": 0, "shell": 1, "core": 2, "ignore": 3},
        dataset={"license": "CC-BY-SA 4.0"},
    )
    found = _read(tmp_path / "model")
    task, geometry = found.task, found.task.geometry

    assert geometry is not None
    assert (task.name, task.labels) == ("blobs", {"shell": (1,), "core": (2,)})
    assert (geometry.axes, geometry.patch, geometry.spacing) == ("jki", (8, 16, 16), (3.0, 1.0, 1.5))
    assert (geometry.window, geometry.resampling, geometry.crop) == ("nnunet", "nnunet", "nonzero")
    assert (geometry.average, geometry.restore, geometry.normalise) == ("logits", "logits", "before")
    assert geometry.mirror == (0, 1, 2)
    first, second = (channel.normalisation.ordered_steps for channel in task.channel_list)
    assert first == (Clip(window=(80.1, 190.4)), ZScore(mean=117.5, std=23.2))
    assert second == (ZScore(within="region"),)
    assert found.weights.licence == "CC-BY-SA 4.0"
    unmirrored = _read(tmp_path / "model", mirror=False).task.geometry
    assert unmirrored is not None
    assert unmirrored.mirror == ()


def test_the_fingerprint_says_of_the_training_scans_what_the_guard_compares(tmp_path: Path) -> None:
    make_nnunet_folder(
        tmp_path / "model",
        channels=("CT",),
        configuration={"normalization_schemes": ["CTNormalization"]},
        plans={"foreground_intensity_properties_per_channel": {"0": _CT}, "transpose_forward": [1, 0, 2]},
    )
    found = _read(tmp_path / "model").statistics
    assert found is not None
    assert (found.count, found.kinds, found.sums) == (0, {"grey volume": 0}, None)
    assert found.ranges == {"foreground": Range(low=80.1, high=190.4)}

    fingerprint = {"spacings": [[3, 1, 1.5], [2, 1, 1]], "shapes_after_crop": [[10, 40, 40], [20, 50, 30]]}
    file = tmp_path / "model" / "dataset_fingerprint.json"
    file.write_text(json.dumps(fingerprint))
    found = _read(tmp_path / "model").statistics
    assert found is not None
    assert (found.count, found.kinds) == (2, {"grey volume": 2})
    # In the network's axes, of which the first is the reader's second.
    voxels = {name: (found.ranges[name].low, found.ranges[name].high) for name in found.ranges}
    assert voxels == {
        **{"first_mm": (1, 1), "second_mm": (2, 3), "third_mm": (1, 1.5)},
        **{"first_length": (40, 50), "second_length": (30, 40), "third_length": (30, 60)},
        "foreground": (80.1, 190.4),
    }
    file.write_text(json.dumps({**fingerprint, "spacings": [[3, 1, 1.5]]}))
    with pytest.raises(ImportRefused, match="as many shapes as spacings, found 2 and 1"):
        _read(tmp_path / "model")


@pytest.mark.parametrize(
    ("channels", "modality"),
    [(("CT",), "CT"), (("T1", "flair"), "MR"), (("MRI",), "MR"), (("CT", "PET"), None), (("scan",), None)],
)
def test_the_modality_is_that_of_usual_names_of_channels(
    tmp_path: Path, channels: tuple[str, ...], modality: str | None
) -> None:
    make_nnunet_folder(tmp_path / "model", channels=channels)
    assert _read(tmp_path / "model").task.modality == modality


def test_regions_are_a_sigmoid_for_each_label(tmp_path: Path) -> None:
    regions = {"background": 0, "outer": [1, 2, 3], "middle": [2, 3], "inner": 3}
    make_nnunet_folder(tmp_path / "model", labels=regions, dataset={"regions_class_order": [1, 2, 3]})

    task = _read(tmp_path / "model").task

    assert task.regions
    assert task.labels == {"outer": (1, 2, 3), "middle": (2, 3), "inner": (3,)}


def test_regions_in_an_order_that_a_task_cannot_say_are_refused(tmp_path: Path) -> None:
    regions = {"background": 0, "inner": 2, "outer": [1, 2]}
    make_nnunet_folder(tmp_path / "model", labels=regions, dataset={"regions_class_order": [2, 1]}, outputs=2)

    with pytest.raises(ImportRefused, match="expected the largest region first"):
        _read(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architecture": {"network_class_name": "x.architectures.primus.Primus"}},
            "is a Primus; expected PlainConvUNet or ResidualEncoderUNet",
        ),
        (
            {"configuration": {"architecture": None, "UNet_class_name": "ResidualEncoderUNet"}},
            "architecture: not as nnU-Net v2 writes it: features_per_stage",
        ),
        ({"configuration": {"patch_size": [16]}}, "patch_size"),
        ({"configuration": {"previous_stage": "3d_lowres"}}, "second stage of a cascade"),
        ({"configuration": {"resampling_fn_data": "resample_torch_simple"}}, "resample_torch_simple"),
        ({"configuration": {"normalization_schemes": ["Own"]}}, "expected a normalisation of nnU-Net"),
        ({"configuration": {"normalization_schemes": ["CTNormalization"]}}, "found 'CTNormalization'"),
        ({"configuration": {"inherits_from": "nowhere"}}, "'nowhere', found none"),
        ({"configuration": {"inherits_from": "3d_fullres"}}, "found none"),
        ({"plans": {"image_reader_writer": "Tiff3DIO"}}, "Tiff3DIO"),
        ({"plans": {"transpose_forward": [0, 0, 1]}}, "transpose_forward"),
        ({"configuration": {"patch_size": [8, 16, "x"]}}, "patch_size"),
        (
            {"configuration": {**_OLD, "UNet_base_num_features": 2048, "unet_max_num_features": 2048}},
            "fold_0/checkpoint_final.pth: expected at most 64 MiB of weights by plans.json",
        ),
        (
            {"configuration": {**_OLD, "conv_kernel_sizes": [[1, 3, 3], [9, 9, 9], [99, 99, 99]]}},
            "plans.json: monai.dynunet: kernel_size",
        ),
        (
            {"configuration": {**_OLD, "UNet_base_num_features": 5}},
            r"encoder.stages.0.0.convs.0.conv.weight: expected \[5, 1\] channels by plans.json",
        ),
        ({"folds": ()}, "found no fold"),
        ({"folds": ("9x",)}, "found no fold"),
    ],
)
def test_what_is_another_network_or_other_plans_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    make_nnunet_folder(tmp_path / "model", **change)
    with pytest.raises(ImportRefused, match=said):
        _read(tmp_path / "model")


def test_a_missing_tensor_and_a_missing_fold_are_named(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    with pytest.raises(ImportRefused, match=r"fold_3/checkpoint_final.pth"):
        _read(tmp_path / "model", "3")
    file = tmp_path / "model" / "fold_0" / "checkpoint_final.pth"
    found = torch.load(file, weights_only=True)
    del found["network_weights"]["decoder.seg_layers.1.weight"]
    torch.save(found, file)
    with pytest.raises(ImportRefused, match=r"tensor decoder.seg_layers.1.weight"):
        _read(tmp_path / "model")
