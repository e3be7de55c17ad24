"""Join a FedOAP model with masks of some of a hospital's scans, and publish a judged candidate.

Stages:
    preparing   read and check scans, masks and the shared model; split the patients
    joining     write a checkpoint per epoch; a later attempt continues from it, bit for bit
    judging     compare Dice on the validation patients with zero-shot; check that all masks are plausible
    drawing     show scans that were not trained on, before and after
    publishing  once, by the worker that holds the lease
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, CrossAttentionManifest, ModelManifest
from model_store.store import Store
from personalization.errors import CheckpointError
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
from personalization.gate import judge
from personalization.networks import FedOapUNet, build
from personalization.state import from_safetensors, to_safetensors
from service.cohorts.files import label_of
from service.cohorts.patients import PatientSplit, same_bytes, split_by_patient
from service.errors import AdaptationRejected
from service.jobs import records
from service.settings import scan_limits
from service.worker.attempt import Attempt, PublishedCandidate, as_json
from service.worker.candidate import CandidateDraft, publish
from service.worker.cohort_images import LabelledImages, cohort_files, load_labelled, masks_of
from service.worker.device import device_of
from service.worker.pictures import Preview, draw_pictures

METHOD = "fedoap-joining"
# With fewer validation patients with a target, their Dice is not reliable.
_FEW_PATIENTS = 3


@dataclass(frozen=True)
class _Parent:
    """A cross-attention artefact, `offered`, with `model`, `manifest` and `network` of its shared part."""

    offered: Artefact[CrossAttentionManifest]
    model: Artefact[ModelManifest]
    manifest: ModelManifest
    network: FedOapUNet

    @property
    def channels(self) -> int:
        return self.manifest.task.in_channels


def run_joining(attempt: Attempt) -> PublishedCandidate:
    """Join, judge and publish. The runner reports any error as the job's reason."""
    store = attempt.settings.open_store()
    parent = _load(store, attempt.job.parent)
    config = JoiningConfig(**attempt.job.options)
    task = parent.manifest.task
    masks, ill = masks_of(attempt, task)
    files = cohort_files(attempt)
    cohort = load_labelled(files, masks, task, scan_limits(attempt.settings), attempt.check_cancelled)
    digests = {file.name: file.sha256 for file in files}
    _say_what_was_lost(attempt, cohort, ill, digests)
    # Split by the resampled masks: a patient without a target left is no use for training or validation.
    split = split_by_patient(cohort.drawn, digests, task, config.validation, config.seed)
    _say_what_is_little(attempt, split, digests)
    parent.network.to(device_of(attempt.settings))
    joining = _join(attempt, parent, cohort, split, config)
    attempt.set_stage("judging")
    maps, attention = predict(parent.network, cohort.images, attempt.check_cancelled)
    observed = ObservedJoining(
        joining, maps.numpy(), cohort.targets.numpy(), cohort.drawn_on, cohort.scan_of_image
    )
    verdict = judge(JOINING, observed)
    gate = as_json(verdict.to_json())
    attempt.emit("gate", gate)
    attempt.set_stage("drawing")
    graph = to_onnx(parent.network, parent.channels, task.size)
    chosen = [*(file for file in files if file.name in split.validation)]
    chosen += [file for file in files if file.name not in split.patients]
    draw_pictures(attempt, chosen, parent.model, graph, masks)
    attempt.set_stage("publishing")
    result = _result(joining, config, cohort, split) | {"attention": _shares(parent.manifest, attention)}
    known = parent.manifest.statistics
    draft = CandidateDraft(
        parent=parent.offered,
        model=parent.manifest,
        method=METHOD,
        files={WEIGHTS: to_safetensors(parent.network.state_dict()), GRAPH: graph},
        epochs=joining.history[-1].epoch,
        seed=config.seed,
        details=result,
        # The guard must not warn of the hospital's own scans.
        statistics=cohort.statistics if known is None else known.merge(cohort.statistics),
        metrics={"val_dice": joining.best.dice},
        sources=parent.manifest.sources,
    )
    return publish(attempt, store, draft, gate=gate, result=result)


