"""A version as a results folder of nnU-Net v2, which `nnUNetv2_predict` runs.

    OUT/Dataset900_Liver/nnUNetTrainer__nnUNetPlans__3d_fullres/plans.json
                                                               /dataset.json
                                                               /fold_0/checkpoint_final.pth

What nnU-Net cannot do is refused, not approximated: another way to resample or to place windows, another
normalisation, a lens. `nnunet_networks.py` has the names of weights; those that nnU-Net has and Locum does
not (biases before a norm, the outputs of deep supervision) are zeros.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from model_store.lens import LENS
from model_store.manifest import WEIGHTS, BaseManifest, ModelManifest, NetworkSpec
from model_store.normalisation import Normalisation
from model_store.task import Task
from model_store.volume import VolumeGeometry
from personalization.errors import PersonalizationError
from personalization.networks import outline
from personalization.networks.capabilities import InstanceNorm, norms
from personalization.state import State, from_safetensors
from training.errors import ImportRefused
from training.exchange.nnunet import AXES, SCHEMES
from training.exchange.nnunet_networks import DIMENSIONS, DYNUNET, PLAIN, RESENC, RESIDUAL, modules_of

PLANS, TRAINER = "nnUNetPlans", "nnUNetTrainer"
DATASET: Final = 900
_EXPECTED: Final = {
    "overlap": 0.5,
    "window": "nnunet",
    "resampling": "nnunet",
    "normalise": "before",
    "crop": "nonzero",
    "average": "logits",
    "restore": "logits",
}
_MODALITIES: Final = {"CT": "CT", "MR": "MRI"}
_RESAMPLING: Final = {"is_seg": False, "order_z": 0, "force_separate_z": None}


def write(artefact: Artefact[BaseManifest], out: Path, dataset: int | None = None) -> tuple[Path, list[str]]:
    """Write a version of volumes into the results folder `out`, under the number of a dataset.

    Returns the trainer's folder, and notes on what nnU-Net does not do. Raises ImportRefused for a version
    that nnU-Net would answer otherwise than Locum, and for a dataset that is there already.
    """
    manifest, where = artefact.manifest, str(artefact)
    if not isinstance(manifest, ModelManifest):
        raise ImportRefused(f"{where}: expected one network, found a composite: export one of its models")
    if LENS in manifest.files:
        raise ImportRefused(f"{where}: nnU-Net has nothing for its lens: export its parent")
    task = manifest.task
    geometry = task.geometry
    if geometry is None:
        raise ImportRefused(f"{where}: expected a task of volumes, found one of slices of a fixed size")
    reader, transpose = _check_task(task, geometry, where)
    spec, states = _members(artefact, manifest, where)
    sides = {"in_channels": task.in_channels, "classes": task.out_channels}
    try:
        drawn = outline(spec.name, **{**spec.arguments, **sides})
    except PersonalizationError as error:
        raise ImportRefused(f"{where}: {error}") from error
    sliced = geometry.patch[0] == 1
    architecture, weights = _network(spec, drawn, states, sliced, where)
    name = "2d" if sliced else "3d_fullres"
    number, title = _named(manifest, dataset)
    folder = out / f"Dataset{number:03}_{title}" / f"{TRAINER}__{PLANS}__{name}"
    if folder.exists():
        raise ImportRefused(f"{folder}: expected a new folder, found one: name another with --dataset")
    folder.mkdir(parents=True)
    plans = {
        "dataset_name": f"Dataset{number:03}_{title}",
        "plans_name": PLANS,
        "image_reader_writer": reader,
        "transpose_forward": transpose,
        "transpose_backward": [transpose.index(axis) for axis in range(DIMENSIONS)],
        "foreground_intensity_properties_per_channel": _intensities(task),
        "configurations": {name: {**_configuration(task, geometry, sliced), "architecture": architecture}},
    }
    for file, content in (("plans", plans), ("dataset", _dataset(task, manifest, where))):
        (folder / f"{file}.json").write_text(
            f"{json.dumps(content, indent=4, ensure_ascii=False)}\n", encoding="utf-8"
        )
    mirror = tuple(axis - sliced for axis in geometry.mirror if axis >= sliced)
    for fold, each in enumerate(weights):
        checkpoint = {
            "network_weights": each,
            "init_args": {"configuration": name, "fold": fold},
            "trainer_name": TRAINER,
            "inference_allowed_mirroring_axes": mirror or None,
        }
        (folder / f"fold_{fold}").mkdir()
        torch.save(checkpoint, folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder, _notes(task)


def _check_task(task: Task, geometry: VolumeGeometry, where: str) -> tuple[str, list[int]]:
    """The reader and the order of its axes. Raises ImportRefused for what nnU-Net does not do."""
    differ = [
        f"{name}: {getattr(geometry, name)}"
        for name, expected in _EXPECTED.items()
        if getattr(geometry, name) != expected
    ]
    sliced = geometry.patch[0] == 1
    known = None if geometry.spacing is None else [mm is not None for mm in geometry.spacing]
    if known != [not sliced, True, True]:
        differ.append(f"spacing: {geometry.spacing}")
    if not task.regions and any(each.values != (each.index,) for each in task.classes):
        differ.append("labels of other values than 1, 2 and so on, or that overlap")
    if task.regions and (
        all(len(values) == 1 for values in task.labels.values())
        or [task.region_classes[row.nonzero()[0][-1]] for row in task.region_members[1:]]
        != [*range(1, len(task.classes))]
    ):
        differ.append("regions of which not each is larger than the next, and none has several values")
    if task.stacked:
        differ.append("stacked channels")
    readers = {"".join(sorted(axes)): (reader, axes) for reader, axes in AXES.items() if "Simple" in reader}
    found = readers.get("".join(sorted(geometry.axes)))
    if found is None:
        differ.append(f"axes: {geometry.axes}")
    differ += [
        f"normalisation of {channel.name}"
        for channel in task.channel_list
        if _scheme(channel.normalisation) is None
    ]
    if differ or found is None:
        raise ImportRefused(
            f"{where}: nnU-Net does not do as the task says: {'; '.join(differ)}: send its graph.onnx, or a "
            "MONAI bundle"
        )
    reader, axes = found
    return reader, [axes.index(axis) for axis in geometry.axes]


def _scheme(normalisation: Normalisation) -> tuple[str, bool] | None:
    """nnU-Net's scheme, and whether its moments are of the region; None for another normalisation."""
    if normalisation.method == "fixed" and normalisation.window is not None and not normalisation.steps:
        plain = normalisation.percentiles is None and normalisation.within == "all"
        return ("CTNormalization", False) if plain else None
    for within in ("all", "region"):
        if normalisation == Normalisation(scope="volume", method="zscore", within=within):
            return "ZScoreNormalization", within == "region"
    if normalisation == Normalisation(scope="volume", method="none"):
        return "NoNormalization", False
    for scheme, steps in SCHEMES.items():
        if normalisation.ordered_steps == steps:
            return scheme, False
    return None


