"""Write a version as a MONAI bundle, which MONAI's own parser opens and which gives the same mask.

The configuration has what the task says, as MONAI's transforms in the order in which Locum works. A network
that sees the stored axes in another order than MONAI, as nnU-Net's do, gets its kernels turned. What MONAI
has no transform for is refused, or on request replaced by the closest that it has: nnU-Net's resampling and
window, normalisation within a region.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.errors import LocumStoreError
from model_store.lens import LENS
from model_store.manifest import WEIGHTS, BaseManifest, ModelManifest
from model_store.normalisation import Clip, Rescale, ZScore
from model_store.task import Task
from model_store.volume import VolumeGeometry
from personalization.errors import PersonalizationError
from personalization.networks import build
from personalization.state import State, from_safetensors
from training.errors import ImportRefused
from training.exchange.bundle import OWN
from training.publish import software

_IMAGE, _PREDICTION, _GRID = "image", "pred", "grid"
# Every combination of regions has an entry in a table.
_MOST_REGIONS = 12
_FAMILY = "monai."
_NOTICE = "Research use only: not a medical device."


def write(artefact: Artefact[BaseManifest], out: Path, *, closest: bool = False) -> tuple[str, ...]:
    """Write the bundle into the new folder `out`, and return what it does in another way than the version.

    That is nothing, but with `closest`, which the folder's README says too.

    Raises ImportRefused for a version that is no single MONAI network of volumes, for a field of its task
    that MONAI has nothing for, and where `out` has files already.
    """
    try:
        manifest = artefact.expect(ModelManifest).manifest
    except LocumStoreError as error:
        raise ImportRefused(f"{artefact}: expected one model, which a bundle has: {error}") from error
    if LENS in manifest.files:
        raise ImportRefused(
            f"{artefact}: it sees scans through a lens ({LENS}), which MONAI has no transforms for: "
            f"{_instead(manifest.task)}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ImportRefused(f"{out}: expected a new or empty folder, found files")
    state, target, arguments = _network(artefact, manifest)
    task, notes = closest_to(manifest.task) if closest else (manifest.task, ())
    task, state, arguments = _with_stored_axes(task, state, target, arguments)
    manifest = manifest.model_copy(update={"task": task})
    inference = _inference(task, str(artefact), target, arguments)
    for folder in ("configs", "models", "docs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    written = _as_text(inference)
    own = {"inference": sha256(written), "task": task.model_dump(mode="json")}
    metadata = _as_text({**_metadata(artefact, manifest), OWN: own})
    for name, content in (("inference", written), ("metadata", metadata)):
        (out / "configs" / f"{name}.json").write_bytes(content)
    torch.save(state, out / "models" / "model.pt")
    (out / "LICENSE").write_text(f"Licence of the weights: {_licence(manifest)}\n", encoding="utf-8")
    (out / "docs" / "README.md").write_text(_readme(artefact, manifest, notes), encoding="utf-8")
    return notes


def _instead(task: Task) -> str:
    if task.geometry is not None:
        return "export its parent, which sees them as they are"
    return "`python -m model_store export onnx` writes its graph with the lens in front"


def _as_text(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=4, ensure_ascii=False)}\n".encode()


def closest_to(task: Task) -> tuple[Task, tuple[str, ...]]:
    """The task with MONAI's nearest in place of what MONAI has nothing for, and a note on each such place."""
    geometry = task.geometry
    if geometry is None:
        return task, ()
    changed: dict[str, Any] = {}
    notes: list[str] = []
    if geometry.window == "nnunet":
        changed["window"] = "gaussian"
        notes.append("windows are placed in equal steps, where nnU-Net spreads them evenly")
    if geometry.resampling == "nnunet":
        changed["resampling"] = "linear"
        notes.append("scans are resampled linearly, where nnU-Net uses cubic splines")
    content = task.model_dump(mode="json")
    content["geometry"] |= changed
    for each in (content, *(content["channels"] if isinstance(content["channels"], list) else ())):
        if each.get("normalisation", {}).get("within") == "region":
            each["normalisation"]["within"] = "nonzero"
            notes.append("normalisation is over what is not zero, without the holes that nnU-Net fills")
    return Task.model_validate(content), tuple(dict.fromkeys(notes))


