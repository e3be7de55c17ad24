"""A folder of nnU-Net v2 (`plans.json`, `dataset.json`, `fold_X/checkpoint_final.pth`) as a network and its
task.

`nnunet_networks.py` has what its networks are here.

Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation",
Nature Methods 18, 2021. Read in nnunetv2 2.8.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from torch import nn

from model_store.guard import FOREGROUND, ReferenceStatistics, along_axes
from model_store.manifest import NetworkSpec
from model_store.normalisation import Normalisation, Rescale
from model_store.task import Task
from model_store.volume import Channel, VolumeGeometry
from personalization.errors import NetworkError
from personalization.networks import outline
from personalization.state import State
from training.data.segmentation.sidecar import channels_in
from training.errors import ImportRefused
from training.exchange import checkpoints, nnunet_networks
from training.exchange.imported import (
    Imported,
    channel_names,
    described,
    made,
    reference_of,
    slug,
    stored_axes,
)
from training.exchange.nnunet_networks import DIMENSIONS
from training.exchange.source import MIB, Source
from training.weights.bounds import as_floats, check_expanded

_MOST_TEXT: Final = 16 * MIB
_FOLD = re.compile(r"fold_(\d{1,2}|all)/(checkpoint_[a-z]+)\.pth")
_POSTPROCESSING = re.compile(r"crossval_results_folds_\w+/postprocessing\.json")
# What nnU-Net answers with by default: the last weights of every fold of the cross-validation.
_FINAL: Final = "checkpoint_final"
_BEST: Final = "checkpoint_best"
_ALL: Final = "all"
# Files of versions before 2.
_BEFORE_V2: Final = ("plans.pkl", "model_final_checkpoint.model", "model_final_checkpoint.model.pkl")
# The axes that a reader gives: stored ones, or the patient's.
AXES: Final = {
    "SimpleITKIO": "kji",
    "SimpleITKIOWithReorient": "SAR",
    "NibabelIO": "kji",
    "NibabelIOWithReorient": "SAR",
}
SCHEMES: Final = {
    "RescaleTo01Normalization": (Rescale(),),
    "RGBTo01Normalization": (Rescale(window=(0, 255)),),
}
_KNOWN_SCHEMES: Final = ("CTNormalization", "ZScoreNormalization", "NoNormalization", *SCHEMES)

_FINGERPRINT: Final = "dataset_fingerprint.json"
# Names of channels by which a training set is of MR.
_MR: Final = frozenset("MR MRI T1 T1W T1C T1CE T1GD T2 T2W FLAIR PD ADC DWI".split())  # noqa: SIM905

Triple: TypeAlias = tuple[int, int, int]
PositiveFinite: TypeAlias = Annotated[FiniteFloat, Field(gt=0)]
Model = TypeVar("Model", bound=BaseModel)


class _Read(BaseModel):
    """Fields that are read; others are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Resampling(_Read):
    order: int = 3
    order_z: int = 0
    force_separate_z: bool | None = None


class _Configuration(_Read):
    """A configuration of the plans, as `3d_fullres`. Sides and spacing of slices leave out the first axis."""

    patch_size: nnunet_networks.Sides
    spacing: Annotated[tuple[PositiveFinite, ...], Field(min_length=2, max_length=DIMENSIONS)]
    normalization_schemes: tuple[str, ...]
    use_mask_for_norm: tuple[bool, ...]
    resampling_fn_data: str = "resample_data_or_seg_to_shape"
    resampling_fn_data_kwargs: _Resampling = _Resampling()
    resampling_fn_probabilities: str = "resample_data_or_seg_to_shape"
    resampling_fn_probabilities_kwargs: _Resampling = _Resampling(order=1)


class _Intensities(_Read):
    """Moments and percentiles of a channel's foreground, over the training set."""

    mean: FiniteFloat
    std: FiniteFloat
    percentile_00_5: FiniteFloat
    percentile_99_5: FiniteFloat


class _Plans(_Read):
    """`plans.json`."""

    dataset_name: str = ""
    plans_name: str = ""
    image_reader_writer: str
    transpose_forward: Triple
    foreground_intensity_properties_per_channel: dict[str, _Intensities] = {}
    configurations: dict[str, dict[str, Any]]


