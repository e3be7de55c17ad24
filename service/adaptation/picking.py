"""Picking a cluster: a cohort of a hospital's unlabeled scans in, one cluster's model out, as its candidate.

preparing   scans and models are read and checked
comparing   every cluster's model is asked about every image
judging     the pick again from draws of the scans, for the gate
drawing     what all clusters say, and what the picked one says, for a person
publishing  once, by whoever holds the lease at that moment

Nothing is learned: the candidate is the cluster's model as it is, with this hospital's name on it. Asking
takes seconds, so that an attempt after a lost one begins anew, and comes to the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.manifest import GRAPH, WEIGHTS
from model_store.store import Store
from personalization.gate import Verdict
from personalization.one_shot.picking import (
    CRITERIA,
    Criterion,
    Observed,
    cheapest,
    costs,
    observe,
    stability,
)
from personalization.one_shot.picking_gate import PickEvidence, judge_pick
from service.adaptation.attempt import Attempt, as_json
from service.adaptation.candidate import Draft, publish
from service.adaptation.clusters import LoadedClusters, load_clusters
from service.adaptation.cohort import CohortImages, cohort_files, load_images
from service.adaptation.device import device_of
from service.adaptation.outcome import Published
from service.adaptation.pictures import draw_answers
from service.errors import AdaptationRefused
from service.jobs.cohort_files import ScanFile
from service.kinds.clusters import PickingOptions
from service.scan_limits import scan_limits

METHOD = "fedbicross-picking"
# Draws from fewer patients would be the same few over again.
_FEWEST_PATIENTS = 4


def run_picking(attempt: Attempt) -> Published:
    """Compare, judge, publish. Raises what its parts raise; the runner turns that into words."""
    store, job = Store(attempt.settings.store), attempt.job
    loaded = load_clusters(store, job.parent)
    options = PickingOptions.model_validate(job.options)
    files = cohort_files(attempt)
    known = next(loaded.model_manifest(name).statistics for name in loaded.models)
    cohort = load_images(files, loaded.task, known, scan_limits(attempt.settings), attempt.tick)
    if cohort.left_out:
        attempt.warn(
            f"the cohort has {cohort.left_out} slices more than are looked at: {len(cohort.images)}, evenly "
            "spaced, are"
        )
    observed = _observe(attempt, loaded, cohort, options.seed)
    found = {criterion: costs(criterion, observed) for criterion in CRITERIA}
    try:
        chosen = cheapest(found[options.criterion])
    except ValueError as error:
        raise AdaptationRefused(f"nothing can be picked: {error}") from error
    attempt.enter("judging", cluster=chosen)
    gate = as_json(_verdict(observed, chosen, cohort, options).to_json())
    attempt.note("gate", gate)
    attempt.enter("drawing")
    _draw(attempt, loaded, files, observed, chosen, cohort.scan_of_image)
    attempt.enter("publishing")
    result = _result(loaded, options, chosen, found, cohort, files)
    model = loaded.models[chosen]
    draft = Draft(
        parent=loaded.offered,
        model=loaded.model_manifest(chosen),
        method=METHOD,
        files={WEIGHTS: model.read(WEIGHTS), GRAPH: model.read(GRAPH)},
        epochs=0,
        seed=options.seed,
        details=result,
        statistics=None if known is None else known.merge(cohort.statistics),
    )
    return publish(attempt, store, draft, gate=gate, result=result)


def _observe(
    attempt: Attempt, loaded: LoadedClusters, cohort: CohortImages, seed: int
) -> dict[str, Observed]:
    device = device_of(attempt.settings)
    observed = {}
    for name, network in loaded.networks.items():
        attempt.enter("comparing", cluster=name)
        observed[name] = observe(network.to(device), cohort.images, seed, attempt.tick)
    return observed


def _verdict(
    observed: Mapping[str, Observed],
    chosen: str,
    cohort: CohortImages,
    options: PickingOptions,
) -> Verdict:
    patients = torch.from_numpy(cohort.patient_of_image)
    draw = torch.Generator().manual_seed(options.seed)
    criterion: Criterion = options.criterion
    enough = int(patients.max()) + 1 >= _FEWEST_PATIENTS
    return judge_pick(
        PickEvidence(
            stability=stability(criterion, observed, patients, draw) if enough else None,
            information=-costs("information", observed)[chosen],
            statistics_distance=costs("statistics", observed)[chosen],
            source_warnings=cohort.warned,
        )
    )


def _draw(
    attempt: Attempt,
    loaded: LoadedClusters,
    files: Sequence[ScanFile],
    observed: Mapping[str, Observed],
    chosen: str,
    scan_of_image: NDArray[np.int64],
) -> None:
    mean = torch.stack([own.answers for own in observed.values()]).mean(dim=0)
    scans = range(len(files))
    told = {
        "before": [mean[scan_of_image == scan].mean(dim=0).numpy() for scan in scans],
        "after": [observed[chosen].answers[scan_of_image == scan].mean(dim=0).numpy() for scan in scans],
    }
    draw_answers(attempt, files, loaded.task, told)


def _result(
    loaded: LoadedClusters,
    options: PickingOptions,
    chosen: str,
    found: Mapping[Criterion, Mapping[str, float]],
    cohort: CohortImages,
    files: Sequence[ScanFile],
) -> dict[str, Any]:
    result: dict[str, Any] = as_json(
        {
            "options": options.model_dump(),
            "scans": len(files),
            "images": len(cohort.images),
            "cluster": chosen,
            "sites": {name: loaded.sites(name) for name in loaded.models},
            "costs": {
                criterion: {name: round(cost, 6) for name, cost in each.items()}
                for criterion, each in found.items()
            },
        }
    )
    return result