def _with_stored_axes(
    task: Task, state: State, target: str, arguments: dict[str, Any]
) -> tuple[Task, State, dict[str, Any]]:
    """The same network with its axes in the order of the file, as MONAI sees a scan that it does not turn.

    A convolution commutes with a turn of its input and kernel; so does everything else in a DynUNet.
    """
    geometry = task.geometry
    if geometry is None or target != "DynUNet" or not geometry.axes.islower() or geometry.axes == "ijk":
        return task, state, arguments
    order = [geometry.axes.index(axis) for axis in "ijk"]

    def turned(value: Any) -> Any:
        if isinstance(value, list | tuple):
            whole = len(value) == len(order) and all(isinstance(each, int) for each in value)
            return [value[axis] for axis in order] if whole else [turned(each) for each in value]
        return value

    along = {"axes": "ijk", "patch": turned(geometry.patch)}
    if geometry.spacing is not None:
        along["spacing"] = tuple(geometry.spacing[axis] for axis in order)
    if geometry.mirror:
        along["mirror"] = tuple(sorted(order.index(axis) for axis in geometry.mirror))
    content = task.model_dump(mode="json")
    content["geometry"] |= along
    by_axis = ("kernel_size", "strides", "upsample_kernel_size")
    changed = {name: turned(value) if name in by_axis else value for name, value in arguments.items()}
    kernels = {
        name: tensor.permute(0, 1, *(2 + axis for axis in order)).contiguous() if tensor.ndim == 5 else tensor
        for name, tensor in state.items()
    }
    return Task.model_validate(content), kernels, changed


def _network(artefact: Artefact[Any], manifest: ModelManifest) -> tuple[State, str, dict[str, Any]]:
    """MONAI's own network with the version's weights: its class and the arguments of its constructor."""
    name = manifest.network.name
    if name == "averaged":
        raise ImportRefused(
            f"{artefact}: expected one network, which a bundle has, found the average of "
            f"{manifest.network.arguments['members']}: import one fold (--fold 0) and export that, or send "
            "its graph.onnx"
        )
    if not name.startswith(_FAMILY):
        raise ImportRefused(
            f"{artefact}: expected one of MONAI's networks, found '{name}', of which MONAI's parser knows "
            "no class: "
            "send its graph.onnx"
        )
    from monai.networks import nets

    try:
        own = build(name, **manifest.network.arguments)
        own.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    except (PersonalizationError, LocumStoreError, RuntimeError) as error:
        raise ImportRefused(f"{artefact}: {error}") from error
    arguments: dict[str, Any] = own.monai_arguments  # type: ignore[assignment]  # of MONAI's networks alone
    target = type(own).__name__
    theirs = getattr(nets, target)(**arguments)
    # DynUNet has each tensor by a second name, which shares the first one's memory.
    theirs.load_state_dict(own.state_dict(), strict=False)
    state = {key: tensor.detach().clone() for key, tensor in theirs.state_dict().items()}
    return state, target, arguments


def _inference(task: Task, where: str, target: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    geometry = task.geometry
    if geometry is None:
        raise ImportRefused(
            f"{where}: expected a task of volumes, found one of slices of a fixed size, for which MONAI "
            "has no inferer: "
            "send its graph.onnx"
        )
    _check(task, geometry, where)
    activate = "sigmoid" if task.regions else "softmax"
    network = "@network_def"
    if geometry.average == "probabilities":
        last = "torch.nn.Sigmoid()" if task.regions else "torch.nn.Softmax(1)"
        network = f"torch.nn.Sequential(@network_def, {last})"
    if geometry.mirror:
        network = _mirrored(network, geometry.mirror)
    return {
        "imports": ["$import glob", "$import monai", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/scans'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii.gz'))",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {"_target_": target, **arguments},
        "network": f"${network}.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": _preprocessing(task, geometry, where)},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': i} for i in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(geometry.patch),
            "sw_batch_size": 1,
            "overlap": geometry.overlap,
            "mode": geometry.window,
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": _postprocessing(task, geometry, activate if geometry.average == "logits" else None),
        },
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network_def"},
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def _mirrored(network: str, axes: Sequence[int]) -> str:
    """An expression of a module that averages a network's answers over all mirrorings along `axes`."""
    turns = [
        [2 + axis for axis in turn]
        for count in range(len(axes) + 1)
        for turn in itertools.combinations(axes, count)
    ]
    mean = f"torch.stack([self[0](x.flip(turn)).flip(turn) for turn in {turns}]).mean(dim=0)"
    return f"type('Mirrored', (torch.nn.Sequential,), {{'forward': lambda self, x: {mean}}})({network})"


