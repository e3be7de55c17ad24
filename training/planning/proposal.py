"""From the merged fingerprint to a task, options of the method, and sentences that say what was chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from model_store.misfits import misfits
from model_store.normalisation import Normalisation
from model_store.task import SIZE_MULTIPLE, Task
from model_store.volume import Channel, VolumeGeometry
from training.errors import ConfigurationError
from training.planning.planner import (
    BUDGETS,
    Budget,
    ChannelPlan,
    Summary,
    VolumePlan,
    advise,
    plan_volumes,
)
from training.planning.topology import as_dynunet

TASK_FILE, CONFIG_FILE = "task.yaml", "config.yaml"
_LEAST_STAGES = 3  # of MONAI's DynUNet
_LEAST_SIDE, _MOST_SIDE = 4, 512  # of a patch in a task
_MOST_OF_SLICE = 256  # as where a task is inferred


@dataclass(frozen=True)
class Told:
    """Which sites the plan is made with, and why the others told nothing.

    `capped` says which site would have decided alone; empty where none would.
    """

    sites: tuple[str, ...]
    silent: Mapping[str, str]
    capped: str = ""


@dataclass(frozen=True)
class Proposal:
    """A plan to train by: the task with its geometry, and options of the method.

    `dimensions` is 2 where slices are the better choice; the task is then the one that was given.
    """

    task: Task
    dimensions: int
    options: Mapping[str, Any]
    sentences: tuple[str, ...]
    summary: Summary
    budget: Budget
    told: Told

    def content(self) -> dict[str, Any]:
        """The plan as JSON, for a record: what was summed up over the sites, and what follows."""
        content = {
            "sentences": self.sentences,
            "sites": self.told.sites,
            "silent": dict(self.told.silent),
            "budget": asdict(self.budget),
            "summary": asdict(self.summary),
            "dimensions": self.dimensions,
            "options": dict(self.options),
        }
        plain: dict[str, Any] = json.loads(json.dumps(content))  # tuples become lists
        return plain

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write task.yaml and config.yaml, which can be edited and given with --task and --config."""
        folder.mkdir(parents=True, exist_ok=True)
        task, config = folder / TASK_FILE, folder / CONFIG_FILE
        self.task.dump(task)
        config.write_text(yaml.safe_dump({"method": dict(self.options)}, sort_keys=False), encoding="utf-8")
        return task, config


def budget_of(name: str) -> Budget:
    """A budget by name, or by its gigabytes. Raises ConfigurationError."""
    if name in BUDGETS:
        return BUDGETS[name]
    try:
        gigabytes = float(name)
    except ValueError:
        gigabytes = 0.0
    if not 0.05 <= gigabytes <= 1000:
        raise ConfigurationError(
            "the plan cannot be made",
            [f"budget: expected one of {', '.join(BUDGETS)}, or gigabytes from 0.05 to 1000, found '{name}'"],
        )
    return Budget(f"{gigabytes:g} GB", gigabytes)


def propose(
    summary: Summary, task: Task, budget: Budget, told: Told, dimensions: int | None = None
) -> Proposal:
    """Plan for a task, of which labels, channels' names and patients are kept.

    `summary` has the axes R, A, S. `dimensions` is 2 or 3 where a person decides; without it, a task with a
    geometry stays one of volumes, and for others the data decide. Raises ConfigurationError for volumes that
    are too small for a 3-D network.
    """
    names = [channel.name.casefold() for channel in task.channel_list]
    if any(map(_is_ct, names)):
        # Beside a CT, others such as PET are normalised image by image.
        known = zip(names, summary.intensities, strict=True)
        kept = tuple(found if _is_ct(name) else None for name, found in known)
        summary = replace(summary, intensities=kept)
    advised, why = advise(summary)
    chosen = dimensions or max(task.spatial_dims, advised)
    head = [_of_sites(summary, told), *([f"{told.capped}."] if told.capped else [])]
    if chosen == 2:
        if task.spatial_dims > chosen:
            raise ConfigurationError(
                "the plan cannot be made",
                ["slices were asked for, and the task has a geometry, of volumes; give a task with a size"],
            )
        reason = why if advised == 2 else f"slices were asked for, though volumes would do: {why}"
        sized = task if task.is_sized else _sized(task, summary)
        verb = "keeps its slices" if task.is_sized else "gets slices"
        sentences = (
            *head,
            f"Slices (2-D): {reason}.",
            f"The task {verb} of {_times(sized.size)} pixels, and the method its network.",
        )
        return Proposal(sized, 2, {}, sentences, summary, budget, told)
    # Where axes are alike, nnU-Net prefers the last one in the order in which files are read: k, j, i.
    plan = _reversed(plan_volumes(_read_order(summary), len(task.classes), budget))
    if plan.network.stages < _LEAST_STAGES:
        raise ConfigurationError(
            "the plan cannot be made",
            [
                f"a median volume of {_times(plan.shape)} voxels is too small for a 3-D network, which pools "
                f"{_LEAST_STAGES - 1} times; train slices"
            ],
        )
    options = {
        "network": "monai.dynunet",
        "width": budget.features,
        "network_arguments": as_dynunet(plan.network, plan.filters),
        "loss": "dice_ce",
        "batch_size": plan.batch,
    }
    reason = why if advised == 3 else f"volumes were asked for, though slices may do better: {why}"
    sentences = (*head, f"Volumes (3-D): {reason}.", *_of_plan(plan, summary, budget))
    return Proposal(_planned(task, plan), 3, options, sentences, summary, budget, told)


