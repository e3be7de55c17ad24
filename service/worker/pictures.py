"""Draw overlays of a few scans into the job's folder: before and after adaptation, and after each epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.lens import Lens
from model_store.manifest import GRAPH, ModelManifest
from model_store.preprocessing import (
    Geometry,
    Prepared,
    PreparedVolume,
    VolumeGrid,
    class_map,
    display_slices,
    to_slices,
)
from model_store.scan import decode, decode_mask
from model_store.task import Task
from service.about import NOTICE
from service.cohorts.files import ScanFile
from service.errors import GpuMemoryFull
from service.inference.pipeline import PreparedScan, Segmentation, Stopwatch, read, segment
from service.inference.sessions import GraphSession
from service.inference.shift import Reference
from service.prediction.output import common_slices, picture
from service.prediction.overlay import QUICK, Panel, Pixels, choose_slices, overlay
from service.settings import Settings, cohort_limits, graph_limits, scan_limits
from service.worker.attempt import Attempt
from service.worker.device import release

_log = logging.getLogger("locum.worker")

MOST_SCANS = 4
_MOST_CLASSES = 3
_COLOURS = 3
# A preview's drawn slices, and the slices that these are chosen from.
_PREVIEW_SLICES, _PREVIEW_CHOICE = 3, 12
_SAID = {
    "before": "before adaptation",
    "lens": "as the network sees it through the lens",
    "after": "after adaptation",
    "drawn": "as it was drawn",
}


def draw_pictures(
    attempt: Attempt,
    files: Sequence[ScanFile],
    parent: Artefact[ModelManifest],
    graph: bytes,
    masks: Mapping[str, ScanFile] | None = None,
    lens: Lens | None = None,
    task: Task | None = None,
) -> None:
    """Write `N-before.png` (the global model) and `N-after.png` (the candidate), N from 1, into the pictures.

    `task` is the candidate's, where it is not the parent's, and `lens` its lens: a scan gets `N-lens.png`
    then, what the network sees. A scan with one of `masks` (by its name) gets `N-drawn.png`. All pictures of
    a scan show the same slices. No file name of the hospital appears on them.
    """
    sessions = {
        "before": load(parent.read(GRAPH), attempt.settings),
        "after": load(graph, attempt.settings),
    }
    before = parent.manifest
    after = before if task is None else before.model_copy(update={"task": task})
    task = before.task
    for number, index in enumerate(_chosen(files), start=1):
        data, mask = files[index].read(), (masks or {}).get(files[index].name)
        found: dict[str, Segmentation] = {}
        slices: dict[str, Sequence[Pixels]] = {}
        for when, session in sessions.items():
            attempt.check_cancelled()
            through = lens if when == "after" else None
            reading, found[when] = run(data, after if when == "after" else before, session, attempt, through)
            if through is not None:
                found["lens"] = found[when]
                slices["lens"] = seen_slices(reading.prepared, found[when].geometry, task)
        if mask is not None:
            classes = class_map(decode_mask(mask.read(), scan_limits(attempt.settings)), task)
            found["drawn"] = replace(found["after"], classes=classes)
        shown = common_slices([*found.values()])
        for when, segmentation in found.items():
            title = f"scan {number}  ·  {_SAID[when]}"
            # No digest names it, so that its bytes are free.
            content = picture(
                segmentation, task, title, shown=shown, compression=QUICK, slices=slices.get(when)
            )
            attempt.folder.write_picture(str(number), when, content)


class Preview:
    """Draws the masks of the same few slices after each epoch, so that a person can watch them change.

    Of patches of volumes, a slice across the third axis, where most is found at first.
    """

    def __init__(self, attempt: Attempt, images_NCHW: Tensor, task: Task) -> None:
        self._attempt, self._task = attempt, task
        few = np.linspace(0, len(images_NCHW) - 1, min(_PREVIEW_CHOICE, len(images_NCHW))).astype(int)
        self._images = images_NCHW[few]
        self._is_chosen = False
        self._planes: list[int] = []

    def draw(self, epoch: int, class_maps: Callable[[Tensor], NDArray[np.uint8]]) -> None:
        """Draw what `class_maps` finds: class indices [N, H, W] of prepared slices [N, C, H, W]."""
        classes = class_maps(self._images)
        if not self._is_chosen:
            sizes = (classes > 0).reshape(len(classes), -1).sum(axis=1)
            chosen = choose_slices(sizes, _PREVIEW_SLICES)
            self._images, classes, self._is_chosen = self._images[chosen], classes[chosen], True
            if self._task.is_volume:
                self._planes = [_fullest(each) for each in classes]
        # The slices themselves, without their neighbouring slices.
        channels, first = self._task.channel_count, self._task.channel_count * self._task.neighbours
        shown = self._images[:, first : first + channels]
        if self._task.is_volume:
            # Upright, as the axes of a volume are usually R, A, S.
            shown = torch.stack(
                [image[:1, :, :, at].mT.flip(1) for image, at in zip(shown, self._planes, strict=True)]
            )
            pairs = zip(classes, self._planes, strict=True)
            classes = np.stack([each[..., at].T[::-1] for each, at in pairs])
        panels = [Panel(_grey(image), found) for image, found in zip(shown, classes, strict=True)]
        legend = [(c.index, " + ".join(c.labels)) for c in self._task.classes[1:]]
        content = overlay(panels, legend, f"after epoch {epoch}", NOTICE, QUICK)
        self._attempt.folder.write(self._attempt.folder.PREVIEW, content)


def _fullest(classes_XYZ: NDArray[np.uint8]) -> int:
    """The plane of a patch with the most foreground, the middle one of a patch without."""
    counts = (classes_XYZ > 0).sum(axis=(0, 1))
    return int(counts.argmax()) if counts.any() else len(counts) // 2


def _grey(image_CHW: Tensor) -> NDArray[np.uint8]:
    """A prepared slice as a picture [H, W, 3]: the middle 98 % of its values from black to white."""
    pixels = _eight_bits(image_CHW.numpy())
    return np.broadcast_to(pixels.transpose(1, 2, 0), (*pixels.shape[1:], 3))


def draw_answers(
    attempt: Attempt,
    files: Sequence[ScanFile],
    task: Task,
    told: Mapping[str, Sequence[NDArray[np.float64]]],
) -> None:
    """Draw a few scans of a classification task, each captioned with its most probable classes.

    `told` maps `before` and `after` to the class probabilities [K] of every scan.
    """
    for number, index in enumerate(_chosen(files), start=1):
        scan = decode(files[index].read(), scan_limits(attempt.settings))
        pictures = display_slices(scan, task)
        nothing = np.zeros(pictures[0].shape[:2], np.uint8)
        panels = [Panel(pictures[i], nothing) for i in choose_slices(np.zeros(len(pictures), int))]
        for when, answers in told.items():
            attempt.check_cancelled()
            likeliest = np.argsort(-answers[index], kind="stable")[:_MOST_CLASSES]
            words = ", ".join(f"{task.class_names[k]} {answers[index][k]:.0%}" for k in likeliest)
            content = overlay(panels, [], f"scan {number}  ·  {words}", NOTICE, QUICK)
            attempt.folder.write_picture(str(number), when, content)


def _chosen(files: Sequence[ScanFile]) -> list[int]:
    return [int(i) for i in np.unique(np.linspace(0, len(files) - 1, MOST_SCANS).round().astype(int))]


def load(graph: bytes, settings: Settings, reference: Reference | None = None) -> GraphSession:
    """Load the graph as the API does; on the CPU where the GPU has no room for it."""
    # torch keeps what it once took, and onnxruntime takes memory of its own.
    release()
    load_on = partial(
        GraphSession,
        sha256(graph),
        graph,
        threads=settings.threads,
        limits=graph_limits(settings),
        reference=reference,
    )
    try:
        return load_on(device=settings.device)
    except GpuMemoryFull as error:
        _log.warning("%s It is run on the CPU.", error)
        return load_on(device="cpu")


def run(
    data: bytes,
    manifest: ModelManifest,
    session: GraphSession,
    attempt: Attempt,
    lens: Lens | None = None,
) -> tuple[PreparedScan, Segmentation]:
    """Segment a scan's file as the API does. Cancelling is looked at between the patches of a volume."""
    watch = Stopwatch()
    reading = read(data, manifest, cohort_limits(attempt.settings, manifest.task), watch, lens=lens)
    return reading, segment(reading, manifest, session, watch, between=attempt.between)


