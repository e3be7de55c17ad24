"""What the card of each kind of job says: the words and sections that its declaration names.

What is in the JSON columns was written by a worker, perhaps one of another version: what is not there, or is
not what it should be, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from model_store.artefact import Artefact
from service.adaptation.card.acceptance import acceptance_sections
from service.database import Job
from service.database.job_states import TERMINAL
from service.job_kinds import KINDS
from service.jobs import gates, unlike
from service.jobs.sections import CheckRow, Checks, Curve, Curves, Outcome, Section, number, unit_of
from service.kinds import Words, adaptation_by_masks, adaptation_of

_BOUNDS = {"at least": "≥", "above": ">", "at most": "≤"}
_CAPTIONS: Final = {
    "loss": "What the epochs are chosen by: over all images, after the epoch, with one fixed noise draw.",
    "foreground": "Share of the pixels that are not background.",
    "agreement": "Dice with the masks of step 0.",
}
_NOTHING = "Nothing has to be done: the global model goes on to answer."
_MASKS = "To get a better version, draw masks on five of these scans, and adapt by masks."
_MORE_MASKS = "To get a better version, draw masks on more scans, and adapt again."
_OVERRIDE = "It can only be made to answer by an override, which is recorded with its author and reason."


# Without the parent nothing is known of its kind.
_UNKNOWN = Words(
    truth="what this job adapted is no longer in the store, so the meaning of its scores is unknown.",
    gate="Look at the pictures too.",
    epochs="Epoch 0 is step 0, before anything was learned.",
    before="The model that it came from first",
    parts={},
)
_OTHERS = replace(_UNKNOWN, truth="no person has looked at what this job made.", before="")


@dataclass(frozen=True)
class Evidence:
    """What is known of a job: its record, its gate's verdict, and its parent.

    `epochs` are the data of its events, oldest first. `parent` is None where it cannot be read. `result`
    has the details of the candidate's lineage, too.
    """

    job: Job
    verdict: Mapping[str, Any] | None
    epochs: Sequence[Mapping[str, Any]]
    parent: Artefact | None
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """What the card of a job's kind says."""

    words: Words
    sections: tuple[Section, ...] = ()


def of_adaptation(found: Evidence) -> Said:
    """The gate's verdict, the epochs, and what the parent's kind of artefact adds."""
    adaptation = None if found.parent is None else adaptation_of(found.parent, found.job.options)
    words = _UNKNOWN if adaptation is None else adaptation.words
    best = found.result.get("best_epoch")
    sections = (
        gate_section(found.job, found.verdict, words, _next(found)),
        *unlike.section(found.job.result or {}),
        *epochs_section(found.epochs, best if isinstance(best, int) else None, words),
        *(() if adaptation is None else adaptation.sections(found.result, found.epochs)),
    )
    return Said(words, sections)


def of_quantisation(found: Evidence) -> Said:
    """The verdict on the graph."""
    return Said(_OTHERS, (graph_section(found.verdict, found.job.result or {}),))


def of_acceptance(found: Evidence) -> Said:
    """The verdict by the thresholds, and the figures of every label."""
    report = (found.job.result or {}).get("report")
    return Said(_OTHERS, acceptance_sections(report if isinstance(report, dict) else None))


def of_other(_: Evidence) -> Said:
    """Nothing beyond what the card of every job has."""
    return Said(_OTHERS)


def _next(found: Evidence) -> tuple[str, ...]:
    """What a person can do where the candidate did not pass."""
    parent = found.parent
    if parent is None or parent.manifest.task.kind != "segmentation":
        return (_NOTHING,)
    learns = adaptation_of(parent, found.job.options)
    if learns is not None and learns.needs_masks:
        return (_NOTHING, _MORE_MASKS)
    return (_NOTHING,) if adaptation_by_masks(parent) is None else (_NOTHING, _MASKS)


def gate_section(
    job: Job, verdict: Mapping[str, Any] | None, words: Words, otherwise: tuple[str, ...] = ()
) -> Section:
    """The verdict in sentences, what speaks against the candidate, and every check; or why there is none."""
    if not verdict or not isinstance(verdict.get("passed"), bool):
        return Section(title="Checks of the new version", sentences=(_unjudged(job),))
    rows = [check for check in verdict.get("checks", ()) if isinstance(check, dict)]
    summary = verdict.get("summary")
    said = tuple(map(str, summary)) if isinstance(summary, list) else ()
    passed = verdict["passed"]
    return Section(
        title="The new version passed its checks" if passed else "The new version did not pass its checks",
        tone="good" if passed else "bad",
        sentences=(
            *((f"It may answer once a person assigns it. {words.gate}",) if passed else otherwise),
            *said,
            *_by_masks(verdict),
            *(() if passed else (_OVERRIDE,)),
        ),
        reasons=tuple(_failure(check) for check in rows if check.get("passed") is False),
        body=Checks(rows=tuple(map(_check, rows))),
    )


