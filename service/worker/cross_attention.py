"""Join a FedOAP model with masks of some of a hospital's scans, and publish a judged candidate.

Its own stage is `joining`: it writes a checkpoint per epoch, and a later attempt continues from it, bit for
bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.manifest import GRAPH, WEIGHTS, CrossAttentionManifest, ModelManifest
from model_store.task import Task
from personalization.cancellation import CancelCheck
from personalization.export import to_onnx
from personalization.fedoap.joining import (
    JOINING,
    Joining,
    JoiningCheckpoint,
    JoiningConfig,
    ObservedJoining,
    join,
    predict,
)
from personalization.gate import GateVerdict, judge
from personalization.networks import FedOapUNet, build
from personalization.state import from_safetensors, to_safetensors
from service.cohorts.patients import PatientSplit, split_by_patient
from service.errors import AdaptationRejected
from service.worker.candidate import CandidateDraft
from service.worker.cohort_images import LabelledImages, widened
from service.worker.device import device_of
from service.worker.epochs import EpochReports, resume
from service.worker.masked_cohort import MaskedCohortWork
from service.worker.pictures import draw_pictures

METHOD = "fedoap-joining"
# With fewer validation patients with a target, their Dice is not reliable.
_FEW_PATIENTS = 3


@dataclass(frozen=True)
class Joined:
    """A finished joining: the `network` after it, and the patients that it learned from."""

    joining: Joining
    split: PatientSplit
    network: FedOapUNet
    task: Task
    images: Tensor
    check_cancelled: CancelCheck

    @cached_property
    def attention(self) -> Tensor:
        """Attention [N, S] of all images."""
        return predict(self.network, self.images, self.check_cancelled)[1]

    @cached_property
    def graph(self) -> bytes:
        """The network's graph (onnx)."""
        return to_onnx(self.network, self.task.in_channels, self.task.size)