def _members(
    artefact: Artefact[BaseManifest], manifest: ModelManifest, where: str
) -> tuple[NetworkSpec, list[State]]:
    """The network of each fold, and their weights."""
    spec, own = manifest.network, dict[str, Any](manifest.network.arguments)
    try:
        state = from_safetensors(artefact.read(WEIGHTS))
    except (LocumStoreError, PersonalizationError) as error:
        raise ImportRefused(f"{where}: {error}") from error
    states = [state]
    if spec.name == "averaged":
        states = [
            {
                name.removeprefix(f"members.{index}."): tensor
                for name, tensor in state.items()
                if name.startswith(f"members.{index}.")
            }
            for index in range(own["members"])
        ]
        spec = NetworkSpec(name=own["network"], arguments=own["arguments"])
    if spec.name not in (DYNUNET, RESENC):
        raise ImportRefused(
            f"{where}: expected {DYNUNET} or {RESENC}, found {spec.name}, which nnU-Net does not have: "
            "send its graph.onnx"
        )
    return spec, states


def _network(
    spec: NetworkSpec, drawn: Any, states: Sequence[State], sliced: bool, where: str
) -> tuple[dict[str, Any], list[State]]:
    """nnU-Net's architecture, and the weights of each fold by its names."""
    of_norms = norms(drawn).values()
    if not all(isinstance(norm, InstanceNorm) and norm.affine and norm.eps == 1e-5 for norm in of_norms):
        raise ImportRefused(f"{where}: expected instance norm with eps 1e-5 and affine, as nnU-Net has")
    if spec.arguments.get("res_block") or spec.arguments.get("act_name", "leakyrelu") != "leakyrelu":
        raise ImportRefused(f"{where}: expected LeakyReLU without residual blocks, as nnU-Net's {PLAIN} has")
    modules = modules_of(spec.name, drawn)
    layers = {path: drawn.get_submodule(path) for path in modules}
    plain = spec.name == DYNUNET
    if plain:
        inner = [f"downsamples.{index}" for index in range(len(drawn.downsamples))]
        firsts = [f"{stage}.conv1.conv" for stage in ("input_block", *inner, "bottleneck")]
    else:
        firsts = [f"stages.{index}.0.conv1.conv" for index in range(len(drawn.stages))]
    stages = [layers[path] for path in firsts]
    kernels = [[*stage.kernel_size] for stage in stages]
    # A block of the decoder has the kernel of its stage there, and the next deeper one's here.
    blocks = {path: theirs for path, theirs in modules.items() if theirs.startswith("decoder.stages.")}
    for path in (path for path in blocks if path.endswith(".conv")):
        level = _level(blocks[path], len(stages))
        for state in states:
            kernels[level] = [*map(max, kernels[level], _support(state[f"{path}.weight"]))]
    if sliced:
        # A patch of one slice has zeros on either side.
        kernels = [[1, *kernel[1:]] for kernel in kernels]
    features = [stage.out_channels for stage in stages]
    folds = [_weights(state, modules, layers, kernels, features, sliced) for state in states]
    dims = DIMENSIONS - sliced
    lengths = (
        {"n_conv_per_stage": [2] * len(stages), "n_conv_per_stage_decoder": [2] * (len(stages) - 1)}
        if plain
        else {
            "n_blocks_per_stage": [len(stage) for stage in drawn.stages],
            "n_conv_per_stage_decoder": [len(up.convs) for up in drawn.ups],
        }
    )
    arguments = {
        "n_stages": len(stages),
        "features_per_stage": features,
        "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
        "kernel_sizes": [kernel[-dims:] for kernel in kernels],
        "strides": [[*stage.stride][-dims:] for stage in stages],
        **lengths,
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    kind = PLAIN if plain else RESIDUAL
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }, folds