def graph_section(verdict: Mapping[str, Any] | None, result: Mapping[str, Any]) -> Section:
    """The verdict on a graph in another precision; or that there is none yet."""
    if not verdict or not isinstance(verdict.get("passed"), bool):
        return Section(title="The gate", sentences=("It judges once the graph is made.",))
    precision, passed = verdict.get("precision", "another precision"), verdict["passed"]
    rows = [check for check in verdict.get("checks", ()) if isinstance(check, dict)]
    said = tuple(map(str, verdict.get("summary") or ()))
    to_do = (
        f"It is {result.get('version', 'published')}, and serves once a version is assigned with "
        f"precision={precision}."
        if passed
        else "It is not published. The float32 graph stays."
    )
    title = f"The graph in {precision} passed its gate"
    return Section(
        title=title if passed else f"The gate rejects the graph in {precision}",
        tone="good" if passed else "bad",
        sentences=(to_do, *said),
        reasons=tuple(_failure(check) for check in rows if check.get("passed") is False),
        body=Checks(rows=tuple(map(_check, rows))),
    )


def _by_masks(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """What masks that a person drew said of the candidate later."""
    found = verdict.get("masks")
    try:
        return () if not isinstance(found, Mapping) else (gates.words(found),)
    except (KeyError, TypeError, ValueError):
        return ()


def _unjudged(job: Job) -> str:
    if KINDS[job.kind].unjudged:
        return KINDS[job.kind].unjudged
    if job.state not in TERMINAL:
        return "It is checked once the adaptation is finished."
    if job.candidate_name is not None:
        return f"No verdict is recorded. {_OVERRIDE}"
    return "There is no candidate."


def _check(found: Mapping[str, Any]) -> CheckRow:
    value, limit = number(found.get("value")), number(found.get("limit"))
    bound = _BOUNDS.get(str(found.get("bound")), "")
    shown = unit_of(_meaning(found))
    return CheckRow(
        name=_name(found),
        meaning=_meaning(found),
        found=shown(value),
        limit=shown(None) if limit is None else f"{bound} {shown(limit)}".strip(),
        outcome=_outcome(value, found.get("passed")),
    )


def _outcome(value: float | None, passed: Any) -> Outcome:
    # A value that is no number has failed. What was not measured counts for nothing.
    if passed is False:
        return "failed"
    return "passed" if passed is True and value is not None else "not measured"


def _failure(found: Mapping[str, Any]) -> str:
    # A verdict of an older worker has no such sentence.
    return str(found.get("failure") or f"Not passed: {_name(found)} ({_meaning(found)}).")


def _name(found: Mapping[str, Any]) -> str:
    return str(found.get("name", "")).replace("_", " ")


def _meaning(found: Mapping[str, Any]) -> str:
    return str(found.get("meaning", ""))


def epochs_section(
    epochs: Sequence[Mapping[str, Any]], best: int | None, words: Words
) -> tuple[Section, ...]:
    """The curves of the epochs' figures, and why some are not safe; none before there is an epoch.

    `epochs` are the data of the events, oldest first. Epoch 0 is step 0, before anything was learned. The
    terms that the kind names are drawn beside the loss, unweighted.
    """
    # An attempt that continues from a checkpoint may report an epoch again: the last report counts.
    by_number = {each["epoch"]: each for each in epochs if isinstance(each.get("epoch"), int)}
    found = [by_number[epoch] for epoch in sorted(by_number)]
    values = {name: tuple(number(each.get(name)) for each in found) for name in _names(words)}
    captions = {**_CAPTIONS, **words.parts}
    curves = tuple(
        Curve(title=name.replace("_", " ").capitalize(), caption=captions[name], values=figures)
        for name, figures in values.items()
        if any(value is not None for value in figures)
    )
    if not curves:
        return ()
    unsafe = [each for each in found if each.get("safe") is False]
    section = Section(
        title="Epoch by epoch",
        sentences=(words.epochs,) if words.epochs else (),
        reasons=tuple(f"Epoch {each['epoch']} is not safe{_because(each)}" for each in unsafe),
        body=Curves(
            epochs=tuple(each["epoch"] for each in found),
            curves=curves,
            chosen=best,
            unsafe=tuple(each["epoch"] for each in unsafe),
        ),
    )
    return (section,)


def _names(words: Words) -> Iterable[str]:
    return dict.fromkeys(("loss", *words.parts, "foreground", "agreement"))


def _because(epoch: Mapping[str, Any]) -> str:
    return f": {epoch['reason']}" if epoch.get("reason") else "."
