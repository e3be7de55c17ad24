"""What differs between the kinds of artefact that can be fitted to a hospital."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from sqlalchemy.orm import Session

from model_store.artefact import Artefact

CohortCheck = Callable[[Session, Artefact, str], None]


def no_check(_session: Session, _parent: Artefact, _cohort: str) -> None:
    """For a kind that takes every cohort with a scan in it."""


@dataclass(frozen=True)
class Words:
    """What the card of such a job says where kinds differ.

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
class AdaptableKind:
    """One kind of parent of a job of kind `adaptation`.

    Attributes:
        name: of the manifest's kind.
        what: it is and where it comes from, for whoever named something else.
        options: what a request may ask for; a job keeps it as JSON.
        by_scan: whether it can be adapted to one scan alone (personalization=scan).
        words: for the card.
        check: rejects a cohort before a job is made of it; called with the session, the parent and the
            cohort's id, it raises a ServiceError.
    """

    name: str
    what: str
    options: type[BaseModel]
    by_scan: bool
    words: Words
    check: CohortCheck = no_check
