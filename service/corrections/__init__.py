"""Corrections: what a person made of an answer, stored with its scan and measured against what was served.

found = find_answer(session, "north", request, ...)      the answer that the mask is of
find_viewed(context, image)                              that of a scan which a viewer sent
keep(context, found, Sent(mask, scan, ...))              scan and mask in a cohort of corrections, and a row
kept_scans(session, "north", digests)     the scans that were answered and lie in a cohort of the hospital
page(session, "north", "organ")                          the newest first, with their figures
summary(session, "north", "organ")                       how many, and how much, by version, scanner and month

A correction belongs to one answer, by the id of its request. Bad masks are corrected more often than good
ones, so that figures of corrections are not those of all answers.
"""

from service.corrections.intake import (
    Desk,
    Found,
    Kept,
    Sent,
    find_answer,
    find_series,
    find_viewed,
    keep,
    kept_scans,
    next_viewed,
)
from service.corrections.rows import (
    CorrectionFigures,
    CorrectionView,
    delete_before,
    delete_of,
    get,
    page,
    remove,
    summary,
)

__all__ = [
    "CorrectionFigures",
    "CorrectionView",
    "Desk",
    "Found",
    "Kept",
    "Sent",
    "delete_before",
    "delete_of",
    "find_answer",
    "find_series",
    "find_viewed",
    "get",
    "keep",
    "kept_scans",
    "next_viewed",
    "page",
    "remove",
    "summary",
]