def _level(theirs: str, stages: int) -> int:
    """The stage of a layer: the decoder begins at the last but one."""
    found = re.match(r"(encoder|decoder)\.stages\.(\d+)\.", theirs)
    if found is None:
        return 0
    index = int(found[2])
    return index if found[1] == "encoder" else stages - 2 - index


def _weights(
    state: Mapping[str, Tensor],
    modules: Mapping[str, str],
    layers: Mapping[str, nn.Module],
    kernels: Sequence[Sequence[int]],
    features: Sequence[int],
    sliced: bool,
) -> State:
    found: State = {}
    for path, theirs in modules.items():
        for part in ("weight", "bias"):
            tensor = state.get(f"{path}.{part}")
            if tensor is None:
                continue
            kernel = kernels[_level(theirs, len(kernels))]
            if theirs.endswith(".conv") and ".skip." not in theirs:
                tensor = _resized(tensor, kernel)
            if sliced and tensor.ndim == DIMENSIONS + 2:
                tensor = tensor[:, :, tensor.shape[2] // 2]
            found[f"{theirs}.{part}"] = tensor.contiguous()
        layer: Any = layers[path]
        if not isinstance(layer, InstanceNorm) and ".skip." not in theirs:
            found.setdefault(f"{theirs}.bias", torch.zeros(layer.out_channels))
    last = found[f"decoder.seg_layers.{len(features) - 2}.weight"]
    for index, width in enumerate(reversed(features[1:-1])):
        found[f"decoder.seg_layers.{index}.weight"] = last.new_zeros(last.shape[0], width, *last.shape[2:])
        found[f"decoder.seg_layers.{index}.bias"] = last.new_zeros(last.shape[0])
    # nnU-Net names each layer again, by its place in its block, and the encoder inside of the decoder.
    again = {
        re.sub(r"\.(conv|norm)\.(weight|bias)$", _by_place, name): tensor for name, tensor in found.items()
    }
    found |= again
    return found | {f"decoder.{name}": each for name, each in found.items() if name.startswith("encoder.")}


def _by_place(found: re.Match[str]) -> str:
    return f".all_modules.{0 if found[1] == 'conv' else 1}.{found[2]}"


def _support(weight: Tensor) -> list[int]:
    """The sides of the smallest kernel about the centre that has all that is not zero."""
    sides = []
    for axis, side in enumerate(weight.shape[2:], start=2):
        there = weight.transpose(0, axis).flatten(1).ne(0).any(1).nonzero()
        middle = side // 2
        furthest = 0 if not len(there) else int((there - middle).abs().max())
        sides.append(2 * furthest + 1)
    return sides


def _resized(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """A kernel with zeros around, or without those that it has around."""
    margins = [(side - own) // 2 for side, own in zip(kernel, weight.shape[2:], strict=True)]
    return functional.pad(weight, [margin for margin in reversed(margins) for _ in range(2)])


def _configuration(task: Task, geometry: VolumeGeometry, sliced: bool) -> dict[str, Any]:
    schemes = [_scheme(channel.normalisation) or ("", False) for channel in task.channel_list]
    resample = "resample_data_or_seg_to_shape"
    return {
        "data_identifier": PLANS,
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [*geometry.patch][sliced:],
        "spacing": [*(geometry.spacing or ())][sliced:],
        "normalization_schemes": [scheme for scheme, _ in schemes],
        "use_mask_for_norm": [masked for _, masked in schemes],
        **{f"resampling_fn_{role}": resample for role in ("data", "seg", "probabilities")},
        "resampling_fn_data_kwargs": {**_RESAMPLING, "order": 3},
        "resampling_fn_seg_kwargs": {**_RESAMPLING, "is_seg": True, "order": 1},
        "resampling_fn_probabilities_kwargs": {**_RESAMPLING, "order": 1},
        "batch_dice": False,
    }


def _intensities(task: Task) -> dict[str, dict[str, float]]:
    """Those of each channel: nnU-Net asks for them with every normalisation, and uses them for CT."""
    found = {}
    for index, channel in enumerate(task.channel_list):
        own = channel.normalisation
        low, high = own.window or (0.0, 1.0)
        moments = {"mean": own.mean or 0.0, "std": own.std or 1.0}
        found[str(index)] = {**moments, "percentile_00_5": low, "percentile_99_5": high}
    return found


def _dataset(task: Task, manifest: ModelManifest, where: str) -> dict[str, Any]:
    labels: dict[str, Any] = {"background": 0}
    if task.regions:
        labels |= {name: [*task.labels[name]] for name in task.regions}
    else:
        labels |= {each.labels[0]: each.index for each in task.classes[1:]}
    if _ignores(task):
        labels["ignore"] = task.ignore[0]
    weights = manifest.lineage.weights
    names = [channel.name for channel in task.channel_list]
    if len(names) == 1:
        # The only channel has no name of its own: its modality says how it is to be read.
        names = [_MODALITIES.get(task.modality or "", names[0])]
    return {
        "channel_names": {str(index): name for index, name in enumerate(names)},
        "labels": labels,
        **(
            {"regions_class_order": [task.classes[index].values[0] for index in task.region_classes]}
            if task.regions
            else {}
        ),
        "numTraining": 0,
        "file_ending": ".nii.gz",
        "licence": (weights.licence if weights else None) or "not stated",
        "description": f"Exported from {where} by Locum. Research use only: not a medical device.",
    }


def _ignores(task: Task) -> bool:
    """Whether nnU-Net can name the value without a truth: the one above all others."""
    return len(task.ignore) == 1 and task.ignore[0] == max(task.mask_values) + 1


def _named(manifest: ModelManifest, dataset: int | None) -> tuple[int, str]:
    """The number and the name of the dataset: those of an imported model, unless another is asked for."""
    weights = manifest.lineage.weights
    found = re.match(r"Dataset(\d{3})_(\w+)/", (weights.origin or "") if weights else "")
    title = found[2] if found else re.sub(r"[^A-Za-z0-9]+", "", manifest.name.title()) or "Model"
    return dataset or (int(found[1]) if found else DATASET), title


def _notes(task: Task) -> list[str]:
    found = []
    if task.keep_largest:
        found.append(
            f"nnUNetv2_predict keeps all components of {', '.join(task.keep_largest)}, where Locum keeps the "
            "largest alone"
        )
    if task.ignore and not _ignores(task):
        found.append("dataset.json does not name the values without a truth: nnU-Net takes one, the largest")
    return found
