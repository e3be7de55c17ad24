"""Write each site's overlay page after a run, from the site's own data and its models only.

Several workers draw pages of several sites at once, each in a process of its own. One draws in this process:
to start another, and import all in it again, would take longer than the pages of a small run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.state import State, from_safetensors, to_safetensors
from training.config import MethodConfig
from training.data.cases import Site
from training.data.splits import all_for_testing
from training.local.data import slices_of
from training.local.registry import kind_of
from training.local.scores import predict
from training.local.site import SiteData
from training.methods.registry import method
from training.processes import process_context
from training.report.overlays import write_overlays
from training.run import Result

# Builds a trained network in the process that draws the page. Only bytes are sent to that process.
Made = Callable[[], nn.Module]


def write_site_pages(result: Result, folder: Path, workers: int = 1) -> dict[str, Path]:
    """Write `folder`/sites/SITE/overlays.html for every site of a finished run. Returns the pages by site.

    A page shows the site's validation patients (its training patients, if it has no others) with the global
    model and, if it was exported, the site's own. Classification has no outlines, so no page is written.
    """
    task = result.run.federation.task
    if not kind_of(task).dense:
        return {}
    # Scans of a hospital on the network are at the hospital.
    sites = [site for site in result.run.sites() if isinstance(site, Site)]
    models = {site.name: _models_of(site.name, result) for site in sites}
    attention = method(result.run.method).attention
    # All models of a publication have the same sources.
    sources = next((draft.sources for draft in result.publication.models if draft.sources), None)
    draws = {
        site.name: partial(
            _page, folder / "sites" / site.name, site, task, models[site.name], sources, attention
        )
        for site in sites
    }
    if workers <= 1:
        return {name: draw() for name, draw in draws.items()}
    with ProcessPoolExecutor(workers, mp_context=process_context()) as pool:
        pages = {name: pool.submit(draw) for name, draw in draws.items()}
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
    """Write one site's page, on one thread of torch as the sites' steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shown = Site(site.name, site.of_split("val") or site.of_split("train"))
        examples = SiteData.load(all_for_testing(shown), task).test
        answers, attention = {}, {}
        for name, make in models.items():
            network = make()
            answers[name] = predict(network, examples)
            if sources and attend and len(examples):
                images = torch.from_numpy(slices_of(examples).images)
                mean = attend(network, images).double().mean(dim=0)
                attention[name] = dict(zip(sources, mean.tolist(), strict=True))
        return write_overlays(folder, site.name, task, examples, answers, attention)
    finally:
        torch.set_num_threads(threads)