def _is_ct(name: str) -> bool:
    return name == "ct" or name.startswith("ct-")


def _sized(task: Task, summary: Summary) -> Task:
    """The task with slices of the median scan's size, in whole multiples of what its network pools."""
    across = {"axial": (1, 0), "coronal": (2, 0), "sagittal": (2, 1)}[task.plane]
    voxels = (summary.shape[axis] for axis in across)
    sides = [min(max(ceil(each / SIZE_MULTIPLE), 1) * SIZE_MULTIPLE, _MOST_OF_SLICE) for each in voxels]
    return Task.model_validate({**task.model_dump(), "size": sides})


def _planned(task: Task, plan: VolumePlan) -> Task:
    try:
        return _task(task, plan)
    except ValidationError as error:
        raise ConfigurationError(
            "the plan cannot be made: no task can have what follows from the sites' counts",
            [
                *misfits(Task, error, values=True),
                "write a task with a geometry by hand, and give it with --task",
            ],
        ) from error


def _task(task: Task, plan: VolumePlan) -> Task:
    masked = any(channel.nonzero for channel in plan.channels)
    x, y, z = (_rounded(mm) for mm in plan.spacing)
    sides = [min(max(side, _LEAST_SIDE), _MOST_SIDE) for side in plan.patch]
    geometry = VolumeGeometry(
        spacing=(x, y, z), patch=(sides[0], sides[1], sides[2]), crop="nonzero" if masked else "none"
    )
    normalisations = [_normalisation(channel) for channel in plan.channels]
    # Fields of slices are left out of a task of volumes.
    kept = task.model_dump(exclude={"size", "plane", "neighbours", "colour", "channels", "normalisation"})
    kept["geometry"] = geometry
    if isinstance(task.channels, int):
        kept["normalisation"] = normalisations[0]
    else:
        kept["channels"] = [
            Channel(name=channel.name, normalisation=found)
            for channel, found in zip(task.channels, normalisations, strict=True)
        ]
    return Task.model_validate(kept)


def _normalisation(channel: ChannelPlan) -> Normalisation:
    if channel.ct is None:
        return Normalisation(scope="volume", within="region" if channel.nonzero else "all")
    ct = channel.ct
    return Normalisation(
        scope="volume",
        method="fixed",
        window=(round(ct.low, 1), round(ct.high, 1)),
        mean=round(ct.mean, 2),
        std=round(max(ct.std, 1e-2), 2),
    )


def _read_order(summary: Summary) -> Summary:
    return replace(
        summary,
        spacing=summary.spacing[::-1],
        finest=summary.finest[::-1],
        shape=summary.shape[::-1],
        extent=summary.extent[::-1],
    )


def _reversed(plan: VolumePlan) -> VolumePlan:
    network = replace(
        plan.network,
        kernels=tuple(kernel[::-1] for kernel in plan.network.kernels),
        strides=tuple(stride[::-1] for stride in plan.network.strides),
        patch=plan.network.patch[::-1],
    )
    return replace(plan, spacing=plan.spacing[::-1], shape=plan.shape[::-1], network=network)


def _rounded(mm: float) -> float:
    return float(f"{mm:.3g}")


def _times(values: Sequence[float]) -> str:
    return " x ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values)


def _of_sites(summary: Summary, told: Told) -> str:
    silent = "".join(
        f"; {site} sent nothing ({why}): planned for, not with" for site, why in told.silent.items()
    )
    return f"Planned with {summary.cases} training cases of {', '.join(told.sites)}{silent}."


def _of_plan(plan: VolumePlan, summary: Summary, budget: Budget) -> tuple[str, ...]:
    changed = plan.spacing != summary.spacing
    which = "the median, the thick axis at its 10th percentile" if changed else "the median"
    voxels = _times(plan.shape)
    covered = min(1.0, _product(plan.patch) / _product(plan.shape))
    channels = []
    for index, channel in enumerate(plan.channels):
        name = f"Channel {index + 1} is" if len(plan.channels) > 1 else "Intensities are"
        if channel.ct is not None:
            ct = channel.ct
            channels.append(
                f"{name} clipped to {ct.low:.0f} to {ct.high:.0f} HU (0.5 to 99.5 % of the foreground of all "
                f"sites), minus {ct.mean:.0f}, divided by {ct.std:.0f}"
            )
        else:
            where = "its non-zero region" if channel.nonzero else "the whole volume"
            channels.append(f"{name} normalised by mean and standard deviation of {where}")
    return (
        f"Every scan is resampled to {_times([_rounded(mm) for mm in plan.spacing])} mm (R, A, S; {which}); "
        f"the median scan then has {voxels} voxels.",
        f"The network sees patches of {_times(plan.patch)} voxels ({covered:.0%} of the median scan), "
        f"{plan.batch} per step; the same patch is the window of validation and of serving.",
        f"DynUNet with {plan.network.stages} resolutions of {', '.join(map(str, plan.filters))} channels, "
        f"within the budget {budget.name}.",
        *(f"{sentence}." for sentence in channels),
        "The loss is Dice with cross-entropy.",
    )


def _product(values: Sequence[float]) -> float:
    found = 1.0
    for value in values:
        found *= value
    return found
