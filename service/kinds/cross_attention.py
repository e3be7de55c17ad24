"""A cross-attention (FedOAP): a hospital joins with the masks of some of its scans."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.errors import TaskError
from model_store.preprocessing import check_values
from service.cohorts import cohorts, masks
from service.cohorts.patients import other_values, shows_target, split_by_patient
from service.database import Cohort
from service.errors import AdaptationRejected
from service.http.problems import Problem
from service.kinds.kind import AdaptableKind, Words
from service.serving.assignments import site_of


class JoiningOptions(BaseModel):
    """How a hospital joins. Every field has the default that is right for most hospitals."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: Literal["perturbed", "plain"] = Field(
        "perturbed",
        description="`perturbed` boundary loss, as the method's second stage; `plain`, the loss of its "
        "first, as the control.",
    )
    trains: Literal["all", "personal"] = Field(
        "all",
        description="What is fine-tuned: `all` weights, as the method does, or the `personal` ones alone, "
        "which are the query stage, its projection and the adapter.",
    )
    epochs: int = Field(30, ge=1, le=200, description="Passes over the scans with masks.")
    batch_size: int = Field(8, ge=1, le=128, description="Slices per step.")
    learning_rate: FiniteFloat = Field(1e-3, gt=0, le=1, description="Of AdamW, at first.")
    least_rate: FiniteFloat = Field(
        1e-6, ge=0, le=1, validate_default=True, description="Where its cosine ends; at most `learning_rate`."
    )
    weight_decay: FiniteFloat = Field(1e-5, ge=0, le=1)
    augment: bool = Field(True, description="Whether slices are turned and flipped at random.")
    threshold: FiniteFloat = Field(
        0.75, ge=0, le=1, description="Of the perturbed loss: the error above which a pixel is perturbed."
    )
    variance: FiniteFloat = Field(0.1, ge=0, le=10, description="Of the noise on such a pixel's logit.")
    trade_off: FiniteFloat = Field(0.1, ge=0, le=1, description="The perturbed term's share of the loss.")
    validation: FiniteFloat = Field(
        0.2, gt=0, le=0.5, description="Share of the patients with masks who choose the epoch; at least one."
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Everything random derives from it.")

    @field_validator("least_rate")
    @classmethod
    def _falls(cls, value: float, info: ValidationInfo) -> float:
        first = info.data.get("learning_rate", value)
        if value > first:
            raise ValueError(f"expected at most learning_rate, {first}: a rate falls to it")
        return value


def check(session: Session, parent: Artefact, cohort: str) -> None:
    """Refuse a member of the federation, and a cohort whose masks are none, of another task, or of too few.

    Raises:
        Problem: 422 with the reason.
    """
    _check_outside(session, parent, cohort)
    task, drawn = parent.manifest.task, masks.of_cohort(session, cohort)
    for name, mask in drawn.items():
        try:
            check_values(mask.label_values, task)
        except TaskError as error:
            raise _refused("mask-mismatch", f"scan '{name}': {error}") from error
    digests = {scan.name: scan.sha256 for scan in cohorts.scans(session, cohort)}
    there = {name: shows_target(mask.label_values, task) for name, mask in drawn.items()}
    try:
        split_by_patient(there, digests, task, 0.5, 0)
    except AdaptationRejected as error:
        hint = other_values({name: mask.label_values for name, mask in drawn.items()}, task)
        raise _refused("masks-missing", f"{error}. {hint}" if hint else str(error)) from error


def _check_outside(session: Session, parent: Artefact, cohort: str) -> None:
    """A member would attend to its own entry in the bank, and be held against less than its own model."""
    found = session.get(Cohort, cohort)
    assert found is not None
    site = site_of(session, found.hospital)
    if site in parent.manifest.lineage.sites:
        raise Problem(
            422,
            "member-cannot-join",
            "The hospital is a member already",
            f"Hospital '{found.hospital}' is site '{site}' of the federation that trained '{parent}', with a "
            "model of it if it agreed to the export (personalization=member): joining is for hospitals "
            "from outside.",
        )


def _refused(slug: str, detail: str) -> Problem:
    return Problem(422, slug, "The hospital cannot join with these masks", detail)


CROSS_ATTENTION = AdaptableKind(
    name="cross-attention",
    what="one model for tumours of any organ, as `python -m training.federate --method fedoap` publishes it",
    options=JoiningOptions,
    by_scan=False,
    check=check,
    words=Words(
        truth="its scores were taken against masks that this hospital drew, on few patients, who also chose "
        "the epoch: they flatter.",
        gate="It has seen masks of a few patients: look at the pictures too.",
        epochs="Epoch 0 is step 0: zero-shot, before anything was learned. The epoch with the highest Dice "
        "on the validation patients is kept.",
        before="Zero-shot, the shared model that it came from, first",
        parts={
            "loss": "Mean over the training batches.",
            "dice": "With the hospital's masks: mean over the validation patients with a tumour.",
            "false_positives": "Share of the validation slices without a tumour in which one is found, "
            "specks left out.",
        },
    ),
)
