"""Adaptation by a lens before the network: preset `auto` of an artefact with a fingerprint.

It needs no weights and no norm, so every kind with a global model that segments by classes has it. A
classifier has it where its members practised: its gate would refuse it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.lens import CENTRES, FINGERPRINT, LEVELS, Kind, fingerprint_of
from personalization.options.presets import PLAYBOOK
from service.jobs.sections import Line, Lines, Row, Section, Table, figure, number
from service.kinds.kind import HospitalAdaptation, Parts

WORK = "service.worker.lens:LensWork"

TITLES: Mapping[Kind, str] = {
    "field": "brightness over the image",
    "spectrum": "sharpness and noise",
    "quantiles": "contrast",
}

_LINES = ("the members", "these scans", "through the lens")
# Title, what is across, where, and a sentence.
_FIGURES: Mapping[Kind, tuple[str, str, tuple[float, ...], str]] = {
    "quantiles": (
        "Contrast of these scans",
        "share of the pixels that are darker",
        tuple(map(float, LEVELS)),
        "Intensities from the darkest to the brightest pixels, in deviations of an image from its mean.",
    ),
    "spectrum": (
        "Sharpness and noise of these scans",
        "logarithm of cycles per pixel, fine detail at the right",
        tuple(map(float, np.log(CENTRES))),
        "Logarithm of the power of each fineness of detail: blur lowers the right end, noise lifts it.",
    ),
}


def curves_of(kind: Kind, rows: Sequence[Sequence[float]]) -> Section:
    """Mean features of a kind, each a mean over channels: of the members, of scans, and through a lens.

    There may be no row of the last. Raises TypeError and ValueError for what are no such rows.
    """
    title, across, places, said = _FIGURES[kind]
    named = zip(_LINES[: len(rows)], rows, strict=True)
    lines = tuple(Line(name=name, values=tuple(map(float, row))) for name, row in named)
    if any(len(line.values) != len(places) for line in lines):
        raise ValueError(f"expected rows of {len(places)} values")
    return Section(title=title, sentences=(said,), body=Lines(across=across, places=places, lines=lines))


def has_lens(artefact: Artefact, parts: Parts) -> bool:
    """Whether a lens can be fitted to a cohort for it: its scans are known, there is a network to answer, and
    of a classifier there is a record of what its members practised.
    """
    offered = artefact.manifest
    return (
        FINGERPRINT in offered.files
        and parts.global_model is not None
        and offered.part_of is None
        and offered.adapted_to is None
        and (offered.task.kind == "segmentation" or PLAYBOOK in offered.files)
        and not offered.task.regions
    )


def has_lens_of_one_scan(artefact: Artefact, parts: Parts) -> bool:
    """Whether a lens can be fitted to one scan for it. Members do not practise that for a classifier."""
    return artefact.manifest.task.kind == "segmentation" and has_lens(artefact, parts)


def through_lens(own: HospitalAdaptation[Any], artefact: Artefact) -> HospitalAdaptation[Any]:
    """The adaptation of an artefact's kind, with a lens before whatever else moves."""

    def sections(result: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
        seen = *_lens(result.get("lens"), _one_group(artefact)), *_curves(result.get("curves"))
        return (*seen, *own.sections(result, epochs))

    return replace(own, work=WORK, sections=sections)


def _one_group(artefact: Artefact) -> tuple[str, ...]:
    """What a fingerprint of one group does not know; nothing of one of several, or that cannot be read."""
    try:
        factor = fingerprint_of(artefact).factor
    except (StoreError, OSError):
        return ()
    if factor is None:
        return ()
    return (
        "This model knows the scans of one group alone, not how far hospitals are apart. In place of that, "
        f"{figure(factor)} times the variance between the patients of that group counts as 1: more than "
        "hospitals were apart where it was measured. A mild shift is not seen.",
    )


def _lens(found: Any, known: tuple[str, ...]) -> tuple[Section, ...]:
    """How far the scans are from the members' by what the lens measures, before it and through it."""
    try:
        before, after, shares = found["before"], found["after"], found["shares"]
        rows = tuple(
            Row(
                name=TITLES[kind],
                cells=(
                    figure(float(before[kind])),
                    figure(float(after[kind])),
                    figure(100 * float(shares.get(kind, 0.0))),
                ),
            )
            for kind in TITLES
        )
        negated, network = bool(found["negated"]), found.get("network")
        through = None if network is None else [number(each) for each in network]
    except (KeyError, TypeError, ValueError):
        return ()
    said = [
        "The squared distance of these scans from the members' own, before any network sees them: 1 is usual "
        "between hospitals. As they are, through the lens, and how much of the way the lens moves them, in "
        "percent.",
        *known,
    ]
    if negated:
        said.append("These scans look inverted: the lens negates those that do, first.")
    is_larger = found.get("made") == "scale"
    if through is not None and len(through) == 2:
        where = "in the central part" if is_larger else "through the lens"
        said.append(
            f"The network itself saw a distance of {figure(through[0])}, and {where} it sees "
            f"{figure(through[1])}."
        )
    title = "What the lens does to these scans"
    columns: tuple[str, ...] = ("what", "as they are", "through the lens", "moved")
    if is_larger:
        title, columns = "How large these scans show things", ("what", "whole slices", "their central part")
        rows = tuple(Row(name=row.name, cells=row.cells[:2]) for row in rows)
        said[0] = (
            "The squared distance from the members' own scans, before any network sees them: 1 is usual "
            "between hospitals. The central part of each slice is as large as what the members' slices show."
        )
    body = Table(columns=columns, figures=len(columns) - 1, rows=rows)
    return (Section(title=title, sentences=tuple(said), body=body),)


def _curves(found: Any) -> tuple[Section, ...]:
    """The members' mean features, and the scans' as they are and through the lens."""
    made = []
    for kind in _FIGURES:
        with suppress(KeyError, TypeError, ValueError):
            section = curves_of(kind, found[kind])
            made.append(section.model_copy(update={"title": f"{section.title}, before and through the lens"}))
    return tuple(made)
