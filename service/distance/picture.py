"""The picture of `locum distance`: contrast, sharpness and brightness of the members and of the scans."""

from __future__ import annotations

import math

from markupsafe import Markup

from model_store.lens import CELLS, Feature, Fingerprint, Kind
from service.adaptation.card.charts import cells, file_of, lines
from service.distance.report import Report
from service.jobs.sections import Lines
from service.kinds.lens import TITLES, curves_of

_CURVES: tuple[Kind, ...] = ("quantiles", "spectrum")


def drawn(report: Report) -> str:
    """An SVG file of means over all scans, without a pixel of one. The band is what is natural."""
    known = report.fingerprint
    figures = [_curve(kind, known, report.seen[kind].mean) for kind in _CURVES]
    fields = ("the members", known.field.mean_CE), ("these scans", report.seen["field"].mean)
    grids = [(name, _plane(field)) for name, field in fields]
    figures.append((f"Mean {TITLES['field']}", cells(grids)))
    return file_of(figures)


def _curve(kind: Kind, known: Fingerprint, ours: Feature) -> tuple[str, Markup]:
    theirs = known.of_kind(kind)
    section = curves_of(kind, [each.mean(axis=0).tolist() for each in (theirs.mean_CE, ours)])
    assert isinstance(section.body, Lines)
    return section.title, lines(section.body, math.sqrt(theirs.tau))


def _plane(field_CE: Feature) -> list[list[float]]:
    """The cells [down][across] of slices, means over channels; of volumes, along their last axis, too."""
    cells_of = field_CE.mean(axis=0).reshape(CELLS, CELLS, -1)
    # A volume is [X, Y, Z], a slice [H, W].
    plane = cells_of.mean(axis=-1).T if cells_of.shape[-1] > 1 else cells_of[..., 0]
    found: list[list[float]] = plane.tolist()
    return found
