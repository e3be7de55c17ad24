"""Adaptation by masks (preset `masks`), for every kind with a global model that segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import TaskError
from model_store.manifest import WEIGHTS, ModelManifest
from model_store.preprocessing import check_values
from personalization.options.masks import MasksOptions
from personalization.options.movable import OPAQUE
from service.cohorts import cohorts, masks
from service.cohorts.patients import other_values, patients_with_masks, shows_target
from service.errors import AdaptationRejected, MasksInvalid, MasksMissing
from service.jobs.sections import Row, Section, Table, number, percent
from service.kinds.kind import HospitalAdaptation, Words


def check_masks(session: Session, parent: Artefact, cohort: str) -> None:
    """Reject a cohort that has no masks, or of too few patients, or of another task.

    Raises:
        MasksInvalid, MasksMissing.
    """
    task, drawn = parent.manifest.task, masks.of_cohort(session, cohort)
    for name, mask in drawn.items():
        try:
            check_values(mask.label_values, task)
        except TaskError as error:
            raise MasksInvalid(f"scan '{name}': {error}") from error
    digests = {scan.name: scan.sha256 for scan in cohorts.scans(session, cohort)}
    there = {name: shows_target(mask.label_values, task) for name, mask in drawn.items()}
    try:
        patients_with_masks(there, digests, task)
    except AdaptationRejected as error:
        hint = other_values({name: mask.label_values for name, mask in drawn.items()}, digests, task)
        raise MasksMissing(f"{error}. {hint}" if hint else str(error)) from error


def starts_from_weights(artefact: Artefact, start: str | None) -> bool:
    """Whether it is a whole artefact of the federation, and `start`, its global model, has weights that
    segment by classes. Without a global model it has not."""
    offered = artefact.manifest
    if start is None or offered.task.kind != "segmentation" or offered.task.regions:
        return False
    # A part is adapted as the whole, and what was adapted as what it was adapted from.
    if offered.part_of is not None or offered.adapted_to is not None:
        return False
    if start != artefact.digest:
        return True
    # A model of a graph alone has no weights, an imported one an empty file of them.
    opaque = isinstance(offered, ModelManifest) and offered.network.name == OPAQUE
    return WEIGHTS in offered.files and not opaque


def sections(result: Mapping[str, Any], _: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """The held-out Dice by the share of the fine-tuned weights; nothing of another result."""
    found, chosen = result.get("held_out_dice"), number(result.get("weight"))
    if not isinstance(found, Mapping) or any(number(value) is None for value in found.values()):
        return ()
    titles = {"0.0": "0: the global model", "1.0": "1: fine-tuned alone"}
    rows = tuple(
        Row(
            name=titles.get(share, share),
            cells=(percent(number(dice)),),
            mark="taken" if share == str(chosen) else "",
        )
        for share, dice in found.items()
    )
    text = (
        "Mean Dice of the patients with masks, each held out of the fit that is scored, of networks between "
        "the global model and the fine-tuned one. The candidate has the share that is best here."
    )
    columns = ("share of the fine-tuned weights", "Dice")
    body = Table(columns=columns, figures=1, rows=rows)
    return (Section(title="Held-out masks", sentences=(text,), body=body),)


BY_MASKS = HospitalAdaptation[Any](
    source="one that segments, with a global model, as `python -m training.federate` publishes it: by masks",
    options=MasksOptions,
    work="service.worker.masks:MasksWork",
    fallback_reason="nothing was better than the global model on the held-out masks, so it is kept",
    check=check_masks,
    sections=sections,
    needs_masks=True,
    words=Words(
        truth="its scores were taken against masks that this hospital drew, on few patients, each held out "
        "of the fit that is scored.",
        gate="The checks have seen masks of a few patients: look at the pictures too.",
        epochs="Each number is a fit of the cross-validation, without the patients that it is scored on.",
        before="The global model that it came from first",
        parts={
            "loss": "Mean over the steps of the fit.",
            "parent": "Dice of the global model, on the patients that the fit did not learn from.",
            "fine_tuned": "Dice of the fine-tuned network on the same patients.",
        },
    ),
)
