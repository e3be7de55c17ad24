"""Judge what was learned from scans, or named by a person, beside replicas of it.

An adaptation to the hospital gives the same candidate from any half of its scans and any seed; one to noise
does not. A good candidate is also nearer than its parent to the consensus of the federation's models.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from personalization.gate import (
    ROUTING,
    GateVerdict,
    ObservedRouting,
    consensus,
    judge,
    shift_of_statistics,
)
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, recipe_of
from service.worker.attempt import Attempt
from service.worker.cohort_images import CohortImages
from service.worker.routing_adapt import LoadedSpace, class_maps

# Nothing is learned, so that neither chance nor a few scans decide much.
FORWARD_ONLY = ("ladder", "blend")
# Halves of fewer patients have one patient each, and differ by patient, not by stability.
_FEWEST_PATIENTS = 4


def verdict_on(
    attempt: Attempt,
    loaded: LoadedSpace,
    adapted: Adapted,
    cohort: CohortImages,
    config: AdaptationConfig,
    device: torch.device,
    adapted_in_s: float,
) -> GateVerdict:
    """Observe the candidate, which was adapted in so many seconds, and judge it.

    What learns costs the adaptation once more, and all cost two forward passes of each of the federation's
    models.
    """
    check_cancelled, images = attempt.check_cancelled, cohort.images
    parent = loaded.space.plain()
    replicas = []
    left = replicas_cost(cohort, config)
    for name, seed, chosen in _replicas(cohort, config):
        attempt.set_stage("judging", against=name, seconds_left=round(left * adapted_in_s))
        left -= len(chosen) / len(images)
        replica = recipe_of(config.preset).adapt(
            loaded.space,
            images[torch.from_numpy(chosen)],
            # The next seed may exceed the bound of the field.
            config.model_copy(update={"seed": seed}),
            device,
            check_cancelled,
        )
        replicas.append(class_maps(replica.merged, images, device, check_cancelled))
    attempt.set_stage("judging", against="the federation")
    references = consensus(loaded.space, images, device=device, check_cancelled=check_cancelled)
    observed = ObservedRouting(
        candidate=class_maps(adapted.merged, images, device, check_cancelled),
        parent=class_maps(parent, images, device, check_cancelled),
        replicas=replicas,
        # Slices of one patient are not independent.
        scan_index=cohort.patient_of_image,
        classes=len(loaded.task.classes),
        source_warnings=cohort.kinds.share_warned,
        statistics_distance=shift_of_statistics(
            parent.state_dict(), adapted.merged, images.to(device), check_cancelled
        ),
        references=references,
    )
    return judge(ROUTING, observed)


def replicas_cost(cohort: CohortImages, config: AdaptationConfig) -> float:
    """What the replicas cost, as a multiple of the adaptation."""
    return sum(len(chosen) for _, _, chosen in _replicas(cohort, config)) / len(cohort.images)


def _replicas(cohort: CohortImages, config: AdaptationConfig) -> Iterator[tuple[str, int, np.ndarray]]:
    """Return (description, seed, indices of the images) of each replica; none of what learns nothing.

    Together they cost the adaptation once: halves of the patients, the second from another seed, or another
    seed alone where there are few patients.
    """
    patients = cohort.patient_of_image
    if config.preset in FORWARD_ONLY:
        return
    # Without random draws another seed gives the same candidate.
    other = config.seed + 1 if config.of_preset.draws else config.seed
    if patients.max() + 1 < _FEWEST_PATIENTS:
        if other != config.seed:
            yield "another seed", other, np.arange(len(patients))
        return
    for half, seed in enumerate((config.seed, other)):
        # Every other patient, because uploads are often sorted by date.
        name = f"half {half + 1} of the scans" + (" and another seed" if seed != config.seed else "")
        yield name, seed, np.flatnonzero(patients % 2 == half)
