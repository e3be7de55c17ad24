"""The types of a kind's declaration: what one kind of artefact can do in the service.

Every kind in `model_store.manifest.KINDS` has a module in this package, which declares it as `KIND`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy.orm import Session

from model_store.artefact import Artefact
from model_store.manifest import BaseManifest
from personalization.options.presets import FOR_SCANS
from service.jobs.sections import Section

Manifest = TypeVar("Manifest", bound=BaseManifest)

CohortCheck = Callable[[Session, Artefact, str], None]
# From a job's result and the data of its `epoch` events, oldest first.
CardSections = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], tuple[Section, ...]]


@dataclass(frozen=True)
class Parts:
    """The networks that an artefact offers, by digest; `assignment` says in which cluster a site is.

    `gains` has, by member, how much more Dice than the global model its own has on its validation patients;
    None of a kind that does not compare them.
    """

    global_model: str | None
    members: Mapping[str, str] = field(default_factory=dict)
    clusters: Mapping[str, str] = field(default_factory=dict)
    assignment: Mapping[str, str] = field(default_factory=dict)
    gains: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Words:
    """What the card of a job says where kinds differ.

    `truth` ends the sentence that begins "Nothing on this page is a diagnosis, and"; `epochs` stands above
    the curves, `gate` behind "The candidate may be assigned.", `before` says what the pictures' left is.
    `parts` are the terms of an epoch that are drawn beside the loss, each with its caption.
    """

    truth: str
    gate: str
    epochs: str
    before: str
    parts: Mapping[str, str]


@dataclass(frozen=True)
class ScanAdaptation(Generic[Manifest]):
    """Adapting to one scan by a job (personalization=scan).

    Attributes:
        network: the digest of the model with the task and the statistics that a scan is checked against
            before a job is made.
        run: `module:function` of the worker, called with the attempt, the store and the parent; it returns
            an `AttemptOutcome`.
        graphs: the files of the artefact that answer a scan at once, without a job, by preset. An artefact
            need not have them.
        presets: what a request may name, beside `auto`.
    """

    network: Callable[[Artefact[Manifest]], str]
    run: str
    graphs: Mapping[str, str] = field(default_factory=dict)
    presets: Sequence[str] = FOR_SCANS


@dataclass(frozen=True)
class HospitalAdaptation(Generic[Manifest]):
    """Adapting to a hospital by a job of kind `adaptation`.

    Functions of the worker are named, not imported: the worker imports torch and the API does not.

    Attributes:
        source: what such an artefact is and which command publishes it, for a client who named another kind.
        options: what a request may ask for; a job keeps it as JSON.
        words: for the card.
        work: `module:class` of the worker, a `service.worker.cohort_job.CohortWork`.
        fallback_reason: reported where the best epoch is step 0.
        check: rejects a cohort before a job is made of it; called with the session, the parent and the
            cohort's id, it raises a ServiceError.
        sections: of the card, beyond those that every kind has.
        scan: how it is adapted to one scan; None where it cannot be.
        needs_masks: whether it learns from masks of some scans.
        suits: whether it adapts this artefact of its kind.
        presets: what a request may name, beside `auto` and `masks`, as far as its network has what they move;
            empty where no preset is chosen.
    """

    source: str
    options: type[BaseModel]
    words: Words
    work: str
    fallback_reason: str = ""
    check: CohortCheck = lambda _session, _parent, _cohort: None
    sections: CardSections = lambda _result, _epochs: ()
    scan: ScanAdaptation[Manifest] | None = None
    needs_masks: bool = False
    suits: Callable[[Artefact[Manifest]], bool] = lambda _: True
    presets: Sequence[str] = ()


@dataclass(frozen=True)
class ArtefactKind(Generic[Manifest]):
    """One kind of artefact.

    Attributes:
        manifest: the type of its manifests.
        noun: how a sentence names one of this kind, with its article.
        description: ends "`name` is …" in the API's description.
        summary: what it means for a hospital, in words for the page.
        parts: the networks that an artefact offers.
        warnings: by personalization, the cautions about the network so chosen: a sentence each, by a short
            name in ASCII.
        adapts_itself_by: through what the served graph adapts to every scan as it runs, without a job; None
            for a kind that does not. Such an artefact is itself the network that answers.
        adaptation: how it is adapted to a hospital; None where it cannot be, or by masks alone.
        masks: how it is adapted by masks, where it has a global model that segments; None where it cannot be.
    """

    manifest: type[Manifest]
    noun: str
    description: str
    summary: str
    parts: Callable[[Artefact[Manifest]], Parts]
    warnings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    adapts_itself_by: str | None = None
    adaptation: HospitalAdaptation[Manifest] | None = None
    masks: HospitalAdaptation[Any] | None = None

    @property
    def name(self) -> str:
        """The wire value: `kind` of its manifests."""
        name: str = self.manifest.model_fields["kind"].default
        return name
