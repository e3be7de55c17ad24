"""Write each site's overlay page after a run, from the site's own data and its models only.

Pages are made in worker processes, like the sites' steps: pictures never pass through the process of the
server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.state import State, from_safetensors, to_safetensors
from training.config import MethodConfig
from training.data.cases import Site
from training.data.examples import Examples, Volumes
from training.data.segmentation.dataset import SiteData
from training.data.splits import all_for_testing
from training.local.scores import Answers, predict
from training.methods.registry import method
from training.processes import process_context
from training.report.overlays import overlap, write_overlays
from training.run import Result

# Builds a trained network in the process that draws the page. Only bytes are sent to that process.
Made = Callable[[], nn.Module]


def write_site_pages(result: Result, folder: Path, workers: int = 1) -> dict[str, Path]:
    """Write `folder`/sites/SITE/overlays.html for every site of a finished run. Returns the pages by site.

    A page shows the site's validation patients (its training patients, if it has no others) with the global
    model and, if it was exported, the site's own. Classification has no outlines, so no page is written.
    """
    if result.run.federation.task.kind != "segmentation":
        return {}
    # Scans of a hospital on the network are at the hospital.
    sites = [site for site in result.run.sites() if isinstance(site, Site)]
    models = {site.name: _models_of(site.name, result) for site in sites}
    attention = method(result.run.method).attention
    # All models of a publication have the same sources.
    sources = next((draft.sources for draft in result.publication.models if draft.sources), None)
    task = result.run.federation.task
    with ProcessPoolExecutor(max(1, workers), mp_context=process_context()) as pool:
        pages = {
            site.name: pool.submit(
                _page, folder / "sites" / site.name, site, task, models[site.name], sources, attention
            )
            for site in sites
        }
        return {name: page.result() for name, page in pages.items()}


def _models_of(site: str, result: Result) -> dict[str, Made]:
    """Return the models that a site may see: those of the whole federation, and its own."""
    run = result.run
    build = partial(_build, method(run.method).network, run.config, run.federation.task)
    return {
        "own" if draft.site == site else draft.role: partial(
            build, draft.network, to_safetensors(draft.weights)
        )
        for draft in result.publication.models
        if draft.site in (None, site)
    }


def _build(
    network: Callable[[Any, Task, NetworkSpec, State], nn.Module],
    config: MethodConfig,
    task: Task,
    spec: NetworkSpec,
    weights: bytes,
) -> nn.Module:
    return network(config, task, spec, from_safetensors(weights))


def _page(
    folder: Path,
    site: Site,
    task: Task,
    models: Mapping[str, Made],
    sources: tuple[str, ...] | None,
    attend: Callable[[Any, Tensor], Tensor] | None,
) -> Path:
    """Write one site's page. Runs in a worker process."""
    torch.set_num_threads(1)
    shown = Site(site.name, site.of_split("val") or site.of_split("train"))
    slices = SiteData.load(all_for_testing(shown), task).test
    if isinstance(slices, Volumes):
        answers = {name: predict(make(), slices) for name, make in models.items()}
        return _volumes_page(folder, site.name, task, slices, answers)
    predictions, attention = {}, {}
    for name, make in models.items():
        network = make()
        answer = predict(network, slices)
        assert isinstance(answer, Tensor)
        predictions[name] = answer.numpy()
        if sources and attend and len(slices):
            mean = attend(network, torch.from_numpy(slices.images)).double().mean(dim=0)
            attention[name] = dict(zip(sources, mean.tolist(), strict=True))
    return write_overlays(folder, site.name, task, slices, predictions, attention)


def _volumes_page(
    folder: Path, site: str, task: Task, volumes: Volumes, answers: Mapping[str, Answers]
) -> Path:
    """A page with the axial slice of each volume that has the most foreground, on one size of picture."""
    assert task.geometry is not None
    axes = task.geometry.axes
    # Rows run to posterior and columns to the patient's left; stored axes are shown as they are.
    depth = next((axis for axis, end in enumerate(axes) if end in "SI"), 2)
    across = [axis for axis in range(3) if axis != depth]
    rows, columns = sorted(across, key=lambda axis: axes[axis] in "RL")
    turned = [axis for axis in (rows, columns) if axes[axis] in "AR"]
    at = [int((target > 0).sum(axis=tuple(across)).argmax()) for target in volumes.targets]
    sides = [target.shape for target in volumes.targets]
    height = max((side[rows] for side in sides), default=1)
    width = max((side[columns] for side in sides), default=1)

    def picture(volume: NDArray[Any], index: int) -> NDArray[Any]:
        """[C, H, W] of a volume [C, X, Y, Z], with the least value around it."""
        plane = np.flip(volume, tuple(1 + axis for axis in turned))
        plane = plane.transpose(0, 1 + depth, 1 + rows, 1 + columns)[:, at[index]]
        missing = (height - plane.shape[1], width - plane.shape[2])
        return np.pad(
            plane, ((0, 0), *((each // 2, each - each // 2) for each in missing)), constant_values=plane.min()
        )

    def classes(found: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        pictures = [picture(each[None], index)[0] for index, each in enumerate(found)]
        return np.array(pictures, np.uint8).reshape(-1, height, width)

    shown = Examples(
        np.array([picture(image, index) for index, image in enumerate(volumes.images)], np.float32),
        classes(volumes.targets),
        volumes.patients,
        volumes.cases,
        tuple(at),
    )
    predicted = {name: [each.numpy() for each in answer] for name, answer in answers.items()}
    dice: dict[str, dict[str, float | None]] = {name: {} for name in predicted}
    for name, found in predicted.items():
        for patient in dict.fromkeys(volumes.patients):
            own = [index for index, other in enumerate(volumes.patients) if other == patient]
            dice[name][patient] = overlap(
                np.concatenate([found[index].ravel() for index in own]),
                np.concatenate([volumes.targets[index].ravel() for index in own]),
            )
    pictures = {name: classes(found) for name, found in predicted.items()}
    return write_overlays(folder, site, task, shown, pictures, dice=dice)
