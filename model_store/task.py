"""The task: the labels or classes, the kind of image, and the preprocessing for the network.

A task is read from `task.yaml` at the root of a federation folder and stored in every manifest.
`model_store.preprocessing` applies it, in training and in serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model_store.errors import TaskError
from model_store.misfits import misfits
from model_store.normalisation import Normalisation
from model_store.patient_pattern import PatientPattern, patient_in
from model_store.volume import MOST_CHANNELS, Channel, VolumeGeometry, of_a_volume

__all__ = [
    "IGNORED",
    "LARGEST_SIDE",
    "LEAST_SIDE",
    "SIZE_MULTIPLE",
    "Channel",
    "Code",
    "LabelCodes",
    "Normalisation",
    "Plane",
    "Task",
    "TaskClass",
    "TaskKind",
    "VolumeGeometry",
]

TaskKind = Literal["segmentation", "classification"]
Plane = Literal["axial", "coronal", "sagittal"]
MaskValue = Annotated[int, Field(ge=0, le=65535)]
# A class name is also a folder of the federation, and a key of a JSON response.
ClassName = Annotated[str, Field(pattern=r"^[^\s./\\][^/\\]{0,63}$")]

# A U-Net pools by two four times, so the sides of its input must be multiples of this.
SIZE_MULTIPLE = 16
# A classifier pools its last map of any size; with a smaller input nothing would remain to pool.
LEAST_SIDE: Final = 8
LARGEST_SIDE: Final = 1024
# Masks hold class indices in 8 bits.
_MOST_CLASSES: Final = 256
# The class index of a place without a truth, of a task that has such.
IGNORED: Final = 255
_MOST_REGIONS: Final = 64
# A task of volumes has a patch in place of a size; unpacking this fails where code expects slices.
_NO_SIZE: Any = ()
# In the context of a validation: a plan will choose the size.
_FOR_PLAN: Final = "for_plan"
_ANY_PATCH: Final = (32, 32, 32)
# Fields of slices, that a task of volumes leaves out.
_OF_SLICES: Final = ("size", "plane", "neighbours", "colour")
_OF_VOLUMES: Final = ("geometry", "regions", "stacked")


def _form_of_channels(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


@dataclass(frozen=True)
class TaskClass:
    """One softmax class: an atom of the labels, or a class of images (see `Task.classes`)."""

    index: int
    labels: tuple[str, ...]
    values: tuple[int, ...]


class Code(BaseModel):
    """A coded concept (PS3.3 8.8): its value in a coding scheme, and its meaning in words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: str = Field(min_length=1, max_length=16, coerce_numbers_to_str=True)
    scheme: str = Field(default="SCT", min_length=1, max_length=16)
    meaning: str = Field(min_length=1, max_length=64)


