"""Adapt a routing space to a hospital's unlabeled scans, and publish a judged candidate.

Stages:
    preparing   read and check scans and models
    choosing    with `auto`: try the recipes that the federation has practised
    adapting    write a checkpoint per epoch; a later attempt continues from it, bit for bit
    judging     for the gate: by the playbook, else repeat what is learned from another seed and from halves
    drawing     show scans before and after, for review
    publishing  once, by the worker that holds the lease
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from model_store.guard import ReferenceStatistics
from model_store.manifest import GRAPH, WEIGHTS, NetworkSpec
from personalization.cancellation import CancelCheck
from personalization.errors import CheckpointError, ExportError
from personalization.export import to_onnx
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import coefficients, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.options.presets import AUTO
from personalization.playbook import Choice, Playbook, choose
from personalization.state import to_safetensors
from personalization.test_time.adapt import Adaptation
from personalization.test_time.checkpoint import AdaptationCheckpoint, EpochRecord
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, Routing, recipe_of
from service.cohorts.files import ScanFile
from service.inference.pipeline import Stopwatch
from service.jobs import records
from service.settings import scan_limits
from service.worker.attempt import Attempt, PublishedCandidate, as_json
from service.worker.candidate import CandidateDraft, publish
from service.worker.cohort_images import CohortImages, cohort_files, load_images
from service.worker.device import device_of
from service.worker.pictures import Preview, draw_pictures
from service.worker.routing_adapt import LoadedSpace, class_maps, load_space
from service.worker.routing_gate import replicas_cost, verdict_on

METHOD = "iop-fl-routing"
# The recipe of `auto` without a playbook.
FALLBACK = "ladder"
DYNAMIC = "dynamic.onnx"


def run_routing(attempt: Attempt) -> PublishedCandidate:
    """Adapt, judge and publish. The runner reports any error as the job's reason."""
    store = attempt.settings.open_store()
    loaded = load_space(store, attempt.job.parent)
    files = cohort_files(attempt)
    limits = scan_limits(attempt.settings)
    cohort = load_images(files, loaded.task, loaded.manifest.statistics, limits, attempt.check_cancelled)
    if cohort.left_out:
        attempt.warn(
            f"the cohort has {cohort.left_out} slices more than can be adapted to at once: "
            f"{len(cohort.images)}, evenly spaced, are used"
        )
    device = device_of(attempt.settings)
    watch = Stopwatch()
    choice = None
    with watch.stage("adapt"):
        if _practised(attempt, loaded):
            assert loaded.playbook is not None
            attempt.set_stage("choosing")
            choice = choose(loaded.playbook, loaded.space, cohort.images, device, attempt.check_cancelled)
            config, adapted = choice.chosen.config, choice.chosen.adapted
        else:
            config = _configured(attempt, loaded)
            adapted = _adapt(attempt, loaded, cohort, config, device)
    with watch.stage("judge"):
        adapted_in_s = watch.stages["adapt"] / 1000
        verdict = verdict_on(attempt, loaded, adapted, cohort, config, choice, device, adapted_in_s)
    gate = as_json(verdict.to_json())
    attempt.emit("gate", gate)
    attempt.set_stage("drawing")
    with watch.stage("draw"):
        graph = to_onnx(adapted.merged, loaded.task.in_channels, loaded.task.size)
        draw_pictures(attempt, files, loaded.global_model, graph)
    attempt.set_stage("publishing")
    result = _result(adapted.adaptation, config, choice, loaded.playbook, cohort, files)
    used = _coefficients(adapted.space, adapted.learned, cohort, device, attempt.check_cancelled)
    files_out = {WEIGHTS: to_safetensors(adapted.merged.state_dict()), GRAPH: graph}
    dynamic = _dynamic(attempt, adapted, config, cohort, device)
    name, arguments = recipe_of(config.preset).architecture(loaded.space, cohort.images)
    network = NetworkSpec(name=name, arguments=arguments)
    draft = CandidateDraft(
        parent=loaded.offered,
        model=loaded.manifest.model_copy(update={"network": network}),
        method=METHOD,
        files=files_out if dynamic is None else {**files_out, DYNAMIC: dynamic},
        epochs=adapted.adaptation.history[-1].epoch,
        seed=config.seed,
        details=result | ({} if used is None else {"coefficients": used}),
        statistics=_statistics(loaded, cohort),
    )
    # What it cost is no part of the version: the same job made again is the same version.
    return publish(attempt, store, draft, gate=gate, result=result | {"milliseconds": watch.stages})


def _practised(attempt: Attempt, loaded: LoadedSpace) -> bool:
    """Whether the playbook chooses."""
    return loaded.playbook is not None and attempt.job.options.get("preset", AUTO) == AUTO


def _configured(attempt: Attempt, loaded: LoadedSpace) -> AdaptationConfig:
    """What the request asked for; for `auto`, without a playbook, the fallback."""
    share = None if loaded.playbook is None else loaded.playbook.targets.share or None
    options = {**attempt.job.options, "target_share": share}
    if options.get("preset", AUTO) != AUTO:
        return AdaptationConfig(**options)
    attempt.warn(
        f"the federation has not practised: '{loaded.offered}' has no playbook, so the recipe is "
        f"'{FALLBACK}' with its defaults, and no gain can be predicted"
    )
    return AdaptationConfig(**{**options, "preset": FALLBACK})


