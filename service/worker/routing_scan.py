"""Run a job of kind `scan` of a routing space: adapt to one scan, segment it, and keep only the answer.

The answer equals that of `/segment`, headers included. The same scan gives the same mask.
"""

from __future__ import annotations

import torch

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.store import Store
from personalization.cancellation import CancelCheck
from personalization.iop_fl.batch_norm import profile
from personalization.options.presets import AUTO, FOR_SCANS, SCAN_FALLBACK
from personalization.test_time.adapt import Adaptation
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import SCAN_STEP, dose_by_shift
from personalization.test_time.recipe import recipe_of
from service.catalog.network import adapted_to_scan
from service.corrections import kept_answers
from service.database.hospitals import site_of_hospital
from service.errors import ScanGone
from service.inference.pipeline import Stopwatch
from service.inference.shift import Reference
from service.jobs.files import StoredResult
from service.observation import Reviews
from service.prediction.answer import LoadedGraph
from service.prediction.options import SegmentOptions
from service.prediction.receipt import ModelReceipt
from service.prediction.segmentation import SegmentationPredictor
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.cohort_images import seen
from service.worker.device import device_of, facts
from service.worker.pictures import load
from service.worker.routing_adapt import LoadedSpace, configured, graph_of, load_space, unsuited


def run_routing_scan(attempt: Attempt, store: Store, parent: Artefact) -> AttemptOutcome:
    """Adapt `parent` and answer. The runner reports any error as the job's reason."""
    scan = attempt.folder.read_input()
    if scan is None:
        raise ScanGone("the scan is not there any more; send it again")
    options: SegmentOptions = attempt.options.model_copy(update={"series": scan.series})
    watch = Stopwatch()
    with watch.stage("load"):
        loaded = load_space(store, parent)
    why = "the models of the space, weighed for this scan alone"
    predictor = SegmentationPredictor(
        request_id=attempt.job.request_id or attempt.job.id,
        options=options,
        selection=adapted_to_scan(
            store,
            loaded.offered,
            loaded.global_model,
            _home(attempt, options.hospital),
            why,
            preset=options.preset or AUTO,
            alarmed=scan.alarmed,
        ),
        input_sha256=scan.received_sha256,
        input_bytes=scan.received_bytes,
        limits=scan_limits(attempt.settings, loaded.task),
        watch=watch,
        reviews=Reviews(attempt.database),
    )
    reading = predictor.read(scan.content)
    with watch.stage("adapt"):
        adaptation, graph = _adapted_graph(attempt, options, loaded, seen(reading.prepared, loaded.task))
    attempt.set_stage("segmenting")
    network = ModelReceipt(name=f"{loaded.offered} adapted to this scan", digest=sha256(graph))
    # Its norms were moved for this scan: only a fingerprint tells how far it is.
    reference = Reference(None, Reference.of(parent, loaded.global_model).fingerprint)
    session = load(graph, attempt.settings, reference)
    answer = predictor.make(reading, LoadedGraph(session, network, parent.name))
    kept_answers.keep(
        attempt.database,
        attempt.settings,
        options.hospital,
        predictor.request_id,
        answer.observed,
        answer.found,
    )
    attempt.check_cancelled()
    attempt.folder.write_result(StoredResult(answer.body, answer.media_type, answer.headers))
    result = {
        "epochs": adaptation.history[-1].epoch,
        "best_epoch": adaptation.best_epoch,
        "computed_on": facts(device_of(attempt.settings)),
    }
    if not adaptation.fell_back:
        return AttemptOutcome("succeeded", adaptation.stopped, result, observed=answer.observed)
    reason = adaptation.stopped or "no epoch was better than step 0 by the loss"
    why = f"{reason}; the mask is that of step 0"
    return AttemptOutcome("fell_back", why, result, observed=answer.observed)


def _home(attempt: Attempt, hospital: str | None) -> str | None:
    """The hospital's site in the federation. Raises HospitalUnknown."""
    if hospital is None:
        return None
    with attempt.database.read() as session:
        return site_of_hospital(session, hospital)


def _adapted_graph(
    attempt: Attempt, options: SegmentOptions, loaded: LoadedSpace, slices: torch.Tensor
) -> tuple[Adaptation, bytes]:
    """Adapt without a checkpoint: it takes seconds, and no data derived from the scan may stay on disk."""
    device = device_of(attempt.settings)
    config = _configured(options, loaded, slices.to(device), attempt.check_cancelled)

    def after_epoch(_: torch.nn.Module, checkpoint: AdaptationCheckpoint) -> None:
        attempt.set_stage("adapting", epoch=checkpoint.epoch, epochs=config.passes)

    attempt.set_stage("adapting", epoch=0, epochs=config.passes)
    adapted = recipe_of(config.preset).adapt(
        loaded.space, slices, config, device, attempt.check_cancelled, after_epoch=after_epoch
    )
    return adapted.adaptation, graph_of(adapted.merged, loaded.task)


def _configured(
    options: SegmentOptions, loaded: LoadedSpace, slices: torch.Tensor, check_cancelled: CancelCheck
) -> AdaptationConfig:
    """The recipe that was asked for. For `auto` the ladder, with the dose that the scan's shift asks for."""
    # Missing options have the defaults of a hospital's adaptation.
    given = options.model_dump(include={"preset", "shape_weight"}, exclude_none=True)
    preset = given.get("preset", AUTO)
    chosen = preset if preset != AUTO else SCAN_FALLBACK if loaded.spread is None else "ladder"
    if not loaded.suits(chosen):
        raise unsuited(preset, loaded, FOR_SCANS)
    if preset != AUTO or loaded.spread is None:
        return configured({**given, "preset": chosen}, loaded.task)
    network = loaded.space.plain().to(slices.device)
    # A scan is one patient.
    few = slices[::SCAN_STEP]
    found = profile(network, few, [0] * len(few), check_cancelled=check_cancelled)
    doses = dose_by_shift(found, loaded.spread).doses
    return AdaptationConfig(**{**given, "preset": "ladder", "doses": doses})