class LabelCodes(BaseModel):
    """What a label is for other systems: its category (for example a tissue) and its type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    category: Code
    type: Code


class Task(BaseModel):
    """A task: segmentation (labels per pixel) or classification (one class per image).

    For segmentation, `labels` maps a label's name to its mask values. Labels may nest or overlap (an optic
    disc is {1, 2}, its cup {2}). A mask value in neither `labels` nor `background` is rejected. For
    classification, `class_names` has the classes in the order of the network's outputs.

    A network sees slices of `size` pixels in a `plane`, or, with a `geometry`, volumes in millimetres:

    - `channels` is then 1, or a list of names, each with its own normalisation. Each channel of a case is a
      file of its own, or with `stacked` all are one 4-D file, in this order.
    - `regions` lists every label once, in the order of the network's outputs, which are then a sigmoid each
      in place of exclusive classes; see `classes_of_regions`. (A manifest has no order of `labels`.)

    `ignore` has the mask values of places without a truth, which are in no loss and no score. `absent` says
    what it means that no mask of a site has a label that other sites draw: that the site does not draw it
    (`undrawn`), or that it is not there (`background`).

    `keep_largest` lists labels of which an answer keeps the largest connected component alone, in training's
    validation and in serving: see `preprocessing.components`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    kind: TaskKind = "segmentation"
    class_names: tuple[ClassName, ...] = Field((), validate_default=True)
    labels: dict[str, tuple[MaskValue, ...]] = Field({}, validate_default=True)
    background: tuple[MaskValue, ...] = (0,)
    ignore: tuple[MaskValue, ...] = ()
    absent: Literal["undrawn", "background"] = "undrawn"
    channels: Annotated[
        Annotated[Literal[1, 3], Tag("number")]
        | Annotated[tuple[Channel, ...], Field(min_length=1, max_length=MOST_CHANNELS), Tag("list")],
        Discriminator(_form_of_channels),
    ] = 1
    colour: Literal["refuse", "luminance", "replicate"] = "refuse"
    neighbours: int = Field(default=0, ge=0, le=3)
    plane: Plane = "axial"
    geometry: VolumeGeometry | None = None
    regions: tuple[str, ...] = ()
    stacked: bool = False
    keep_largest: tuple[str, ...] = ()
    normalisation: Normalisation = Field(Normalisation(), validate_default=True)
    size: tuple[int, int] = Field(_NO_SIZE, validate_default=True)
    patient: PatientPattern | None = None
    modality: str | None = Field(None, pattern=r"^[A-Z]{2,16}$")
    codes: dict[str, LabelCodes] = Field({})

    @field_validator("normalisation", mode="before")
    @classmethod
    def _of_its_scope(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.data.get("geometry") is None else of_a_volume(value)

    @field_validator("class_names")
    @classmethod
    def _names_of_its_kind(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        classifies = info.data.get("kind") == "classification"
        if classifies and (len(names) < 2 or len({*names}) < len(names)):
            raise ValueError(f"a classification needs at least 2 different ones; found {list(names)}")
        if not classifies and names:
            raise ValueError("only for classification; for one class per image: kind: classification")
        return names

    @field_validator("labels")
    @classmethod
    def _labels_of_its_kind(cls, labels: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        classifies = info.data.get("kind") == "classification"
        if classifies and labels:
            raise ValueError("mask values are only for segmentation; a classification has class_names")
        if not classifies and not labels:
            raise ValueError("a segmentation needs at least 1; for one class per image: kind: classification")
        return labels

    @field_validator("size", mode="wrap")
    @classmethod
    def _fits(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> tuple[int, int]:
        if value == _NO_SIZE:
            if info.data.get("geometry", "found wrong") is None and not (info.context or {}).get(_FOR_PLAN):
                raise PydanticCustomError(
                    "missing",
                    "expected the pixels of the network's input, [H, W], or, for volumes, a geometry with "
                    "spacing and patch in its place; found neither",
                )
            return _NO_SIZE  # type: ignore[no-any-return]
        size: tuple[int, int] = handler(value)
        if info.data.get("geometry") is not None:
            raise ValueError("of slices, and a network of this task sees volumes (geometry); remove it")
        segments = info.data.get("kind") == "segmentation"
        multiple, least = (SIZE_MULTIPLE, SIZE_MULTIPLE) if segments else (1, LEAST_SIDE)
        if any(side % multiple or not least <= side <= LARGEST_SIDE for side in size):
            expected = f"a multiple of {multiple}" if segments else f"{least}"
            raise ValueError(
                f"each side of the network's input must be {expected} up to {LARGEST_SIDE}, "
                f"found {list(size)}"
            )
        return size

    @field_validator("ignore", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _disjoint(self) -> Task:
        known = {*self.background, *(value for values in self.labels.values() for value in values)}
        if self.ignore and (self.kind == "classification" or known & {*self.ignore}):
            raise ValueError(
                "ignore: expected values of masks that no label and not the background has, found "
                f"{list(self.ignore)}"
            )
        for label, values in self.labels.items():
            if not values:
                raise ValueError(f"labels: '{label}' has no mask value")
            shared = set(values) & set(self.background)
            if shared:
                raise ValueError(f"mask values {sorted(shared)} are both background and label '{label}'")
        classes = 1 + len(_values_by_labels(self.labels))
        most = _MOST_CLASSES - bool(self.ignore)
        if classes > most:
            raise ValueError(
                f"labels: expected at most {most} classes with the background, found {classes}: one "
                "per distinct set of labels that a mask value has"
            )
        if unknown := sorted(self.codes.keys() - self.labels.keys()):
            raise ValueError(f"codes: {unknown} are no labels; the labels are {list(self.labels)}")
        if {*self.keep_largest} - self.labels.keys() or len({*self.keep_largest}) < len(self.keep_largest):
            raise ValueError(
                f"keep_largest: expected labels of {[*self.labels]}, each once, found "
                f"{list(self.keep_largest)}"
            )
        return self

    @model_validator(mode="after")
    def _of_its_dimensions(self) -> Task:
        if self.geometry is None:
            wrong = {
                "regions": bool(self.regions),
                "stacked": self.stacked,
                "channels": self.channels not in (1, 3),
            }
            if found := [name for name, is_wrong in wrong.items() if is_wrong]:
                raise ValueError(
                    f"{', '.join(found)}: a list of channels, regions and stacked files are of volumes; "
                    "give the task a geometry with a spacing and a patch"
                )
            if new := sorted(self.normalisation.said):
                raise ValueError(f"normalisation: {', '.join(new)}: only for volumes (a task with geometry)")
            return self
        if found := [name for name in ("plane", "neighbours", "colour") if self._differs(name)]:
            raise ValueError(
                f"{', '.join(found)}: of slices, and this task has a geometry, so its network sees volumes; "
                "remove what is of slices"
            )
        if self.kind == "classification":
            raise ValueError("geometry: volumes are segmented; a classification has a size")
        if self.channels == 3:
            raise ValueError(
                "channels: expected 1 or a list of names for volumes, found 3, the colours of a picture"
            )
        channels = self.channel_list
        names = [channel.name.lower() for channel in channels]
        if len({*names}) < len(names):
            raise ValueError(f"channels: expected different names, found {[each.name for each in channels]}")
        if any(channel.normalisation.middle != 1 for channel in channels):
            raise ValueError("normalisation: middle is of slices, and this task has a geometry; remove it")
        if sliced := [each.name for each in channels if each.normalisation.scope != "volume"]:
            raise ValueError(
                f"normalisation of {sliced}: expected scope: volume, found image; a volume has no slices"
            )
        if self.channels != 1 and self.normalisation != Normalisation(scope="volume"):
            raise ValueError("normalisation: each channel of the list has its own; move it there")
        if self.stacked and len(channels) == 1:
            raise ValueError("stacked: expected at least 2 channels in one file, found 1")
        if self.regions and sorted(self.regions) != sorted(self.labels):
            raise ValueError(
                f"regions: expected every label once, in the order of the network's outputs, of "
                f"{[*self.labels]}, found {list(self.regions)}"
            )
        if len(self.regions) > _MOST_REGIONS:
            raise ValueError(f"regions: expected at most {_MOST_REGIONS}, found {len(self.regions)}")
        return self

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit fields of the other kind, so that artefacts from before kinds keep their digests."""
        # Pydantic would warn of an empty size.
        sized = self.model_copy(update={"size": (0, 0)}) if self.size == _NO_SIZE else self
        content: dict[str, Any] = handler(sized)
        unsaid = {"kind", "class_names"} if self.kind == "segmentation" else {"labels", "background"}
        if not self.is_sized:
            unsaid.add("size")
        if not self.codes:
            unsaid.add("codes")
        if self.modality is None:
            unsaid.add("modality")
        if not self.keep_largest:
            unsaid.add("keep_largest")
        if not self.ignore:
            unsaid.add("ignore")
        if self.absent == "undrawn":
            unsaid.add("absent")
        if self.geometry is None:
            unsaid.update(_OF_VOLUMES)
        else:
            unsaid.update(_OF_SLICES)
            unsaid.update(name for name in ("regions", "stacked") if not content[name])
            if self.channels != 1:
                unsaid.add("normalisation")
        return {name: value for name, value in content.items() if name not in unsaid}

    @property
    def in_channels(self) -> int:
        """Number of input channels of the network: the scan's, times the slice and its neighbours."""
        return self.channel_count * (2 * self.neighbours + 1)

    @property
    def out_channels(self) -> int:
        """Number of outputs of the network per voxel: one per class, or per label of regions."""
        return len(self.regions) or len(self.classes)

    @property
    def channel_count(self) -> int:
        """Number of channels of a scan."""
        return self.channels if isinstance(self.channels, int) else len(self.channels)

    @property
    def channel_list(self) -> tuple[Channel, ...]:
        """The channels of a volume; the only one of a task that does not list them is called `image`."""
        if isinstance(self.channels, int):
            return (Channel(name="image", normalisation=self.normalisation),) * self.channels
        return self.channels

    @property
    def separate_channels(self) -> bool:
        """Whether each channel of a scan is a file of its own."""
        return self.channel_count > 1 and self.is_volume and not self.stacked

    @property
    def is_volume(self) -> bool:
        """Whether the network sees volumes, by patches, and not slices."""
        return self.geometry is not None

    @property
    def spatial_dims(self) -> int:
        """3 for volumes, 2 for slices."""
        return 3 if self.is_volume else 2

    @property
    def averages_logits(self) -> bool:
        """Whether windows are averaged as logits, which the graph then gives beside probabilities."""
        return self.geometry is not None and self.geometry.average == "logits"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The sides of one input of the network: the patch of volumes, or [H, W] of slices."""
        return self.size if self.geometry is None else self.geometry.patch

    @property
    def output_shape(self) -> tuple[int, ...]:
        """One output of the network: [K, H, W] of slices, [K, X, Y, Z] of a patch, [K] of classes."""
        return (self.out_channels, *(self.input_shape if self.kind == "segmentation" else ()))

    @cached_property
    def classes(self) -> tuple[TaskClass, ...]:
        """The softmax classes: background, then one per distinct set of labels that a mask value has.

        Classes exclude each other, while labels may overlap: disc = {1, 2} and cup = {2} give the classes
        background, {disc} and {disc, cup}. They are ordered by their smallest mask value. For classification,
        the classes are the class names, in their order.
        """
        if self.kind == "classification":
            return tuple(TaskClass(i, (name,), (i,)) for i, name in enumerate(self.class_names))
        atoms = _values_by_labels(self.labels)
        background = TaskClass(0, (), tuple(self.background))
        return (
            background,
            *(TaskClass(i, labels, tuple(values)) for i, (labels, values) in enumerate(atoms.items(), 1)),
        )

    def label_classes(self, label: str) -> tuple[int, ...]:
        """Return the indices of the classes that together are `label`."""
        return tuple(c.index for c in self.classes if label in c.labels)

    @cached_property
    def region_members(self) -> NDArray[np.bool_]:
        """[K, L]: whether each of the classes belongs to each of the regions, both in their order."""
        return np.array([[label in each.labels for label in self.regions] for each in self.classes], bool)

    @cached_property
    def region_classes(self) -> NDArray[np.uint8]:
        """[L]: the class that each of L regions decides on, where it is the last that has a voxel.

        It is the class with the fewest labels that has the region. `classes_of_regions` says the rest.
        """
        members = self.region_members
        return np.array(
            [
                min(np.flatnonzero(column), key=lambda index: (int(members[index].sum()), int(index)))
                for column in members.T
            ],
            np.uint8,
        )

    @cached_property
    def _exact_classes(self) -> tuple[int, ...]:
        """Classes that their last region alone would not decide on."""
        last = {
            index: int(np.flatnonzero(row)[-1]) for index, row in enumerate(self.region_members) if row.any()
        }
        return tuple(index for index, region in last.items() if self.region_classes[region] != index)

    def classes_of_regions(self, inside_L: Iterable[NDArray[np.bool_]]) -> NDArray[np.uint8]:
        """The classes [...] of places that are inside of some of L regions, each [...].

        A combination that is a class is that class. Any other is a disagreement of the network with itself
        (a core without its whole): there the last region decides, as nnU-Net's regions_class_order does, by
        `region_classes`. So a network has the larger regions first.
        """
        inside = [*inside_L]
        found = np.zeros(inside[0].shape, np.uint8)
        for index, each in zip(self.region_classes, inside, strict=True):
            np.copyto(found, index, where=each)
        for index in self._exact_classes:
            exact = np.ones(found.shape, bool)
            for each, member in zip(inside, self.region_members[index], strict=True):
                exact &= each == member
            found[exact] = index
        return found

    @property
    def mask_values(self) -> tuple[int, ...]:
        """The values that a mask may have, without those of places without a truth."""
        return tuple(sorted(value for each in self.classes for value in each.values))

    def lookup(self) -> NDArray[np.int16]:
        """Make a table [max value + 1] from mask value to class index, -1 for a value outside the task."""
        table = np.full(max((*self.ignore, *self.mask_values)) + 1, -1, dtype=np.int16)
        for task_class in self.classes:
            table[list(task_class.values)] = task_class.index
        table[list(self.ignore)] = IGNORED
        return table

    def patient_of(self, stem: str) -> str:
        """Find the patient in a file's name without suffix; without a pattern, return the name itself."""
        if self.patient is None:
            return stem
        found = patient_in(self.patient, stem)
        if found is None:
            raise TaskError(
                f"'{stem}': no patient in the name; task '{self.name}' expects {self.patient!r}. "
                "Rename the file, or correct `patient` in task.yaml or in the policy of the hospital"
            )
        return found

    @classmethod
    def for_plan(cls, content: Mapping[str, Any]) -> Task:
        """Make a task that a plan starts from: it need not say a size or a geometry, which the plan chooses.

        Fields that only volumes have say that it is of volumes. Raises ValidationError.
        """
        fields = dict(content)
        of_volumes = "regions" in fields or fields.get("stacked") or isinstance(fields.get("channels"), list)
        if of_volumes and not {"size", "geometry"} & fields.keys():
            fields["geometry"] = {"patch": _ANY_PATCH}
        return cls.model_validate(fields, context={_FOR_PLAN: True})

    @property
    def is_sized(self) -> bool:
        """Whether it says what the network sees; otherwise a plan has to."""
        return self.geometry is not None or self.size != _NO_SIZE

    @classmethod
    def load(cls, path: Path, *, for_plan: bool = False) -> Task:
        """Read a task.yaml, `for_plan` as the method of this name does.

        Raises TaskError naming the file and every field that is wrong.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise TaskError(
                f"{path}: cannot be read as YAML: it is not in UTF-8; save it in UTF-8"
            ) from error
        except (OSError, yaml.YAMLError) as error:
            raise TaskError(f"{path}: cannot be read as YAML: {error}") from error
        if not isinstance(content, dict):
            raise TaskError(f"{path}: expected a mapping of fields, found {type(content).__name__}")
        try:
            return cls.for_plan(content) if for_plan else cls.model_validate(content)
        except ValidationError as error:
            raise TaskError(f"{path}: {'; '.join(misfits(cls, error))}") from error

    def dump(self, path: Path) -> None:
        """Write the task as YAML that `load` reads back to an equal task."""
        content = self.model_dump(mode="json", exclude_none=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _values_by_labels(labels: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Group the mask values by the set of labels that they have, ordered by the smallest value."""
    found: dict[tuple[str, ...], list[int]] = {}
    for value in sorted({v for values in labels.values() for v in values}):
        found.setdefault(tuple(label for label, values in labels.items() if value in values), []).append(
            value
        )
    return found
