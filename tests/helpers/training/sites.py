"""Sites in memory for tests of methods: discs of one brightness on noise."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from model_store.task import Task
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    RoundResult,
    ServerStage,
    StepContext,
)
from training.engine.seeds import generator, keyed
from training.local.site import SiteData
from training.local.slices import Slices

TASK = Task(name="discs", labels={"disc": (1,)}, channels=1, size=(32, 32))


def slices(count: int, seed: int, *, empty: bool = False, contrast: float = 2.0) -> Slices:
    """`count` slices, two per patient."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:32, :32]
    centres = draw.uniform(10, 22, (count, 2))
    targets = np.stack([(rows - y) ** 2 + (columns - x) ** 2 < 36 for y, x in centres]) if count else []
    targets = np.array(targets, np.uint8).reshape(count, 32, 32) * (0 if empty else 1)
    images = draw.normal(size=(count, 1, 32, 32)).astype(np.float32) + contrast * targets[:, None]
    patients = tuple(f"p{index // 2}" for index in range(count))
    return Slices(images.astype(np.float32), targets, patients, patients, tuple(range(count)))


def site_data(name: str, train: int, val: int, seed: int, **options: object) -> SiteData:
    return SiteData(
        name,
        slices(train, seed, **options),
        slices(val, seed + 1, **options),
        slices(0, 0),
        None,
    )


def context(phase: str, round_: int, rounds: int = 3, site: str | None = None) -> StepContext:
    def draw(purpose: str) -> torch.Generator:
        return generator(0, phase, round_, site or "", purpose)

    return StepContext(phase, round_, rounds, torch.device("cpu"), draw, site)


def noise(purpose: str, *hidden: object) -> np.random.Generator:
    """The keyed generator that a context gives for `purpose`; here the same for whatever it hides."""
    return keyed(b"a key", purpose)


def phase_of(algorithm: Algorithm, name: str) -> Phase:
    """The phase of an algorithm's plan with this name."""
    return next(step for step in algorithm.plan() if isinstance(step, Phase) and step.name == name)


def client_step(algorithm: Algorithm, where: StepContext, *arguments: Any) -> ClientResult:
    """Run the client step of the phase that a context names."""
    return phase_of(algorithm, where.phase).client_step(where, *arguments)


def server_step(algorithm: Algorithm, where: StepContext, *arguments: Any) -> Memory:
    """Run the server step of the phase that a context names."""
    return phase_of(algorithm, where.phase).server_step(where, *arguments)


def server_stage(algorithm: Algorithm, where: StepContext, server: Memory) -> Memory:
    """Run a step of the server stage that a context names."""
    stages = (step for step in algorithm.plan() if isinstance(step, ServerStage))
    return next(stage for stage in stages if stage.name == where.phase).step(where, server)


def declared(
    name: str, rounds: int, downloads: tuple[Group, ...], uploads: tuple[Group, ...], **options: Any
) -> Phase:
    """A phase of which only the declaration counts."""
    return Phase(name, rounds, downloads, uploads, _never, **options)


def _never(*arguments: object) -> NoReturn:
    raise AssertionError("a phase that is only declared runs no step")


def collected(results: dict[str, ClientResult], group: str) -> dict[str, dict[str, torch.Tensor]]:
    return {site: dict(result.uploads[group]) for site, result in results.items()}


def result_of(results: dict[str, ClientResult], *, mean: str | None, collect: tuple[str, ...]) -> RoundResult:
    """A round reduced by a naive loop, in float64."""
    reduced = {}
    if mean:
        total = sum(result.weight for result in results.values())
        first = next(iter(results.values())).uploads[mean]
        reduced[mean] = {
            name: sum(r.uploads[mean][name].double() * r.weight for r in results.values()).div(total).float()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in first.items()
        }
    return RoundResult(
        reduced,
        {group: collected(results, group) for group in collect},
        {site: result.weight for site, result in results.items()},
        {site: result.metrics for site, result in results.items()},
    )


EMPTY = Memory()


def per_scan(slices: Slices, classes: np.ndarray) -> list[torch.Tensor]:
    """Class indices [N, H, W] of slices as the answer to each of their scans."""
    found = torch.from_numpy(classes)
    return [found[own[0]] if len(own) == 1 else found[own] for own in slices.by_scan().values()]
