"""A site that takes no part: what answers its scans, and what `auto` serves it, as a job of the service does.

`auto` of a network with instance norm that tracks is `blend` with its defaults, served where the gate accepts
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.accuracy.volumes.scoring import CPU, Change, Scores, scores_of, seen
from model_store.guard import ReferenceStatistics, check, summarise
from model_store.preprocessing import prepare_volume
from model_store.preprocessing.windows import cut, tiles
from model_store.task import Task
from personalization.gate import ROUTING, ObservedRouting, consensus, judge, shift_of_statistics
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import recipe_of
from training.data.cases import Case, Site
from training.run import Result

# Shares of the federation's statistics beside the default's.
SHARES = {"blend, tenth": 0.1, "blend, quarter": 0.25}
# What `auto` is where instance norms track.
_FALLBACK = AdaptationConfig(preset="blend")
_BATCH = 16


@dataclass(frozen=True)
class Cohort:
    """A hospital's volumes as a job sees them: patches [N, C, X, Y, Z] side by side, the patient of each, and
    the share of scans that the guard warns of."""

    images: Tensor
    patients: NDArray[np.int64]
    warned: float

    @classmethod
    def of(
        cls, cases: Sequence[Case], task: Task, change: Change | None, known: ReferenceStatistics | None
    ) -> Cohort:
        """Prepare every scan, as it is or through a scanner."""
        patches, warned = [], []
        for case in cases:
            scan = seen(case, task, change)
            prepared = prepare_volume(scan, task)
            corners = tiles(prepared.volume.shape[1:], task.input_shape)
            patches.append(np.stack([cut(prepared.volume, each, task.input_shape) for each in corners]))
            warned.append(bool(check(summarise(scan, prepared), known, task)))
        patients = np.repeat(np.arange(len(patches)), [len(each) for each in patches])
        return cls(torch.from_numpy(np.concatenate(patches)), patients, float(np.mean(warned)))


def of_outside(done: Result, site: Site[Case], scanner: Change | None) -> tuple[dict[str, Scores], Any]:
    """Scores of the global model, of two shares of `blend`, and of `auto`: of scans as they are, and through
    a scanner.

    Second, which checks of the gate the candidate of `auto` failed; the global model is then served.
    """
    drafts, task = done.publication.models, done.run.federation.task
    states = {draft.site or GLOBAL: draft.weights for draft in drafts}
    spec, shared = drafts[0].network, states.pop(GLOBAL)
    space = RoutingSpace.of(spec.name, spec.arguments, states, shared)
    cases = {f"{site.name}/{case.patient}": case for case in site.cases}
    models: dict[str, Scores] = {}
    failed: dict[str, list[str]] = {}
    for change, through in ((None, ""), (scanner, ", scanner")):
        cohort = Cohort.of(site.cases, task, change, done.publication.statistics)

        def adapted(config: AdaptationConfig, images: Tensor = cohort.images) -> nn.Module:
            return recipe_of(config.preset).adapt(space, images, config, CPU).merged

        models[f"global{through}"] = scores_of(space.plain().eval(), cases, task, change)
        for name, share in SHARES.items():
            config = AdaptationConfig(preset="blend", doses=(share, share, share))
            models[f"{name}{through}"] = scores_of(adapted(config), cases, task, change)
        candidate = adapted(_FALLBACK)
        refused = failed_checks(space, candidate, cohort, len(task.classes))
        failed[f"auto{through}"] = refused
        served = models[f"global{through}"] if refused else scores_of(candidate, cases, task, change)
        models[f"auto{through}"] = served
    return models, failed


def failed_checks(space: RoutingSpace, candidate: nn.Module, cohort: Cohort, classes: int) -> list[str]:
    """The checks of the gate that a candidate fails, as a job by a named preset is judged.

    There are no replicas, since nothing is learned.
    """
    parent, images = space.plain().eval(), cohort.images
    observed = ObservedRouting(
        candidate=_maps(candidate, images),
        parent=_maps(parent, images),
        replicas=[],
        scan_index=cohort.patients,
        classes=classes,
        source_warnings=cohort.warned,
        statistics_distance=shift_of_statistics(parent.state_dict(), candidate, images),
        references=consensus(space, images),
    )
    return [result.name for result in judge(ROUTING, observed).checks if not result.passed]


@torch.no_grad()
def _maps(network: nn.Module, images: Tensor) -> NDArray[np.uint8]:
    """Class indices [N, X, Y, Z] of patches."""
    found = [network(batch).argmax(dim=1).to(torch.uint8).numpy() for batch in torch.split(images, _BATCH)]
    return np.concatenate(found)
