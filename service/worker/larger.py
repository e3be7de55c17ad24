"""Show a cohort's slices larger to the network, where their structures are smaller than the members'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.lens import Scale, enlarged, middle
from model_store.lens.fit import Cohort
from model_store.task import Task
from personalization.dose import Lensed, by_scale
from personalization.errors import ExportError, NetworkError
from personalization.gate import ThroughLens
from service.cohorts.files import ScanFile
from service.settings import cohort_limits
from service.worker.attempt import Attempt
from service.worker.cohort_images import CohortImages, ScanInput, most_images
from service.worker.routing_adapt import LoadedSpace, graph_of


@dataclass(frozen=True)
class AtScale:
    """The task and the graph of a network that sees slices larger, and the verdict on its masks."""

    task: Task
    graph: bytes
    found: Lensed


@dataclass(frozen=True)
class LargerSlices:
    """The slices of a job's cohort, prepared again for a larger input. `files` are those that are used."""

    attempt: Attempt
    task: Task
    files: Sequence[ScanFile]
    cohort: CohortImages

    def middles(self, zoom: float) -> Cohort | None:
        """The middle of each slice, as large as the task's input; None where the input would be too large."""
        task = enlarged(self.task, zoom)
        if task is None:
            return None
        return lambda: (
            (patient, middle(images, self.task.size)) for patient, images in self._prepared(task, zoom)
        )

    def judged(self, scale: Scale, loaded: LoadedSpace, device: torch.device) -> AtScale | None:
        """Compare the network's masks of larger slices with those of the slices as they are.

        None of a network that takes no larger slices. Raises ScanError, CohortDeleted.
        """
        task, network = enlarged(self.task, scale.zoom), loaded.space.alone().plain()
        if task is None:
            return None
        try:
            graph = graph_of(network, task)
        except (ExportError, NetworkError):
            return None
        usual, larger = ([*self._prepared(each, scale.zoom)] for each in (self.task, task))
        images, more = (
            torch.from_numpy(np.concatenate([part for _, part in own])) for own in (usual, larger)
        )
        found = by_scale(
            network.to(device),
            len(task.classes),
            images.to(device),
            more.to(device),
            torch.from_numpy(middle(more.numpy(), self.task.size)).to(device),
            [patient for patient, part in usual for _ in part],
            ThroughLens(scale.left, None, scale.grid, scale.sides, zoom=scale.zoom),
            loaded.spread,
            loaded.playbook,
            self.attempt.check_cancelled,
            self.cohort.kinds.share_gross,
        )
        return AtScale(task, graph, found)

    def _prepared(self, task: Task, zoom: float) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Patient and images of each scan: as many pixels in all as a job has that enlarges nothing."""
        scans, patients = self.cohort.scan_of_image.tolist(), self.cohort.patient_of_image.tolist()
        of_scan = dict(zip(scans, patients, strict=True))
        limits = cohort_limits(self.attempt.settings, self.task)
        most = max(1, int(most_images(task) / zoom**2) // len(self.files))
        for number, file in enumerate(self.files):
            self.attempt.check_cancelled()
            yield of_scan[number], ScanInput.of(file.read(), task, limits, most).images().numpy()