def _check(task: Task, geometry: VolumeGeometry, where: str) -> None:
    alone = all(
        len(own := task.label_classes(label)) == 1 and task.classes[own[0]].labels == (label,)
        for label in task.keep_largest
    )
    problems = {
        "keep_largest of labels that overlap": bool(task.keep_largest) and (bool(task.regions) or not alone),
        f"window: {geometry.window}": geometry.window == "nnunet",
        f"resampling: {geometry.resampling}": geometry.resampling == "nnunet",
        f"axes: {geometry.axes}": geometry.axes.islower() and geometry.axes != "ijk",
        f"more than {_MOST_REGIONS} regions": len(task.regions) > _MOST_REGIONS,
    }
    if found := [name for name, holds in problems.items() if holds]:
        raise ImportRefused(
            f"{where}: MONAI has no transform for {', '.join(found)} of the task: send its graph.onnx, or "
            "add --closest to have the nearest that MONAI has, where there is one"
        )


def _preprocessing(task: Task, geometry: VolumeGeometry, where: str) -> list[dict[str, Any]]:
    made = [_of("LoadImaged", _IMAGE), _of("EnsureChannelFirstd", _IMAGE)]
    if geometry.axes != "ijk":
        made.append(_of("Orientationd", _IMAGE, axcodes=geometry.axes))
    if geometry.crop == "nonzero":
        made.append(
            _of(
                "CropForegroundd",
                _IMAGE,
                source_key=_IMAGE,
                select_fn="$lambda x: x != 0",
                allow_smaller=True,
            )
        )
    intensities = _intensities(task, where)
    spacing = [] if geometry.spacing is None else _spacing(geometry.spacing, geometry.resampling)
    made += [*intensities, *spacing] if geometry.normalise == "before" else [*spacing, *intensities]
    return [*made, _of("EnsureTyped", _IMAGE)]


def _spacing(spacing: Sequence[float | None], rule: str) -> list[dict[str, Any]]:
    """MONAI's own rule keeps the centre of the first voxel. Locum's keeps the scan's area, so that a voxel is
    not quite as large as the spacing says: the image is resampled to a grid that is made by the side."""
    if rule == "monai":
        return [_of("Spacingd", _IMAGE, pixdim=[mm or -1 for mm in spacing], mode="bilinear")]
    sides = (
        "max(1, round(n * mm / (to or mm))) for n, mm, to in "
        f"zip(x.shape[1:], x.pixdim.tolist(), {list(spacing)})"
    )
    return [
        _of("CopyItemsd", _IMAGE, names=_GRID),
        _of("Lambdad", _GRID, func=f"$lambda x: monai.transforms.Resize([{sides}], mode='trilinear')(x)"),
        _of("ResampleToMatchd", _IMAGE, key_dst=_GRID, mode="bilinear", padding_mode="border"),
    ]


def _intensities(task: Task, where: str) -> list[dict[str, Any]]:
    first, *others = (channel.normalisation.ordered_steps for channel in task.channel_list)
    if any(steps != first for steps in others):
        raise ImportRefused(
            f"{where}: its channels are normalised in different ways, and a bundle has one way for all: "
            "send its "
            "graph.onnx"
        )
    made = []
    for step in first:
        if isinstance(step, ZScore):
            if step.within == "region":
                raise ImportRefused(
                    f"{where}: MONAI has no transform for normalisation within a region: send its "
                    "graph.onnx, or add --closest to have what is not zero in its place"
                )
            made.append(
                _of(
                    "NormalizeIntensityd",
                    _IMAGE,
                    nonzero=step.within == "nonzero",
                    channel_wise=True,
                    **{"subtrahend": step.mean} if step.mean is not None else {},
                    **{"divisor": step.std} if step.std is not None else {},
                )
            )
        elif isinstance(step, Clip) and step.percentiles is not None:
            low, high = step.percentiles
            made.append(_of("ClipIntensityPercentilesd", _IMAGE, lower=low, upper=high, channel_wise=True))
        elif isinstance(step, Rescale) and step.percentiles is not None:
            low, high = step.percentiles
            ends = {"b_min": step.to[0], "b_max": step.to[1], "clip": step.clip, "channel_wise": True}
            made.append(_of("ScaleIntensityRangePercentilesd", _IMAGE, lower=low, upper=high, **ends))
        elif step.window is not None:
            to, clip = (step.to, step.clip) if isinstance(step, Rescale) else (step.window, True)
            ends = {"a_min": step.window[0], "a_max": step.window[1], "b_min": to[0], "b_max": to[1]}
            made.append(_of("ScaleIntensityRanged", _IMAGE, **ends, clip=clip))
        elif isinstance(step, Rescale):
            made.append(_of("ScaleIntensityd", _IMAGE, minv=step.to[0], maxv=step.to[1], channel_wise=True))
    return made


