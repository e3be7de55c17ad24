"""A cross-attention (FedOAP): a hospital joins with the masks of some of its scans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import CrossAttentionManifest
from personalization.options.joining import JoiningOptions
from service.database import Cohort
from service.database.hospitals import site_of_hospital
from service.errors import MemberCannotJoin
from service.jobs.sections import Bar, Bars, Section, number
from service.kinds.kind import ArtefactKind, HospitalAdaptation, Parts, Words
from service.kinds.masks import check_masks

_ZERO_SHOT = (
    "zero-shot: Do not rely on this mask. No part of the model has learned from this hospital; the shared "
    "part that answers is where joining starts from (the method's authors report a Dice of 0.07, Locum's own "
    "benchmark 0.05 and 0.01). A hospital joins with masks of some of its scans: draw them on the page, "
    "under Draw, or send them with `locum adapt --masks`."
)
_SENTENCES = (
    "Share of the attention on the scan itself (own) and on the tokens of each of the federation's sites: "
    "mean over all images, heads and positions of the candidate.",
    "Nearly all on the scan itself means that what the members shared is ignored.",
)


def check(session: Session, parent: Artefact, cohort: str) -> None:
    """Reject a member of the federation, and a cohort that has no masks, or too few, or of another task.

    Raises:
        MemberCannotJoin, MasksInvalid, MasksMissing.
    """
    _check_outside(session, parent, cohort)
    check_masks(session, parent, cohort)


def _check_outside(session: Session, parent: Artefact, cohort: str) -> None:
    """A member would attend to its own entry in the bank, and be held against less than its own model."""
    found = session.get(Cohort, cohort)
    assert found is not None
    site = site_of_hospital(session, found.hospital)
    if site in parent.manifest.lineage.sites:
        raise MemberCannotJoin(
            f"Hospital '{found.hospital}' is site '{site}' of the federation that trained '{parent}', with a "
            "model of it if it agreed to the export (personalization=member): joining is for hospitals "
            "from outside.",
        )


def sections(result: Mapping[str, Any], _: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """The candidate's attention by source; nothing unless the result has shares of 1."""
    found = result.get("attention")
    if not found or not isinstance(found, Mapping):
        return ()
    shares = {str(source): number(share) for source, share in found.items()}
    known = {source: share for source, share in shares.items() if share is not None and 0 <= share <= 1}
    if len(known) < len(shares):
        return ()
    bars = tuple(Bar(name=source, share=share, own=source == "own") for source, share in known.items())
    return (Section(title="Attention by source", sentences=_SENTENCES, body=Bars(rows=bars)),)


KIND = ArtefactKind(
    manifest=CrossAttentionManifest,
    noun="a cross-attention",
    description="a global one with one per site",
    summary="joins a hospital with a few masks",
    parts=lambda artefact: Parts(artefact.manifest.global_model, artefact.manifest.inside),
    warnings={"global": {"zero-shot": _ZERO_SHOT}},
    adaptation=HospitalAdaptation(
        source="one model for tumours of any organ, as `python -m training.federate --method fedoap` "
        "publishes it",
        options=JoiningOptions,
        work="service.worker.cross_attention:JoiningWork",
        fallback_reason="no epoch had a higher validation Dice than zero-shot, which was kept",
        check=check,
        sections=sections,
        needs_masks=True,
        words=Words(
            truth="its scores were taken against masks that this hospital drew, on few patients, who also "
            "chose the epoch: they flatter.",
            gate="The checks have seen masks of a few patients: look at the pictures too.",
            epochs="Epoch 0 is step 0: zero-shot, before anything was learned. The epoch with the highest "
            "Dice on the validation patients is kept.",
            before="Zero-shot, the shared model that it came from, first",
            parts={
                "loss": "Mean over the training batches.",
                "dice": "With the hospital's masks: mean over the validation patients with a tumour.",
                "false_positives": "Share of the validation slices without a tumour in which one is found, "
                "specks left out.",
            },
        ),
    ),
)