@dataclass
class JoiningWork(MaskedCohortWork[Joined]):
    """Join a hospital by the masks of its cohort."""

    def __post_init__(self) -> None:
        """Load the shared part, the bank, and the initial personal part of a hospital."""
        self.config = JoiningConfig(**self.attempt.job.options)
        offered = self.parent.expect(CrossAttentionManifest)
        self.model = self.store.by_digest(offered.manifest.global_model, ModelManifest)
        self.manifest, self.task = self.model.manifest, self.model.manifest.task
        network = build(self.manifest.network.name, **self.manifest.network.arguments)
        if not isinstance(network, FedOapUNet):
            raise AdaptationRejected(
                f"'{self.model}' is a network '{self.manifest.network.name}', expected fedoap; publish the "
                "artefact again"
            )
        network.load_state_dict(from_safetensors(self.model.read(WEIGHTS)))
        self.network = network

    @override
    def make(self, cohort: LabelledImages) -> Joined:
        """Split the patients, and join with the masks of some."""
        self.warn_of_lost_targets(cohort)
        config = self.config
        # Split by the resampled masks: a patient without a target left is no use for training or validation.
        split = split_by_patient(cohort.drawn, self.digests, self.task, config.validation, config.seed)
        self.warn_of_same_bytes(split.patients)
        self._warn_of_few_patients(split)
        self.network.to(device_of(self.attempt.settings))
        self.check_swapped(self.network, cohort)
        joining = self._join(cohort, split)
        return Joined(joining, split, self.network, self.task, cohort.images, self.attempt.check_cancelled)

    @override
    def judge(self, cohort: LabelledImages, made: Joined) -> GateVerdict:
        """Compare Dice on the validation patients with zero-shot; check that all masks are plausible."""
        self.attempt.set_stage("judging")
        scans = self.answered.beside_drawn(made.network, {*cohort.names})
        return judge(JOINING, ObservedJoining(made.joining, scans))

    @override
    def summary(self, cohort: LabelledImages, made: Joined, verdict: GateVerdict) -> list[str]:
        best, start = made.joining.best.dice, made.joining.start.dice
        return [validation(best, start, made.split.count(made.split.validation))]

    @override
    def draw(self, cohort: LabelledImages, made: Joined) -> None:
        """Draw scans that were not trained on."""
        chosen = [*(file for file in self.files if file.name in made.split.validation)]
        chosen += [file for file in self.files if file.name not in made.split.patients]
        draw_pictures(self.attempt, chosen, self.model, made.graph, self.masks)

    @override
    def result(self, cohort: LabelledImages, made: Joined) -> dict[str, Any]:
        joining, split = made.joining, made.split
        return {
            "options": self.config.facts(),
            "scans": len(set(cohort.names)),
            "images": len(cohort.images),
            "masks": len(split.patients),
            "train_patients": split.count(split.train),
            "validation_patients": split.count(split.validation),
            "epochs": joining.history[-1].epoch,
            "best_epoch": joining.best_epoch,
            "validation_dice": joining.best.dice,
            "zero_shot_dice": joining.start.dice,
            "fell_back": joining.best_epoch == 0,
            "stopped": joining.stopped,
            "attention": self._shares(made.attention),
        }

    @override
    def draft(self, cohort: LabelledImages, made: Joined, result: dict[str, Any]) -> CandidateDraft:
        known = self.manifest.statistics
        return CandidateDraft(
            parent=self.parent,
            model=self.manifest,
            method=METHOD,
            files={WEIGHTS: to_safetensors(self.network.state_dict()), GRAPH: made.graph},
            epochs=made.joining.history[-1].epoch,
            seed=self.config.seed,
            details=result,
            statistics=cohort.statistics if known is None else widened(known, cohort.statistics),
            metrics={"val_dice": made.joining.best.dice},
            sources=self.manifest.sources,
        )

    def _join(self, cohort: LabelledImages, split: PatientSplit) -> Joining:
        attempt = self.attempt
        train, validation = (
            cohort.examples(names, split.patients, self.task) for names in (split.train, split.validation)
        )
        scored = self.scored({name: split.patients[name] for name in split.validation})
        reports = EpochReports(attempt, "joining", self.config.epochs, validation.images, self.task)

        def class_maps(images: Tensor) -> NDArray[np.uint8]:
            maps, _ = predict(self.network, images, attempt.check_cancelled)
            return maps.numpy()

        def after_epoch(checkpoint: JoiningCheckpoint) -> None:
            history = {record.epoch: asdict(record) for record in checkpoint.history}
            reports.report(checkpoint.history[-1].epoch, checkpoint.to_bytes(), history, class_maps)

        return resume(
            attempt,
            "joining",
            JoiningCheckpoint.from_bytes,
            lambda checkpoint: join(
                self.network,
                train,
                validation,
                self.config,
                scored,
                resume=checkpoint,
                after_epoch=after_epoch,
                check_cancelled=attempt.check_cancelled,
            ),
        )

    def _warn_of_few_patients(self, split: PatientSplit) -> None:
        if split.deciding < _FEW_PATIENTS:
            self.attempt.warn(
                f"the epoch is chosen, and the gate decides, by {split.deciding} validation patient"
                f"{'s' if split.deciding > 1 else ''} with a target: masks of more patients would say more"
            )

    def _shares(self, attention: Tensor) -> dict[str, float] | None:
        """Average over all slices of the cohort, by source."""
        if self.manifest.sources is None:
            return None
        mean = attention.double().mean(dim=0).tolist()
        return {source: round(share, 6) for source, share in zip(self.manifest.sources, mean, strict=True)}


def validation(dice: float, zero_shot: float, patients: int) -> str:
    """Say what Dice the joined model has on so many validation patients, beside the shared model's."""
    more = "more" if dice >= zero_shot else "less"
    return (
        f"On {patients} patient{'' if patients == 1 else 's'} that it did not learn from, Dice is "
        f"{100 * dice:.1f} %: {100 * abs(dice - zero_shot):.1f} points {more} than the shared model. These "
        "patients chose the epoch, so the figure is optimistic."
    )