def _adapt(
    attempt: Attempt,
    loaded: LoadedSpace,
    cohort: CohortImages,
    config: AdaptationConfig,
    device: torch.device,
) -> Adapted:
    attempt.set_stage("adapting", epoch=0, epochs=config.passes)
    space, preview = loaded.space, Preview(attempt, cohort.images, loaded.task)
    recipe = recipe_of(config.preset)
    over = recipe.over(space, config)
    with attempt.database.read() as session:
        noted = {event.data["epoch"] for event in records.events_of_type(session, attempt.job.id, "epoch")}
    # Of this attempt, for the time that is left; judging repeats the adaptation.
    began: tuple[int, float] | None = None
    passes_to_do = config.passes * (1 + replicas_cost(cohort, config))

    def after_epoch(network: nn.Module, checkpoint: AdaptationCheckpoint) -> None:
        nonlocal began
        attempt.check_cancelled()
        # The file comes before the event, so that an epoch with an event is never repeated.
        attempt.folder.write(attempt.folder.CHECKPOINT, checkpoint.to_bytes())
        used = _coefficients(over, network, cohort, device, attempt.check_cancelled)
        for record in checkpoint.history:
            if record.epoch not in noted:
                noted.add(record.epoch)
                attempt.emit("epoch", _epoch(record, used if record.epoch == checkpoint.epoch else None))
        preview.draw(
            checkpoint.epoch, lambda images: class_maps(network, images, device, attempt.check_cancelled)
        )
        more = {}
        if began is None:
            began = checkpoint.epoch, time.monotonic()
        else:
            each = (time.monotonic() - began[1]) / (checkpoint.epoch - began[0])
            more = {"seconds_left": round(each * (passes_to_do - checkpoint.epoch))}
        attempt.set_stage("adapting", epoch=checkpoint.epoch, epochs=config.passes, preview=True, **more)

    def go(resume: AdaptationCheckpoint | None) -> Adapted:
        return recipe.adapt(
            space,
            cohort.images,
            config,
            device,
            attempt.check_cancelled,
            resume=resume,
            after_epoch=after_epoch,
        )

    try:
        return go(_checkpoint(attempt))
    except CheckpointError as error:
        attempt.warn(f"the adaptation started over: {error}")
        return go(None)


def _checkpoint(attempt: Attempt) -> AdaptationCheckpoint | None:
    content = attempt.read_checkpoint()
    return None if content is None else AdaptationCheckpoint.from_bytes(content)


def _epoch(record: EpochRecord, used: dict[str, Any] | None) -> dict[str, Any]:
    return asdict(record) | ({} if used is None else {"coefficients": used})


def _coefficients(
    space: RoutingSpace,
    network: nn.Module | None,
    cohort: CohortImages,
    device: torch.device,
    check_cancelled: CancelCheck,
) -> dict[str, Any] | None:
    """Average over the images, layer by layer; None of a network without coefficients."""
    if network is None or not routed_layers(network):
        return None
    mean_LE = coefficients(network, cohort.images.to(device), check_cancelled=check_cancelled).mean(dim=0)
    return {
        "layers": list(routed_layers(network)),
        "models": list(space.names),
        "values": as_json([[round(value, 6) for value in row] for row in mean_LE.tolist()]),
    }


def _dynamic(
    attempt: Attempt, adapted: Adapted, config: AdaptationConfig, cohort: CohortImages, device: torch.device
) -> bytes | None:
    if adapted.learned is None or not isinstance(recipe_of(config.preset), Routing):
        return None
    try:
        return to_dynamic_onnx(
            adapted.space, adapted.learned, cohort.images.to(device), check_cancelled=attempt.check_cancelled
        )
    except ExportError as error:
        attempt.warn(f"the candidate has no graph with its routers inside: {error}")
        return None


def _statistics(loaded: LoadedSpace, cohort: CohortImages) -> ReferenceStatistics | None:
    """Extend the statistics, so that the guard does not warn of the hospital's own scans."""
    known = loaded.manifest.statistics
    return None if known is None else known.merge(cohort.statistics)


def _result(
    adaptation: Adaptation,
    config: AdaptationConfig,
    choice: Choice | None,
    playbook: Playbook | None,
    cohort: CohortImages,
    files: Sequence[ScanFile],
) -> dict[str, Any]:
    expected = {} if choice is None else {"playbook": _expected(choice, playbook)}
    return expected | {
        "options": config.facts(),
        "scans": len(files),
        "images": len(cohort.images),
        "epochs": adaptation.history[-1].epoch,
        "best_epoch": adaptation.best_epoch,
        "fell_back": adaptation.fell_back,
        "stopped": adaptation.stopped,
    }


def _expected(choice: Choice, playbook: Playbook | None) -> dict[str, Any]:
    """What the playbook expects of each recipe that was tried here, and what that rests on, for the card."""
    assert playbook is not None  # it made the choice
    trial = choice.chosen.decision.trial
    record = next(each for each in playbook.recipes if each.name == trial)
    return {
        "recipe": trial,
        "promise": playbook.promise,
        "members": {name: [round(value, 4) for value in values] for name, values in record.members.items()},
        "tried": [
            {
                "recipe": name,
                "predicted": round(each.decision.expected.change, 4),
                "bound": round(each.decision.expected.bound, 4),
            }
            for name, each in choice.tried.items()
        ],
    }
