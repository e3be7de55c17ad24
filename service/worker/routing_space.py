"""Adapt a routing space to a hospital's unlabeled scans, and publish a judged candidate.

Its own stages:
    measuring   with `auto`: how far the scans are from the members', and the dose that this asks for
    adapting    write a checkpoint per epoch; a later attempt continues from it, bit for bit
    judging     a dose by the gate for closed forms; else repeat what is learned from another seed and from
                halves
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from model_store.manifest import GRAPH, WEIGHTS, NetworkSpec
from model_store.task import Task
from personalization.cancellation import CancelCheck
from personalization.dose import ByShift, by_shift
from personalization.errors import ExportError
from personalization.gate import GateVerdict
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import coefficients, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.options.movable import FALLBACKS
from personalization.options.presets import AUTO, FOR_COHORTS, SPREAD
from personalization.state import to_safetensors
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, Routing, recipe_of
from service.settings import cohort_limits
from service.worker.attempt import as_json
from service.worker.candidate import CandidateDraft
from service.worker.cohort_images import CohortImages, load_images, widened
from service.worker.cohort_job import CohortWork
from service.worker.device import device_of
from service.worker.epochs import EpochReports, resume
from service.worker.pictures import draw_pictures
from service.worker.routing_adapt import class_maps, configured, graph_of, load_space, unsuited
from service.worker.routing_gate import replicas_cost, verdict_on

DYNAMIC = "dynamic.onnx"


@dataclass(frozen=True)
class Candidate:
    """What was adapted, by which configuration; `dose` is that which the shift asked for."""

    task: Task
    adapted: Adapted
    config: AdaptationConfig
    dose: ByShift | None = None

    @cached_property
    def graph(self) -> bytes:
        """Its graph (onnx)."""
        return graph_of(self.adapted.merged, self.task)


@dataclass
class RoutingWork(CohortWork[CohortImages, Candidate]):
    """Adapt a routing space to a cohort."""

    METHOD: ClassVar[str] = "iop-fl-routing"

    def __post_init__(self) -> None:
        """Load the models."""
        self.loaded = load_space(self.store, self.parent)
        self.device = device_of(self.attempt.settings)

    @override
    def read(self) -> CohortImages:
        task, known = self.loaded.task, self.loaded.manifest.statistics
        limits = cohort_limits(self.attempt.settings, task)
        check_cancelled, include = self.attempt.check_cancelled, self.includes_unlike
        return load_images(self.files, task, known, limits, check_cancelled, include=include)

    @override
    def make(self, cohort: CohortImages) -> Candidate:
        """Adapt by the recipe that was asked for; with `auto` by the dose that the shift asks for."""
        attempt, loaded = self.attempt, self.loaded
        task, space, images = loaded.task, loaded.space, cohort.images
        auto = attempt.job.options.get("preset", AUTO) == AUTO
        if auto and loaded.spread is not None:
            attempt.set_stage("measuring")
            patients = cohort.patient_of_image.tolist()
            dose = by_shift(
                space,
                loaded.spread,
                loaded.playbook,
                images,
                patients,
                self.device,
                attempt.check_cancelled,
                cohort.kinds.share_mistaken,
            )
            return Candidate(task, dose.adapted, dose.config, dose=dose)
        config = self._configured()
        return Candidate(task, self._adapt(cohort, config), config)

    @override
    def judge(self, cohort: CohortImages, made: Candidate) -> GateVerdict:
        """Observe a dose as it was made, else replicas of what was learned."""
        if made.dose is not None:
            return made.dose.verdict
        return verdict_on(
            self.attempt,
            self.loaded,
            made.adapted,
            cohort,
            made.config,
            self.device,
            self.watch.stages["adapt"] / 1000,
        )

    @override
    def summary(self, cohort: CohortImages, made: Candidate, verdict: GateVerdict) -> list[str]:
        if made.dose is not None:
            return said_of_dose(made.dose)
        return super().summary(cohort, made, verdict)

    @override
    def draw(self, cohort: CohortImages, made: Candidate) -> None:
        draw_pictures(self.attempt, self.files, self.loaded.global_model, made.graph)

    @override
    def result(self, cohort: CohortImages, made: Candidate) -> dict[str, Any]:
        adaptation = made.adapted.adaptation
        found = {} if made.dose is None else {"dose": dose_facts(made.dose)}
        return found | {
            "options": made.config.facts(),
            "scans": len(self.files),
            "images": len(cohort.images),
            "epochs": adaptation.history[-1].epoch,
            "best_epoch": adaptation.best_epoch,
            "fell_back": adaptation.fell_back,
            "stopped": adaptation.stopped,
        }

    @override
    def draft(self, cohort: CohortImages, made: Candidate, result: dict[str, Any]) -> CandidateDraft:
        """The merged network; with routers that answer scan by scan, their graph too."""
        loaded, adapted, config = self.loaded, made.adapted, made.config
        used = _coefficients(
            adapted.space, adapted.learned, cohort, self.device, self.attempt.check_cancelled
        )
        files = {WEIGHTS: to_safetensors(adapted.merged.state_dict()), GRAPH: made.graph}
        dynamic = self._dynamic(cohort, adapted, config)
        name, arguments = recipe_of(config.preset).architecture(loaded.space, config)
        network = NetworkSpec(name=name, arguments=arguments)
        return CandidateDraft(
            parent=self.parent,
            model=loaded.manifest.model_copy(update={"network": network}),
            method=self.METHOD,
            files=files if dynamic is None else {**files, DYNAMIC: dynamic},
            epochs=adapted.adaptation.history[-1].epoch,
            seed=config.seed,
            details=result | ({} if used is None else {"coefficients": used}),
            statistics=widened(loaded.manifest.statistics, cohort.statistics),
        )

    @override
    def cost(self) -> dict[str, Any]:
        return {"milliseconds": self.watch.stages}

    def _configured(self) -> AdaptationConfig:
        """What the request asked for; for `auto` of an artefact without the members' spread, the fallback."""
        attempt, options = self.attempt, self.attempt.job.options
        preset = options.get("preset", AUTO)
        tried = FALLBACKS if preset == AUTO else (preset,)
        # First, since the preset of an old request may be gone.
        configs = [configured({**options, "preset": each}, self.loaded.task) for each in tried]
        found = next((config for config in configs if self.loaded.suits(config.preset)), None)
        if found is None:
            raise unsuited(preset, self.loaded, FOR_COHORTS)
        if preset == AUTO:
            attempt.warn(
                f"'{self.parent}' does not say how far its members are apart ({SPREAD}), so the recipe is "
                f"'{found.preset}' with its defaults, and no gain can be predicted"
            )
        return found

    def _adapt(self, cohort: CohortImages, config: AdaptationConfig) -> Adapted:
        attempt, space, device = self.attempt, self.loaded.space, self.device
        reports = EpochReports(attempt, "adapting", config.passes, cohort.images, self.loaded.task)
        recipe = recipe_of(config.preset)
        over = recipe.over(space, config)
        # Of this attempt, for the time that is left; judging repeats the adaptation.
        began: tuple[int, float] | None = None
        passes_to_do = config.passes * (1 + replicas_cost(cohort, config))

        def after_epoch(network: nn.Module, checkpoint: AdaptationCheckpoint) -> None:
            nonlocal began
            epoch, seconds_left = checkpoint.epoch, None
            if began is None:
                began = epoch, time.monotonic()
            else:
                each = (time.monotonic() - began[1]) / (epoch - began[0])
                seconds_left = round(each * (passes_to_do - epoch))
            used = _coefficients(over, network, cohort, device, attempt.check_cancelled)
            history = {record.epoch: asdict(record) for record in checkpoint.history}
            if used is not None:
                history[epoch]["coefficients"] = used
            reports.report(
                epoch,
                checkpoint.to_bytes(),
                history,
                lambda images: class_maps(network, images, device, attempt.check_cancelled),
                seconds_left,
            )

        return resume(
            attempt,
            "the adaptation",
            AdaptationCheckpoint.from_bytes,
            lambda checkpoint: recipe.adapt(
                space,
                cohort.images,
                config,
                device,
                attempt.check_cancelled,
                resume=checkpoint,
                after_epoch=after_epoch,
            ),
        )

    def _dynamic(self, cohort: CohortImages, adapted: Adapted, config: AdaptationConfig) -> bytes | None:
        if adapted.learned is None or not isinstance(recipe_of(config.preset), Routing):
            return None
        check_cancelled = self.attempt.check_cancelled
        try:
            return to_dynamic_onnx(
                adapted.space, adapted.learned, cohort.images.to(self.device), check_cancelled=check_cancelled
            )
        except ExportError as error:
            self.attempt.warn(f"the candidate has no graph with its routers inside: {error}")
            return None


