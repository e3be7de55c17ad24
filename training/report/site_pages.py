"""After a run, each site's page of overlays, made from nothing but the site's own data and its models.

The work is done in processes of their own, as a site's steps are: pictures never pass through the process
that speaks for the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.state import from_safetensors, to_safetensors
from training.algorithm import ModelDraft
from training.data.cases import Site
from training.data.dataset import SiteData
from training.data.splits import all_for_testing
from training.methods.local import network_of, predict
from training.report.overlays import write_overlays
from training.run import Result


def write_site_pages(result: Result, folder: Path, workers: int = 1) -> dict[str, Path]:
    """Write `folder`/sites/SITE/overlays.html for every site of a finished run; gives the pages by site.

    A page shows the site's validation patients (its training patients, if it has no others) with the global
    model and, where it was exported, the site's own. A classification has no outlines to show, and no page.
    """
    if result.run.federation.task.kind != "segmentation":
        return {}
    sites = result.run.sites()
    models = {site.name: _models_of(site.name, result.publication.models) for site in sites}
    task = result.run.federation.task
    with ProcessPoolExecutor(max(1, workers), mp_context=get_context("spawn")) as pool:
        pages = {
            site.name: pool.submit(_page, folder / "sites" / site.name, site, task, models[site.name])
            for site in sites
        }
        return {name: page.result() for name, page in pages.items()}


def _models_of(site: str, drafts: tuple[ModelDraft, ...]) -> dict[str, tuple[NetworkSpec, bytes]]:
    """What a site may be shown: models of the whole federation, and its own."""
    return {
        "own" if draft.site == site else draft.role: (draft.network, to_safetensors(draft.weights))
        for draft in drafts
        if draft.site in (None, site)
    }


def _page(folder: Path, site: Site, task: Task, models: Mapping[str, tuple[NetworkSpec, bytes]]) -> Path:
    """One site's page; runs in a process of the site."""
    torch.set_num_threads(1)
    shown = Site(site.name, site.of_split("val") or site.of_split("train"))
    slices = SiteData.load(all_for_testing(shown), task).test
    predictions = {}
    for name, (spec, weights) in models.items():
        network = network_of(spec, from_safetensors(weights), torch.device("cpu"))
        predictions[name] = predict(network, slices).numpy()
    return write_overlays(folder, site.name, task, slices, predictions)