class _Fingerprint(_Read):
    """`dataset_fingerprint.json`: spacings in mm and voxels of every training scan, in the reader's axes."""

    spacings: tuple[tuple[PositiveFinite, PositiveFinite, PositiveFinite], ...] = Field(min_length=1)
    shapes_after_crop: tuple[Triple, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _of_the_same_scans(self) -> Self:
        if len(self.spacings) != len(self.shapes_after_crop):
            raise ValueError(
                f"expected as many shapes as spacings, found {len(self.shapes_after_crop)} and "
                f"{len(self.spacings)}"
            )
        return self


class _Kept(_Read):
    """Labels, or regions of several values, of which all together have one largest component."""

    labels_or_regions: int | tuple[int | tuple[int, ...], ...]

    @property
    def values(self) -> set[int]:
        found = self.labels_or_regions
        each = (found,) if isinstance(found, int) else found
        return {value for one in each for value in ((one,) if isinstance(one, int) else one)}


class _Postprocessing(_Read):
    """`postprocessing.json`: steps after the network that made the cross-validation's masks better."""

    postprocessing_fns: tuple[str, ...] = ()
    postprocessing_kwargs: tuple[_Kept, ...] = ()


class _Dataset(_Read):
    """`dataset.json`. `labels` has one value per label, or several for a region."""

    channel_names: dict[str, str] = Field(
        min_length=1, max_length=16, validation_alias=AliasChoices("channel_names", "modality")
    )
    labels: dict[str, int | tuple[int, ...]] = Field(min_length=1)
    regions_class_order: tuple[int, ...] | None = None
    licence: str | None = Field(None, validation_alias=AliasChoices("licence", "license"))
    reference: str | None = None

    @property
    def channels(self) -> list[str]:
        """Names in the order of the channels' files."""
        return channels_in(self.channel_names)


def read(
    source: Source,
    folds: Sequence[str] = (),
    *,
    mirror: bool = True,
    checkpoint: str | None = None,
    inside: str = "",
    configuration: str | None = None,
    trainer: str | None = None,
) -> Imported:
    """Read the trainer's folder, or the one in a folder above it, as of the dataset or of the results.

    Args:
        source: the folder, or a zip file as nnU-Net exports it.
        folds: those to average; without, nnU-Net's own choice: every one but `all` that has the checkpoint.
        mirror: answer as nnU-Net does, with eight passes instead of one.
        checkpoint: name of the checkpoints' files; None for nnU-Net's own, `checkpoint_final`.
        inside: path of the trainer's folder, or the end of it, where there are several.
        configuration, trainer: parts of the name of the trainer's folder, as `3d_fullres` and
            `nnUNetTrainer`, where there are several.

    Raises ImportRefused for another architecture (as the ResEnc presets), a cascade, 2-D plans, and another
    reader, resampling or normalisation than those of nnU-Net's planner.
    """
    asked = {0: trainer, -1: configuration}
    entered = source.enter(
        "plans.json",
        "dataset.json",
        inside=inside,
        # TRAINER__PLANS__CONFIGURATION
        fits=lambda folder: all(each in (None, folder.split("__")[part]) for part, each in asked.items()),
    )
    where = str(source.path / entered)
    _check_version(source)
    plans = _parsed(_Plans, source, "plans.json")
    dataset, remarks = _dataset(source)
    named, notes = _folds(source, folds, checkpoint)
    read_files = {name: source.read(name, checkpoints.MOST_BYTES) for name in named.values()}
    loaded = [checkpoints.load(content, f"{where}: {name}") for name, content in read_files.items()]
    names = {str(_inside(each, "init_args", "configuration")) for each in loaded}
    if len(names) != 1:
        raise ImportRefused(
            f"{where}: expected folds of one configuration, found {', '.join(sorted(names))[:200]}"
        )
    name = names.pop()
    trained = str(_inside(loaded[0], "trainer_name", default=""))
    for what, wanted, there in (("configuration", configuration, name), ("trainer", trainer, trained)):
        if wanted not in (None, there):
            raise ImportRefused(f"{where}: expected the {what} {wanted[:64]}, found {there[:64]}")
    raw = _merged(plans, name, where)
    network = nnunet_networks.read(raw, name, where)
    try:
        planned = _Configuration.model_validate(raw)
    except ValidationError as error:
        raise _misread(where, f"plans.json: configuration {name}", error) from error
    axes = _inside(loaded[0], "inference_allowed_mirroring_axes", default=None) or ()
    # nnU-Net counts the axes of a slice from its own first.
    first = DIMENSIONS - len(planned.patch_size)
    mirrored = tuple(axis for axis in range(DIMENSIONS) if mirror and axis - first in axes)
    task = _task(plans, dataset, planned, mirrored, where)
    sides = {"in_channels": task.in_channels, "classes": task.out_channels}
    drawn = _outline(network, {**sides, **network.arguments}, where)
    states = []
    for each, (file, content) in zip(loaded, read_files.items(), strict=True):
        weights = _weights(each, len(content), network, drawn, f"{where}: {file}")
        states.append(network.state(weights, drawn, f"{where}: {file}"))
    own = dict(network.arguments)
    spec = NetworkSpec(
        name="averaged",
        arguments={"network": network.name, "arguments": own, "members": len(states)},
    )
    state = {
        f"members.{index}.{key}": value for index, one in enumerate(states) for key, value in one.items()
    }
    if len(states) == 1:
        spec, state = NetworkSpec(name=network.name, arguments=own), states[0]
    return Imported(
        task=task,
        network=NetworkSpec(name=spec.name, arguments={**sides, **spec.arguments}),
        state=state,
        form="nnU-Net v2",
        weights=described(
            ", ".join(read_files),
            read_files.values(),
            ", ".join(filter(None, (f"{plans.dataset_name or task.name}/{name}", dataset.reference))),
            dataset.licence,
        ),
        details={"plans": plans.plans_name, "folds": list(named)},
        statistics=_training_scans(source, plans, task),
        notes=(
            *(() if not entered else (f"the model is that of {entered}",)),
            *remarks,
            *notes,
            *_postprocessing(source, task),
            *stored_axes(task),
        ),
    )


def _training_scans(source: Source, plans: _Plans, task: Task) -> ReferenceStatistics | None:
    """What the folder says of the scans that the network was trained on."""
    ranges: dict[str, tuple[float, float]] = {}
    count = 0
    if (foreground := plans.foreground_intensity_properties_per_channel.get("0")) and task.channel_count == 1:
        ranges[FOREGROUND] = foreground.percentile_00_5, foreground.percentile_99_5
    if source.has(_FINGERPRINT):
        found = _parsed(_Fingerprint, source, _FINGERPRINT)
        turned = [*plans.transpose_forward]
        voxels = np.array(found.spacings)[:, turned]
        lengths = voxels * np.array(found.shapes_after_crop)[:, turned]
        lows, highs = (along_axes(of(voxels, axis=0), of(lengths, axis=0)) for of in (np.min, np.max))
        ranges |= {name: (float(low), float(highs[name])) for name, low in lows.items()}
        count = len(voxels)
    return reference_of(task.channel_count, count, ranges)


def _postprocessing(source: Source, task: Task) -> list[str]:
    """Notes on what nnU-Net found to make its masks better, which another of its commands does.

    Its pickled twin has code, and is not read.
    """
    notes = []
    for name in filter(_POSTPROCESSING.fullmatch, source.names):
        for kept in _parsed(_Postprocessing, source, name).postprocessing_kwargs:
            labels = [label for label, own in task.labels.items() if kept.values.issuperset(own)]
            flags = " ".join(f"--keep-largest {label}" for label in labels)
            alone = "" if len(labels) == 1 else " together"
            here = f"{flags} does" if len(labels) == 1 else f"{flags} keeps that of each by itself"
            notes.append(
                f"{name}: masks of the cross-validation were better with the largest component alone of "
                f"{' and '.join(labels)}{alone}, which nnUNetv2_apply_postprocessing leaves: here {here}"
            )
    return [*dict.fromkeys(notes)]


def _check_version(source: Source) -> None:
    """Raise ImportRefused, which says what it is, for what has no plans of version 2."""
    if source.has("plans.json") and source.has("dataset.json"):
        return
    last = {name.rpartition("/")[2] for name in source.names}
    if old := sorted(last & {*_BEFORE_V2}):
        raise ImportRefused(
            f"{source.path}: expected a model of nnU-Net v2, found one of a version before it ({old[0]}): "
            "its plans are pickled, which is code, and are not read: export the network to onnx where that "
            "version is installed and use `import onnx`, or train it by version 2"
        )
    raise ImportRefused(
        f"{source.path}: expected plans.json and dataset.json of nnU-Net v2 beside fold_0, found "
        f"{', '.join(sorted(last & {'plans.json', 'dataset.json'})) or 'neither'}: name the trainer's folder "
        "(nnUNetTrainer__nnUNetPlans__3d_fullres), one above it, or the zip file of "
        "nnUNetv2_export_model_to_zip"
    )


def _folds(source: Source, wanted: Sequence[str], checkpoint: str | None) -> tuple[dict[str, str], list[str]]:
    """The files of the folds by fold, and notes on what is left out. Raises ImportRefused."""
    there: dict[str, list[str]] = {}
    for match in filter(None, map(_FOLD.fullmatch, source.names)):
        there.setdefault(match[1], []).append(match[2])
    chosen = (checkpoint or _FINAL).removesuffix(".pth")
    notes: list[str] = []
    last = any(_FINAL in files for files in there.values())
    if checkpoint is None and not wanted and not last and any(_BEST in files for files in there.values()):
        chosen = _BEST
        notes.append(f"no fold has {_FINAL}.pth, which nnU-Net answers with: {_BEST}.pth is taken")
    having = sorted(
        (fold for fold, files in there.items() if chosen in files), key=lambda fold: (len(fold), fold)
    )
    folds = [*dict.fromkeys(wanted)] or [fold for fold in having if fold != _ALL] or having
    missing = [fold for fold in folds if fold not in having]
    if missing or not folds:
        files = ", ".join(f"fold_{fold}/{name}.pth" for fold, names in there.items() for name in names)
        raise ImportRefused(
            f"{source.path}: expected fold_{missing[0] if missing else '0'}/{chosen}.pth, found "
            f"{files[:300] or 'no fold'}: name others with --folds and --checkpoint, or the folder with "
            "plans.json and fold_0"
        )
    if folds == [_ALL] and not wanted:
        notes.append(f"fold_all is the only fold with {chosen}.pth, so it answers alone")
    left = [] if wanted else [fold for fold in there if fold not in folds]
    for fold in left:
        why = "it is no fold of the cross-validation" if fold == _ALL else f"it has no {chosen}.pth"
        notes.append(
            f"fold_{fold} is left out, as nnU-Net does, since {why}: --folds or --checkpoint takes it"
        )
    return {fold: f"fold_{fold}/{chosen}.pth" for fold in folds}, notes


def _merged(plans: _Plans, name: str, where: str) -> dict[str, Any]:
    """The configuration, with what it inherits."""
    chain: list[dict[str, Any]] = []
    asked: Any = name
    while asked is not None:
        found = plans.configurations.get(str(asked))
        if found is None or len(chain) > len(plans.configurations):
            raise ImportRefused(
                f"{where}: plans.json: expected the configuration {str(asked)[:64]!r}, found none"
            )
        chain.append(found)
        asked = found.get("inherits_from")
    merged = {key: value for each in reversed(chain) for key, value in each.items()}
    if merged.get("previous_stage"):
        raise ImportRefused(
            f"{where}: {name} is the second stage of a cascade: its network sees the first stage's mask "
            "beside the scan, and a version here is one network: import 3d_fullres, or 3d_lowres, the first "
            "stage"
        )
    return merged


def _outline(network: nnunet_networks.Network, arguments: Mapping[str, Any], where: str) -> nn.Module:
    """The network on torch's meta device. Raises ImportRefused."""
    try:
        return outline(network.name, **arguments)
    except NetworkError as error:
        raise ImportRefused(f"{where}: plans.json: {error}") from error


def _weights(
    checkpoint: Any, size: int, network: nnunet_networks.Network, drawn: nn.Module, where: str
) -> State:
    """The weights of a checkpoint of `size` bytes, for a network that is not much larger than they are."""
    state = checkpoints.state_of(checkpoint, size, where)
    state = checkpoints.by_names(state, (network.first, network.last), where)
    if any(name.endswith("running_mean") for name in state):
        trainer = str(_inside(checkpoint, "trainer_name", default="another trainer"))[:64]
        raise ImportRefused(
            f"{where}: expected the network of plans.json, with instance norm, found batch norm, by "
            f"{trainer}: export the network to onnx where nnU-Net is installed and use `import onnx`"
        )
    try:
        check_expanded(size, as_floats(drawn.state_dict().values()), "weights by plans.json")
    except ValueError as error:
        raise ImportRefused(f"{where}: {error}") from error
    return state


def _task(
    plans: _Plans, dataset: _Dataset, configuration: _Configuration, mirrored: tuple[int, ...], where: str
) -> Task:
    if plans.image_reader_writer not in AXES:
        raise ImportRefused(
            f"{where}: plans.json: expected a reader of NIfTI files ({', '.join(AXES)}), found "
            f"{plans.image_reader_writer[:64]!r}"
        )
    if sorted(plans.transpose_forward) != [0, 1, 2]:
        raise ImportRefused(
            f"{where}: plans.json: transpose_forward: expected each of 0, 1 and 2, found "
            f"{list(plans.transpose_forward)}"
        )
    for role, order, function, options in (
        ("data", 3, configuration.resampling_fn_data, configuration.resampling_fn_data_kwargs),
        (
            "probabilities",
            1,
            configuration.resampling_fn_probabilities,
            configuration.resampling_fn_probabilities_kwargs,
        ),
    ):
        if function != "resample_data_or_seg_to_shape" or options != _Resampling(order=order):
            raise ImportRefused(
                f"{where}: plans.json: resampling of {role}: expected nnU-Net's default (order {order}, "
                "thick slices "
                f"apart), found {function[:64]} with {options}"
            )
    count = len(dataset.channel_names)
    if not len(configuration.normalization_schemes) == len(configuration.use_mask_for_norm) == count:
        raise ImportRefused(
            f"{where}: expected a normalisation for each of {count} channels, found another number"
        )
    axes = AXES[plans.image_reader_writer]
    names = channel_names(dataset.channels)
    channels = [
        Channel(name=name, normalisation=_normalisation(plans, configuration, index, where))
        for index, name in enumerate(names)
    ]
    regions = any(not isinstance(values, int) and len(values) > 1 for values in dataset.labels.values())
    labels = {
        name: (values,) if isinstance(values, int) else values
        for name, values in dataset.labels.items()
        if name != "ignore" and values not in (0, (0,))
    }
    ignored = dataset.labels.get("ignore", ())
    if regions:
        ordered = dataset.regions_class_order or ()
        if len(ordered) != len(labels):
            raise ImportRefused(
                f"{where}: dataset.json: expected a value for each region in regions_class_order"
            )
    task = made(
        where,
        name=slug(plans.dataset_name.partition("_")[2] or plans.dataset_name or "nnunet"),
        labels=labels,
        ignore=ignored,
        regions=tuple(labels) if regions else (),
        channels=channels if count > 1 else 1,
        **({} if count > 1 else {"normalisation": channels[0].normalisation}),
        **({"modality": modality} if (modality := _modality(dataset)) else {}),
        geometry=VolumeGeometry(
            spacing=_of_volumes(configuration.spacing, None),
            patch=_of_volumes(configuration.patch_size, 1),
            overlap=0.5,
            window="nnunet",
            axes="".join(axes[axis] for axis in plans.transpose_forward),
            resampling="nnunet",
            normalise="before",
            crop="nonzero",
            average="logits",
            restore="logits",
            mirror=mirrored,
        ),
    )
    if regions:
        _check_order(task, dataset.regions_class_order or (), where)
    return task


def _modality(dataset: _Dataset) -> str | None:
    """DICOM's modality, where the names of the channels are such as nnU-Net's users give."""
    names = {name.strip().upper() for name in dataset.channels}
    return "CT" if names == {"CT"} else "MR" if names <= _MR else None


def _check_order(task: Task, ordered: Sequence[int], where: str) -> None:
    """Raise ImportRefused where nnU-Net paints another value for a combination of regions than Locum would.

    nnU-Net paints the regions one over the other, in the order of the labels, each with its value in
    `ordered`.
    """
    decided = task.region_classes
    last = [int(np.flatnonzero(row)[-1]) for row in task.region_members[1:]]
    alone = [int(decided[region]) for region in last] == [*range(1, len(task.classes))]
    if not alone or any(
        value not in task.classes[index].values for value, index in zip(ordered, decided, strict=True)
    ):
        raise ImportRefused(
            f"{where}: dataset.json: regions_class_order {list(ordered)}: expected the largest region first "
            "and the value that only its own parts have; another order cannot be written in a task"
        )


def _of_volumes(sides: tuple[Any, ...], along_slices: Any) -> tuple[Any, ...]:
    """The same of all three axes: of slices with `along_slices` first."""
    return (*(along_slices for _ in range(DIMENSIONS - len(sides))), *sides)


def _normalisation(plans: _Plans, configuration: _Configuration, index: int, where: str) -> Normalisation:
    scheme = configuration.normalization_schemes[index]
    masked: Literal["region", "all"] = "region" if configuration.use_mask_for_norm[index] else "all"
    known = plans.foreground_intensity_properties_per_channel.get(str(index))
    if scheme == "CTNormalization" and known is not None:
        return Normalisation(
            scope="volume",
            method="fixed",
            window=(known.percentile_00_5, known.percentile_99_5),
            mean=known.mean,
            std=max(known.std, 1e-8),
        )
    if scheme in SCHEMES:
        return Normalisation(scope="volume", steps=SCHEMES[scheme])
    if scheme == "ZScoreNormalization":
        return Normalisation(scope="volume", method="zscore", within=masked)
    if scheme == "NoNormalization":
        return Normalisation(scope="volume", method="none")
    raise ImportRefused(
        f"{where}: plans.json: channel {index}: expected a normalisation of nnU-Net "
        f"({', '.join(_KNOWN_SCHEMES)}), found "
        f"{scheme[:64]!r}"
    )


_REQUIRED: Final = object()


def _inside(found: Any, *keys: str, default: Any = _REQUIRED) -> Any:
    for key in keys:
        if not isinstance(found, Mapping) or key not in found:
            if default is not _REQUIRED:
                return default
            raise ImportRefused(
                f"expected {' / '.join(keys)} in the checkpoint or the plans of nnU-Net v2, found none"
            )
        found = found[key]
    return found


def _dataset(source: Source) -> tuple[_Dataset, list[str]]:
    """What dataset.json says, also where its labels are written as by nnU-Net v1, with a note that they are.

    Raises ImportRefused for labels without values, and for channels that are not named by number.
    """
    name, notes = "dataset.json", list[str]()
    content = _json(source, name)
    if not isinstance(content, dict):
        raise ImportRefused(
            f"{source.path}: {name}: expected an object with labels and channel_names, found "
            f"{_quoted(content)}: take the file that nnU-Net v2 put into the trainer's folder"
        )
    if (labels := _of_version_1(content.get("labels"))) is not None:
        content = {**content, "labels": labels}
        said = ", ".join(f"{label} {value}" for label, value in labels.items())
        notes.append(f"{name}: labels are written as by nnU-Net v1, by value, and are read so: {said[:500]}")
    try:
        return _Dataset.model_validate(content), notes
    except ValidationError as error:
        places = {str(each["loc"][0]) for each in error.errors()}
        channels = "channel_names" if "channel_names" in content else "modality"
        if "labels" in places:
            what, expected = "labels", 'a value for each name, such as {"background": 0, "organ": 1}'
            advice = "write the values of the training's masks"
        elif places & {"channel_names", "modality"}:
            what = channels if channels in content else "channel_names"
            expected = 'a name for each of 1 to 16 channels by its number, such as {"0": "T1", "1": "FLAIR"}'
            advice = "write them in the order of the training's files, _0000 first"
        else:
            raise _misread(str(source.path), name, error) from error
        raise ImportRefused(
            f"{source.path}: {name}: {what}: expected {expected}, found {_quoted(content.get(what))}: "
            f"{advice}"
        ) from error


def _of_version_1(labels: Any) -> dict[str, int] | None:
    """Labels of nnU-Net v1 and the Decathlon (value -> name) by name; None for others, or one name twice."""
    if not isinstance(labels, dict):
        return None
    if not all(
        isinstance(label, str) and re.fullmatch(r"[0-9]{1,4}", value) for value, label in labels.items()
    ):
        return None
    named = {label: int(value) for value, label in labels.items()}
    return named if len(named) == len(labels) > 0 else None


def _quoted(found: Any) -> str:
    text = json.dumps(found)
    return "none" if found is None else text if len(text) <= 100 else f"{text[:100]}…"


def _parsed(model: type[Model], source: Source, name: str) -> Model:
    try:
        return model.model_validate(_json(source, name))
    except ValidationError as error:
        raise _misread(str(source.path), name, error) from error


def _json(source: Source, name: str) -> Any:
    try:
        return json.loads(source.read(name, _MOST_TEXT))
    except (ValueError, RecursionError) as error:
        raise ImportRefused(f"{source.path}: {name}: cannot be read as JSON: {str(error)[:200]}") from error


def _misread(where: str, what: str, error: ValidationError) -> ImportRefused:
    found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
    return ImportRefused(f"{where}: {what}: not as nnU-Net v2 writes it: {found}")