def seen_slices(prepared: Prepared | PreparedVolume, geometry: Geometry, task: Task) -> list[Pixels]:
    """What the network sees, as pictures [H, W, 3] of the slices of a geometry: colours, or one channel.

    By the nearest of the network's voxels. What it does not see of a volume is black.
    """
    if isinstance(prepared, PreparedVolume):
        found = to_slices(_on_own_grid(_eight_bits(prepared.volume[0]), prepared.grid), geometry)
        return [_grey_of(each) for each in found]
    _, rows, columns = geometry.slices
    places = (
        ((np.arange(own) + 0.5) * side / own).astype(int)
        for own, side in zip((rows, columns), prepared.geometry.size, strict=True)
    )
    at = np.ix_(*places)
    first = task.channel_count * task.neighbours
    if task.channel_count == _COLOURS:
        colours = _eight_bits(prepared.slices[:, first : first + _COLOURS])
        return [each.transpose(1, 2, 0)[at] for each in colours]
    return [_grey_of(each[at]) for each in _eight_bits(prepared.slices[:, first])]


def _on_own_grid(volume_XYZ: NDArray[np.uint8], grid: VolumeGrid) -> NDArray[np.uint8]:
    """A network's volume on the scan's own grid, by the nearest voxel."""
    turned = np.zeros([grid.own[axis] for axis, _ in grid.order], np.uint8)
    places = (np.rint(axis.in_network()).astype(int) for axis in grid.axes)
    turned[grid.box] = volume_XYZ[np.ix_(*places)]
    turned = np.flip(turned, tuple(index for index, (_, against) in enumerate(grid.order) if against))
    own: NDArray[np.uint8] = turned.transpose(np.argsort([axis for axis, _ in grid.order]))
    return own


def _eight_bits(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The middle 98 % of the values from black to white."""
    low, high = np.percentile(values, (1, 99))
    return np.asarray(255 * np.clip((values - low) / max(high - low, 1e-6), 0, 1), np.uint8)


def _grey_of(pixels_HW: NDArray[np.uint8]) -> Pixels:
    return np.broadcast_to(pixels_HW[..., np.newaxis], (*pixels_HW.shape, 3))
