"""Jobs that learn from masks: how a cohort with masks is read, and what it is warned of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Generic

from torch import nn
from typing_extensions import override

from model_store.manifest import ModelManifest
from model_store.task import Task
from personalization.labelled_slices import Score
from service.cohorts.files import label_of
from service.cohorts.patients import same_bytes
from service.errors import AdaptationRejected
from service.settings import cohort_limits
from service.worker.answered_scans import AnsweredScans
from service.worker.cohort_images import LabelledImages, load_labelled, masks_of
from service.worker.cohort_job import CohortWork, Made
from service.worker.swapped import swapped

# Of masks that changed places, so many are named.
_NAMED = 4


class MaskedCohortWork(CohortWork[LabelledImages, Made], Generic[Made]):
    """A job on scans of which some have masks: `masks` by scan name, `ill` of which show a target."""

    KEPT_FIRST = ", those of scans with masks first"

    task: Task
    manifest: ModelManifest

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each scan, by name."""
        return {file.name: file.sha256 for file in self.files}

    @override
    def read(self) -> LabelledImages:
        """Read every scan, and the masks that there are."""
        attempt = self.attempt
        self.masks, self.ill = masks_of(attempt, self.task)
        return load_labelled(
            self.files,
            self.masks,
            self.task,
            self.manifest.statistics,
            cohort_limits(attempt.settings, self.task),
            attempt.check_cancelled,
            include=self.includes_unlike,
        )

    @cached_property
    def answered(self) -> AnsweredScans:
        """The scans, as the service answers them."""
        return AnsweredScans(self.attempt, self.task, self.files, self.masks)

    def scored(self, patients: Mapping[str, str]) -> Score:
        """The score of a network by the patients of scans with masks."""
        return partial(self.answered.dice, patients)

    def warn_of_lost_targets(self, cohort: LabelledImages) -> None:
        """Warn of targets of which nothing is left at the network's resolution."""
        lost = sorted(name for name, there in cohort.drawn.items() if name in self.ill and not there)
        if lost:
            sides = "x".join(map(str, cohort.targets.shape[1:]))
            what = "voxels" if self.task.is_volume else "pixels"
            self.attempt.warn(
                f"of the target of {len(lost)} mask{'s' if len(lost) > 1 else ''}, first "
                f"{label_of(self.digests[lost[0]])}, nothing is left in the {sides} {what} "
                "that the network sees at once: counted as drawn and without a target"
            )

    def check_swapped(self, network: nn.Module, cohort: LabelledImages) -> None:
        """Reject masks that belong to other scans, by what the network finds; with `unlike=include`, warn.

        Raises AdaptationRejected, and as `AnsweredScans.dice`.
        """
        changed = swapped(self.answered.drawn(network, {*cohort.names}), len(self.task.classes))
        if not changed:
            return
        labels = {name: label_of(digest) for name, digest in self.digests.items()}
        shown = "; ".join(
            f"that beside {labels[each.mask_of]} fits {labels[each.scan]}, with Dice {each.fits:.2f} where "
            f"its own has {each.own:.2f}"
            for each in changed[:_NAMED]
        )
        found = f"the masks of {len(changed)} scans seem to belong to other scans ({shown})"
        if not self.includes_unlike:
            raise AdaptationRejected(
                f"{found}: upload each mask beside its own scan, or ask with option unlike=include if they "
                "are right"
            )
        self.attempt.warn(f"{found}; they are used, by option unlike=include")

    def warn_of_same_bytes(self, names: Iterable[str]) -> None:
        """Warn of scans with masks that are the same bytes."""
        if groups := same_bytes(names, self.digests):
            self.attempt.warn(
                f"{sum(map(len, groups))} scans with masks are the same bytes as another, first "
                f"{len(groups[0])} times {label_of(self.digests[groups[0][0]])}: counted as one patient's"
            )
