"""After a run, each site's page of overlays, made from nothing but the site's own data and its models.

The work is done in processes of their own, as a site's steps are: pictures never pass through the process
that speaks for the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.fedins import InstanceAdaptive
from personalization.fedoap.joining import predict as attend
from personalization.networks import FedOapUNet
from personalization.state import from_safetensors, to_safetensors
from training.backbones import FrozenBackbone
from training.data.cases import Site
from training.data.segmentation.dataset import SiteData
from training.data.splits import all_for_testing
from training.methods import FedInsConfig
from training.methods.common.local_training import network_of, predict
from training.report.overlays import write_overlays
from training.run import Result

# Makes a trained network in the process that draws: what travels there is bytes.
Made = Callable[[], nn.Module]


def write_site_pages(result: Result, folder: Path, workers: int = 1) -> dict[str, Path]:
    """Write `folder`/sites/SITE/overlays.html for every site of a finished run; gives the pages by site.

    A page shows the site's validation patients (its training patients, if it has no others) with the global
    model and, where it was exported, the site's own. A classification has no outlines to show, and no page.
    """
    if result.run.federation.task.kind != "segmentation":
        return {}
    sites = result.run.sites()
    models = {site.name: _models_of(site.name, result) for site in sites}
    # The same for every model of a publication.
    sources = next((draft.sources for draft in result.publication.models if draft.sources), None)
    task = result.run.federation.task
    with ProcessPoolExecutor(max(1, workers), mp_context=get_context("spawn")) as pool:
        pages = {
            site.name: pool.submit(
                _page, folder / "sites" / site.name, site, task, models[site.name], sources
            )
            for site in sites
        }
        return {name: page.result() for name, page in pages.items()}


def _models_of(site: str, result: Result) -> dict[str, Made]:
    """What a site may be shown: models of the whole federation, and its own."""
    config, composite = result.run.config, result.publication.composite
    make: Callable[[NetworkSpec, bytes], nn.Module] = _plain
    if isinstance(config, FedInsConfig):
        classes = len(result.run.federation.task.classes)
        make = partial(_pool, config.frozen, classes, composite["entries"], composite["top"])
    return {
        "own" if draft.site == site else draft.role: partial(
            make, draft.network, to_safetensors(draft.weights)
        )
        for draft in result.publication.models
        if draft.site in (None, site)
    }


def _plain(spec: NetworkSpec, weights: bytes) -> nn.Module:
    return network_of(spec, from_safetensors(weights), torch.device("cpu"))


def _pool(
    frozen: FrozenBackbone,
    classes: int,
    entries: int,
    top: int,
    spec: NetworkSpec,  # noqa: ARG001 - the backbone's, which brings its own
    weights: bytes,
) -> nn.Module:
    network = InstanceAdaptive(frozen.load(torch.device("cpu")), classes, entries, top)
    network.pool.load_state_dict(from_safetensors(weights))
    return network


def _page(
    folder: Path, site: Site, task: Task, models: Mapping[str, Made], sources: tuple[str, ...] | None
) -> Path:
    """One site's page; runs in a process of the site."""
    torch.set_num_threads(1)
    shown = Site(site.name, site.of_split("val") or site.of_split("train"))
    slices = SiteData.load(all_for_testing(shown), task).test
    predictions, attention = {}, {}
    for name, make in models.items():
        network = make()
        predictions[name] = predict(network, slices).numpy()
        if sources and isinstance(network, FedOapUNet) and len(slices):
            mean = attend(network, torch.from_numpy(slices.images))[1].double().mean(dim=0)
            attention[name] = dict(zip(sources, mean.tolist(), strict=True))
    return write_overlays(folder, site.name, task, slices, predictions, attention)
