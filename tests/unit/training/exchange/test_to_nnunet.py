"""A version becomes a results folder of nnU-Net, which is imported again as the same version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model_store.artefact import Artefact
from model_store.store import Store
from personalization.networks import build
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from training.errors import ImportRefused
from training.exchange import checkpoints, imported, nnunet, to_nnunet
from training.exchange.imported import Imported, made
from training.exchange.source import Source

_PLANS = "nnUNetTrainer__nnUNetPlans__"
_NESTED = {"outer": [1, 2, 3], "middle": [2, 3], "inner": 3}
_CT = {"mean": 117.5, "std": 23.2, "percentile_00_5": 80.1, "percentile_99_5": 190.4}


def _read(path: Path) -> Imported:
    with Source(path) as source:
        return nnunet.read(source)


def _published(folder: Path, found: Imported) -> Artefact[Any]:
    return imported.publish(Store(folder), "blobs", found, "CC-BY-4.0")


@pytest.mark.parametrize(
    "given",
    [
        {"residual": True, "labels": {"background": 0, "shell": 1, "core": 2, "ignore": 3}},
        {"slices": True, "name": "2d", "folds": ("0", "1"), "channels": ("T1", "FLAIR")},
        {
            "slices": True,
            "residual": True,
            "name": "2d",
            "labels": {"background": 0, **_NESTED},
            "dataset": {"regions_class_order": [1, 2, 3]},
        },
        {
            "configuration": {"normalization_schemes": ["CTNormalization"]},
            "plans": {
                "image_reader_writer": "SimpleITKIOWithReorient",
                "transpose_forward": [1, 0, 2],
                "foreground_intensity_properties_per_channel": {"0": _CT},
            },
        },
    ],
    ids=["resenc", "slices", "regions", "CT"],
)
def test_an_export_is_imported_again_as_the_same_version(tmp_path: Path, given: dict[str, Any]) -> None:
    make_nnunet_folder(tmp_path / "model", **given)
    found = _read(tmp_path / "model")

    folder, notes = to_nnunet.write(_published(tmp_path / "store", found), tmp_path / "results")

    name = given.get("name", "3d_fullres")
    assert folder == tmp_path / "results" / "Dataset047_Blobs" / f"{_PLANS}{name}"
    assert notes == []
    again = _read(tmp_path / "results")
    assert again.task.model_dump() == found.task.model_dump()
    assert again.network == found.network
    assert {key: each.tolist() for key, each in again.state.items()} == {
        key: each.tolist() for key, each in found.state.items()
    }
    assert again.weights.licence == "CC-BY-4.0"
    # nnU-Net's own names for what it has twice, without which it refuses the weights.
    checkpoint = torch.load(folder / "fold_0" / "checkpoint_final.pth", weights_only=True)
    names = checkpoint["network_weights"].keys()
    assert {each for each in names if each.startswith("decoder.encoder.")} == {
        f"decoder.{each}" for each in names if each.startswith("encoder.")
    }
    assert {each.replace(".conv.", ".all_modules.0.") for each in names if ".conv." in each} <= names


def test_a_kernel_that_a_job_has_filled_makes_its_stage_larger(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    found = _read(tmp_path / "model")
    key = "upsamples.1.conv_block.conv1.conv.weight"
    generator = torch.Generator().manual_seed(3)
    filled = torch.randn(found.state[key].shape, generator=generator)
    adapted = replace(found, state={**found.state, key: filled})

    folder, _ = to_nnunet.write(_published(tmp_path / "store", adapted), tmp_path / "results", 7)

    assert folder.parent.name == "Dataset007_Blobs"
    plans = json.loads((folder / "plans.json").read_text())
    architecture = plans["configurations"]["3d_fullres"]["architecture"]
    assert architecture["arch_kwargs"]["kernel_sizes"] == [[3, 3, 3]] * 3
    image = torch.randn(1, 1, 8, 16, 16, generator=generator)
    answers = []
    for each in (adapted, _read(folder)):
        network = build(each.network.name, **each.network.arguments).eval()
        checkpoints.fill(network, each.state, "x")
        with torch.no_grad():
            answers.append(network(image))
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)
    with pytest.raises(ImportRefused, match="expected a new folder, found one: name another with --dataset"):
        to_nnunet.write(_published(tmp_path / "store", adapted), tmp_path / "results", 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"geometry": {"window": "gaussian"}}, "window: gaussian"),
        ({"geometry": {"axes": "LPS"}}, "axes: LPS"),
        ({"geometry": {"spacing": None}}, "spacing: None"),
        ({"normalisation": {"percentiles": [1, 99]}}, "normalisation of image"),
        ({"labels": {"shell": [3], "core": [4]}}, "labels of other values than 1, 2"),
    ],
)
def test_what_nnunet_does_not_do_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    make_nnunet_folder(tmp_path / "model")
    found = _read(tmp_path / "model")
    content = found.task.model_dump(mode="json")
    content = {**content, **changes, "geometry": {**content["geometry"], **changes.get("geometry", {})}}
    version = _published(tmp_path / "store", replace(found, task=made("x", **content)))

    with pytest.raises(ImportRefused, match=f"does not do as the task says: {said}"):
        to_nnunet.write(version, tmp_path / "results")
    assert not (tmp_path / "results").exists()
