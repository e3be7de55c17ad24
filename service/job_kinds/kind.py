"""The type of a job kind's declaration, and the stages that several kinds pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

COMMON: Final = {"waiting": "waiting", "preparing": "reading the scans"}
ON_A_PACS: Final = {**COMMON, "waiting": "waiting for the PACS", "fetching": "fetching from the PACS"}


@dataclass(frozen=True)
class JobKind:
    """One kind of job.

    What it needs of other rooms is named as `module:name`, and resolved by the room that uses it: the API
    imports no torch, and this room none above it.

    Attributes:
        name: the wire value: `kind` of a job.
        run: function of the worker, called with the `Attempt`; returns an `AttemptOutcome`.
        stages: what the worker reports of its progress, each in the words that a person reads.
        options: pydantic model of the options, which a job keeps as JSON; None where they are those of the
            parent's kind of artefact.
        card: function of `service.adaptation.card.sections`, called with the `Evidence` of a job; returns
            what its card says.
        unjudged: a sentence of the card: why no gate judges what it makes. Empty where one does.
        answers: whether it ends with a file, `/jobs/{id}/result`. That of a cancelled job expires at once.
        way: how its answer leaves, in its observation.
        of_its_maker: whether the caller that made it may cancel it and delete its files, without the role
            operator.
        adds_scans: whether it adds scans to its cohort. Any other kind needs those that are there until it
            ends, so none of them can be deleted meanwhile.
        of_candidate: whether it is about the candidate of another job, which `options.job` names.
        draws: whether its result has `draws`: scans of which masks decide on that candidate.
        accepts: whether its result is the report of an acceptance, on which a person decides.
    """

    name: str
    run: str
    stages: Mapping[str, str]
    options: str | None
    card: str = "service.adaptation.card.sections:of_other"
    unjudged: str = ""
    answers: bool = False
    way: Literal["job", "pacs"] = "job"
    of_its_maker: bool = False
    adds_scans: bool = False
    of_candidate: bool = False
    draws: bool = False
    accepts: bool = False