class ModelWork(RoutingWork):
    """Adapt one model to a cohort."""

    METHOD = "test-time"


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


def said_of_dose(made: ByShift, *, through: bool = False) -> list[str]:
    """Say how far the scans are from the members', what was done, and what that did at the members.

    `through`: the network sees them through a lens.
    """
    dose, record = made.dose, made.record
    if not dose.share:
        return [
            f"These scans look like the member hospitals': their distance is {dose.shift:.1f}, where 1 is "
            "usual between hospitals. So the global model stays as it is: that is the answer, no rejection."
        ]
    early, middle, late = (f"{100 * each:.0f} %" for each in dose.doses)
    begins = "What the network sees through the lens is at a distance of"
    if not through:
        begins = "The distance of these scans from the member hospitals' is"
    said = [
        f"{begins} {dose.shift:.1f}, where 1 is usual "
        f"between hospitals. The model's scale of brightness and contrast moves {early} of the way to these "
        f"scans in its first layers, {middle} in the middle and {late} in the last. No mask was used."
    ]
    if record is None:
        return [*said, "No gain is predicted: the federation has not practised this."]
    return [
        *said,
        f"When member hospitals tried this on each other, Dice changed by {100 * record.mean:+.1f} points "
        f"in the mean and by {100 * record.worst:+.1f} in the worst of {record.episodes} trials; "
        f"{100 * record.lost:.0f} % of them lost more than a point.",
    ]


def dose_facts(made: ByShift) -> dict[str, Any]:
    """The shift, the dose and what they rest on, for the card."""
    dose, record, spread = made.dose, made.record, made.spread
    found = {
        "shift": round(dose.shift, 4),
        "share": round(dose.share, 4),
        "doses": [round(each, 4) for each in dose.doses],
        "members": spread.members,
        "layers": {name: round(each, 3) for name, each in zip(spread.layers, dose.layers, strict=True)},
    }
    if record is None:
        return found
    members = {name: [round(value, 4) for value in values] for name, values in record.members.items()}
    return {**found, "practised": {"largest": round(record.largest, 3), "changes": members}}