def _load(store: Store, digest: str) -> _Parent:
    """Load the shared part, the bank, and the initial personal part of a hospital."""
    offered = store.by_digest(digest, CrossAttentionManifest)
    model = store.by_digest(offered.manifest.global_model, ModelManifest)
    manifest = model.manifest
    network = build(manifest.network.name, **manifest.network.arguments)
    if not isinstance(network, FedOapUNet):
        raise AdaptationRejected(
            f"'{model}' is a network '{manifest.network.name}', expected fedoap; publish the artefact again"
        )
    network.load_state_dict(from_safetensors(model.read(WEIGHTS)))
    return _Parent(offered, model, manifest, network)


def _join(
    attempt: Attempt, parent: _Parent, cohort: LabelledImages, split: PatientSplit, config: JoiningConfig
) -> Joining:
    attempt.set_stage("joining", epoch=0, epochs=config.epochs)
    with attempt.database.read() as session:
        noted = {event.data["epoch"] for event in records.events_of_type(session, attempt.job.id, "epoch")}
    train, validation = (cohort.examples(names, split) for names in (split.train, split.validation))
    preview = Preview(attempt, validation.images, parent.manifest.task)

    def class_maps(images: Tensor) -> NDArray[np.uint8]:
        maps, _ = predict(parent.network, images, attempt.check_cancelled)
        return maps.numpy()

    def after_epoch(checkpoint: JoiningCheckpoint) -> None:
        attempt.check_cancelled()
        # The file comes before the event, so that an epoch with an event is never repeated.
        attempt.folder.write(attempt.folder.CHECKPOINT, checkpoint.to_bytes())
        for record in checkpoint.history:
            if record.epoch not in noted:
                noted.add(record.epoch)
                attempt.emit("epoch", asdict(record))
        preview.draw(checkpoint.history[-1].epoch, class_maps)
        attempt.set_stage("joining", epoch=checkpoint.history[-1].epoch, epochs=config.epochs, preview=True)

    def go(resume: JoiningCheckpoint | None) -> Joining:
        return join(
            parent.network,
            train,
            validation,
            config,
            resume=resume,
            after_epoch=after_epoch,
            check_cancelled=attempt.check_cancelled,
        )

    try:
        content = attempt.read_checkpoint()
        return go(None if content is None else JoiningCheckpoint.from_bytes(content))
    except CheckpointError as error:
        attempt.warn(f"joining started over: {error}")
        return go(None)


def _say_what_was_lost(
    attempt: Attempt, cohort: LabelledImages, ill: frozenset[str], digests: Mapping[str, str]
) -> None:
    if cohort.left_out:
        attempt.warn(
            f"the cohort has {cohort.left_out} slices more than are taken at once: {len(cohort.images)}, "
            "evenly spaced, are used, those of scans with masks first"
        )
    lost = sorted(name for name, there in cohort.drawn.items() if name in ill and not there)
    if lost:
        rows, columns = cohort.targets.shape[1:]
        attempt.warn(
            f"of the target of {len(lost)} mask{'s' if len(lost) > 1 else ''}, first "
            f"{label_of(digests[lost[0]])}, nothing is left in the slices of {rows}x{columns} pixels that "
            "the network sees: counted as drawn and without a target"
        )


def _say_what_is_little(attempt: Attempt, split: PatientSplit, digests: Mapping[str, str]) -> None:
    if groups := same_bytes(split.patients, digests):
        attempt.warn(
            f"{sum(map(len, groups))} scans with masks are the same bytes as another, first {len(groups[0])} "
            f"times {label_of(digests[groups[0][0]])}: counted as one patient's"
        )
    if split.deciding < _FEW_PATIENTS:
        attempt.warn(
            f"the epoch is chosen, and the gate decides, by {split.deciding} validation patient"
            f"{'s' if split.deciding > 1 else ''} with a target: masks of more patients would say more"
        )


def _shares(manifest: ModelManifest, attention: Tensor) -> dict[str, float] | None:
    """Average over all slices of the cohort, by source."""
    if manifest.sources is None:
        return None
    mean = attention.double().mean(dim=0).tolist()
    return {source: round(share, 6) for source, share in zip(manifest.sources, mean, strict=True)}


def _result(
    joining: Joining, config: JoiningConfig, cohort: LabelledImages, split: PatientSplit
) -> dict[str, Any]:
    return {
        "options": config.facts(),
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
    }
