"""Adapt a model to a hospital by the masks of some of its scans, and publish a judged candidate.

Its own stage is `fitting`: a fit per fold of the cross-validation, each with a checkpoint, from which a later
attempt continues; then one on all masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn
from typing_extensions import override

from model_store.manifest import GRAPH, WEIGHTS, ModelManifest
from model_store.task import Task
from personalization.gate import GateVerdict, judge
from personalization.gate.bounds import Bounds
from personalization.labelled_slices import LabelledSlices, Score
from personalization.masks import BY_MASKS, Fitted, MasksCheckpoint, MasksConfig, ObservedFit, fit
from personalization.masks.fine_tuning import folds_of
from personalization.networks import build
from personalization.networks.registry import check_origin
from personalization.state import from_safetensors, to_safetensors
from service.cohorts.patients import patients_with_masks
from service.errors import AdaptationRejected
from service.kinds import kind_of
from service.worker.attempt import as_json
from service.worker.candidate import CandidateDraft
from service.worker.cohort_images import LabelledImages, widened
from service.worker.device import device_of
from service.worker.epochs import EpochReports, resume
from service.worker.masked_cohort import MaskedCohortWork
from service.worker.pictures import draw_pictures
from service.worker.routing_adapt import class_maps, graph_of

METHOD = "masks"


@dataclass(frozen=True)
class FittedToHospital:
    """A finished fit, and the patients with masks that it learned from."""

    fitted: Fitted
    patients: dict[str, str]
    task: Task

    @cached_property
    def graph(self) -> bytes:
        """The network's graph (onnx)."""
        return graph_of(self.fitted.network, self.task)


@dataclass
class MasksWork(MaskedCohortWork[FittedToHospital]):
    """Fine-tune the global model on the masks of a cohort, as far as held-out masks gain."""

    def __post_init__(self) -> None:
        """Load the global model."""
        self.config = MasksConfig(**self.attempt.job.options)
        digest = kind_of(self.parent).parts(self.parent).global_model
        if digest is None:
            raise AdaptationRejected(f"'{self.parent}' has no global model to start from")
        self.model = self.store.by_digest(digest, ModelManifest)
        self.manifest, self.task = self.model.manifest, self.model.manifest.task
        self.device = device_of(self.attempt.settings)
        check_origin(self.manifest.network.name, self.manifest.network.origin)
        network = build(self.manifest.network.name, **self.manifest.network.arguments)
        network.load_state_dict(from_safetensors(self.model.read(WEIGHTS)))
        self.network = network.to(self.device).eval()

    @override
    def make(self, cohort: LabelledImages) -> FittedToHospital:
        """Cross-validate over the patients with masks, then fit all of them."""
        self.warn_of_lost_targets(cohort)
        # By the resampled masks: a patient without a target left can neither teach nor be held out.
        patients, _ = patients_with_masks(cohort.drawn, self.digests, self.task)
        self.warn_of_same_bytes(patients)
        self.check_swapped(self.network, cohort)
        examples = cohort.examples(patients, patients, self.task)
        return FittedToHospital(self._fit(examples, self.scored(patients)), patients, self.task)

    @override
    def judge(self, cohort: LabelledImages, made: FittedToHospital) -> GateVerdict:
        """Judge by the held-out masks; check that all masks are plausible."""
        self.attempt.set_stage("judging")
        observed = ObservedFit(
            made.fitted,
            self.answered.beside_drawn(made.fitted.network, {*cohort.names}),
            len(self.task.classes),
        )
        return judge(BY_MASKS, observed)

    @override
    def summary(self, cohort: LabelledImages, made: FittedToHospital, verdict: GateVerdict) -> list[str]:
        fitted = made.fitted
        if fitted.weight == 0:
            return [
                f"On the masks of {fitted.gain.n} patients that were held out, nothing was better than the "
                "global model, which is kept."
            ]
        return [held_out(fitted.gain)]

    @override
    def draw(self, cohort: LabelledImages, made: FittedToHospital) -> None:
        """Draw scans without masks, which were not learned from; without any, those with masks."""
        others = [file for file in self.files if file.name not in made.patients]
        draw_pictures(self.attempt, others or self.files, self.model, made.graph, self.masks)

    @override
    def result(self, cohort: LabelledImages, made: FittedToHospital) -> dict[str, Any]:
        fitted, gain = made.fitted, made.fitted.gain
        return {
            "options": self.config.model_dump(mode="json"),
            "scans": len(set(cohort.names)),
            "images": len(cohort.images),
            "masks": len(made.patients),
            "patients": len({*made.patients.values()}),
            "steps": fitted.steps,
            "folds": len(fitted.folds),
            "weight": fitted.weight,
            "held_out_dice": {str(weight): round(dice, 6) for weight, dice in fitted.means.items()},
            "held_out": {
                "change": round(gain.mean, 6),
                "at_least": round(gain.low, 6),
                "patients": gain.n,
                "worst": round(min(fitted.changes.values()), 6),
            },
            "fell_back": fitted.weight == 0,
        }

    @override
    def draft(self, cohort: LabelledImages, made: FittedToHospital, result: dict[str, Any]) -> CandidateDraft:
        known, fitted = self.manifest.statistics, made.fitted
        return CandidateDraft(
            parent=self.parent,
            model=self.manifest,
            method=METHOD,
            files={WEIGHTS: to_safetensors(fitted.network.state_dict()), GRAPH: made.graph},
            epochs=fitted.steps,
            seed=self.config.seed,
            details=result,
            statistics=cohort.statistics if known is None else widened(known, cohort.statistics),
            metrics={"val_dice": fitted.means[fitted.weight]},
        )

    @override
    def cost(self) -> dict[str, Any]:
        return {"milliseconds": self.watch.stages}

    def _fit(self, examples: LabelledSlices, score: Score) -> Fitted:
        attempt, config = self.attempt, self.config
        folds = len(folds_of(examples, config.folds, config.seed))
        reports = EpochReports(attempt, "fitting", folds, examples.images, self.task)

        def after_fold(checkpoint: MasksCheckpoint, network: nn.Module) -> None:
            history = {
                number: as_json(
                    {
                        "epoch": number,
                        "loss": fold.loss,
                        "parent": float(np.mean([dice[0] for dice in fold.dice.values()])),
                        "fine_tuned": float(np.mean([dice[-1] for dice in fold.dice.values()])),
                        "safe": True,
                    }
                )
                for number, fold in enumerate(checkpoint.folds, start=1)
            }
            reports.report(
                len(checkpoint.folds),
                checkpoint.to_bytes(),
                history,
                lambda images: class_maps(network, images, self.device, attempt.check_cancelled),
            )

        return resume(
            attempt,
            "the fit",
            MasksCheckpoint.from_bytes,
            lambda checkpoint: fit(
                self.network,
                examples,
                config,
                score,
                resume=checkpoint,
                after_fold=after_fold,
                check_cancelled=attempt.check_cancelled,
            ),
        )


def held_out(gain: Bounds) -> str:
    """Say what the held-out masks tell of the change of Dice."""
    more = "more" if gain.mean >= 0 else "less"
    return (
        f"On {gain.n} patients, each of whom was held out, Dice is {100 * abs(gain.mean):.1f} points {more} "
        f"than the global model's; with 95 % certainty the change is at least {100 * gain.low:+.1f} points."
    )