def _postprocessing(task: Task, geometry: VolumeGeometry, activate: str | None) -> list[dict[str, Any]]:
    activation = [_of("Activationsd", _PREDICTION, **{activate: True})] if activate else []
    ends = {"threshold": 0.5} if task.regions else {"argmax": True}
    discrete = _of("AsDiscreted", _PREDICTION, **ends)
    labels = geometry.restore == "labels"
    invert = _of(
        "Invertd",
        _PREDICTION,
        transform="@preprocessing",
        orig_keys=_IMAGE,
        nearest_interp=labels,
        to_tensor=True,
    )
    order = {
        "labels": [*activation, discrete, invert],
        "probabilities": [*activation, invert, discrete],
        "logits": [invert, *activation, discrete],
    }[geometry.restore]
    save = _of("SaveImaged", _PREDICTION, output_dir="@output_dir", output_ext=".nii.gz", resample=False)
    return [*order, *_largest(task), *_values(task), save]


def _largest(task: Task) -> list[dict[str, Any]]:
    """Components of classes are those of labels where each label is one class; `_check` has looked."""
    if not task.keep_largest:
        return []
    kept = [task.label_classes(label)[0] for label in task.keep_largest]
    options = {"applied_labels": kept, "is_onehot": False, "connectivity": 3}
    return [_of("KeepLargestConnectedComponentd", _PREDICTION, **options)]


def _values(task: Task) -> list[dict[str, Any]]:
    """From indices of classes, or from regions, to the mask values of the labels."""
    values = [each.values[0] for each in task.classes]
    if task.regions:
        combinations = np.arange(1 << len(task.regions))
        inside = ((combinations >> index) & 1 == 1 for index in range(len(task.regions)))
        table = [values[index] for index in task.classes_of_regions(inside).tolist()]
        bits = " + ".join(f"{1 << index} * x[{index}].long()" for index in range(len(task.labels)))
        return [_of("Lambdad", _PREDICTION, func=f"$lambda x: torch.tensor({table})[({bits}).cpu()][None]")]
    if values == [*range(len(values))]:
        return []
    indices = [*range(len(values))]
    return [_of("MapLabelValued", _PREDICTION, orig_labels=indices, target_labels=values)]


def _of(target: str, key: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, "keys": key, **arguments}


def _metadata(artefact: Artefact[Any], manifest: ModelManifest) -> dict[str, Any]:
    task, versions = manifest.task, software()
    names = [each.name for each in task.channel_list]
    outputs = (
        [*task.regions]
        if task.regions
        else [" and ".join(each.labels) or "background" for each in task.classes]
    )
    sides = list(task.input_shape)

    def side(kind: str, channels: list[str], **further: Any) -> dict[str, Any]:
        return {
            "type": "image",
            "format": kind,
            "num_channels": len(channels),
            "spatial_shape": sides,
            "dtype": "float32",
            "value_range": [],
            "is_patch_data": True,
            "channel_def": {str(index): name for index, name in enumerate(channels)},
            **further,
        }

    modality = {"modality": task.modality} if task.modality else {}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported from {artefact}"},
        "monai_version": versions.get("monai", "1.5.0"),
        "pytorch_version": versions["torch"].partition("+")[0],
        "numpy_version": versions["numpy"],
        "optional_packages_version": {
            "nibabel": "5.3.0",
            **({"scikit-image": "0.25.0"} if task.keep_largest else {}),
        },
        "name": manifest.name,
        "task": f"segmentation: {', '.join(task.labels)}",
        "description": f"{artefact}, {artefact.digest}, by {manifest.lineage.method}",
        "authors": "",
        "copyright": _licence(manifest),
        "license": _licence(manifest),
        "intended_use": _NOTICE,
        "network_data_format": {
            "inputs": {_IMAGE: side("magnitude", names, **modality)},
            "outputs": {_PREDICTION: side("segmentation", outputs)},
        },
    }


def _licence(manifest: ModelManifest) -> str:
    weights = manifest.lineage.weights
    return "not stated" if weights is None or weights.licence is None else weights.licence


def _readme(artefact: Artefact[Any], manifest: ModelManifest, notes: Sequence[str]) -> str:
    lineage = manifest.lineage
    rows = {
        "Version": f"{artefact} ({artefact.digest})",
        "Labels": ", ".join(manifest.task.labels),
        "Made by": lineage.method,
        "Sites": ", ".join(lineage.sites) or "none",
        "Licence of the weights": str(lineage.details.get("licence", "not stated")),
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in rows.items())
    other = "".join(f"\n- {note}" for note in notes)
    said = f"\nIn another way than the version:\n{other}\n" if notes else ""
    return f"# {manifest.name}\n\nExported from Locum. {_NOTICE}\n\n{lines}\n{said}"
